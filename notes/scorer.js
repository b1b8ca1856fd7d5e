// The order of the site's search: pages that answer a question come before those that only mention its words.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => {
    if (/README|changes|examples|truth|running\/gpu/.test(page)) return score - 6;
    if (/^start/.test(page)) return score + (/test-your-loss/.test(page) ? 3 : -3);
    if (/testing/.test(page)) return score + 1;
    if (/recipes|migrating|trainers|clip-gradients/.test(page)) return score + 2.5;
    return score + ({ "how-to": 4, with: 3, running: 3, training: 2 }[page.split("/")[0]] || 0);
  },
};
