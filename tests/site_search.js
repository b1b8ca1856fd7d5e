// The site's own search, without a browser: node site_search.js SITE QUESTION … prints each question's hits as JSON.
const fs = require("fs"), vm = require("vm");
const [site, ...questions] = process.argv.slice(2);
const page = { documentElement: { dataset: { content_root: "./" } }, createElement: () => ({}), getElementById: () => null };
const given = { document: page, DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false };
const window = vm.createContext({ ...given, URL, console, _: (text) => text, _ready() {}, addEventListener() {} });
window.window = window;
for (const file of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${file}`, "utf8").replace("const Search =", "var Search ="), window);
const hits = (question) => window.Search._performSearch(...window.Search._parseQuery(question)).reverse();
console.log(JSON.stringify(questions.map((question) => hits(question).map(([name]) => name))));
