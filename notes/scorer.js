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
    if (/README|reports|changes/.test(page)) return score - 3;
    return score + (/^(how-to|with|running)\//.test(page) && !/testing|recipes|migrating/.test(page) ? 3 : 0);
  },
};
