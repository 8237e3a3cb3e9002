"use strict";
// The page book/errors.md: the box for a log, and the list that filters. What is found in a log is
// decided in finding.js; the words are in the page itself, where they are translated. A log stays in
// its field: it is neither sent nor kept, and no link holds it.
(() => {
  const MOST_LINES = 4, BEFORE = 60, AFTER = 240; // of a log, and around the words that matched
  const TYPED = 20, PAUSE = 300; // so many letters may be typed; milliseconds until they are read
  const { find, nearest, shown } = finding(errorRules);
  const one = (selector, around = document) => around.querySelector(selector);
  const all = (selector, around = document) => [...around.querySelectorAll(selector)];

  function make(tag, kind, ...parts) {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    element.append(...parts);
    return element;
  }

  function phrase(name, gaps = {}) {
    const text = one(`[data-phrase="${name}"]`).textContent;
    return text.replace(/\{(\w+)\}/g, (gap, key) => gaps[key] ?? gap);
  }

  // --- the list: each entry by its id ---

  const entries = new Map(all(".error-index > li").map((item) => {
    const link = one(".error-message a", item);
    return [decodeURIComponent(link.hash.slice(1)), { item, link }];
  }));

  const linkTo = (id) => entries.get(id).link.cloneNode(true);
  const copyOf = (id, part) => [...one(`.error-${part}`, entries.get(id).item).cloneNode(true).childNodes];

  function linkWith(id, words) {
    const link = linkTo(id);
    link.replaceChildren(words);
    return link;
  }

  // --- the box for a log ---

  const log = one("#log");
  const found = one("#found");
  let answered = "";

  /** What the order of the answers rests on: the first error, then what may follow from it. */
  function reasons(match, place, matches) {
    const isError = ({ kind }) => kind === "error" || kind === "silent"; // of which the log has words
    const errors = matches.filter(isError).length;
    let reason = match.kind;
    if (isError(match)) reason = place > 0 ? "later" : errors > 1 ? "first" : match.over.length ? "" : "only";
    else if (match.kind === "follows" && errors === 0) reason = "follows-alone";
    const parts = [make("strong", "", phrase("why")), reason && ` ${phrase(reason)}`];
    for (const id of match.over) {
      const [before, after] = phrase("over").split("{other}");
      parts.push(` ${before}`, linkWith(id, id), after);
    }
    return make("p", "match-why", ...parts);
  }

  /** A line of the log, the words that matched marked, and not much around them. */
  function logLine(number, line, words) {
    const { text, marks } = shown(line, words);
    const [first, last] = [marks[0]?.[0] ?? 0, marks.at(-1)?.[1] ?? 0];
    const start = first > BEFORE ? first - BEFORE : 0;
    const end = Math.min(text.length, Math.max(start + AFTER, Math.min(last, start + 4 * AFTER)));
    const code = make("code", "", start > 0 ? "… " : "");
    let at = start;
    for (const [from, to] of marks.filter(([from]) => from < end)) {
      code.append(text.slice(at, from), make("mark", "", text.slice(from, Math.min(to, end))));
      at = Math.min(to, end);
    }
    code.append(text.slice(at, end), end < text.length ? " …" : "");
    return make("p", "log-line", make("span", "", phrase("line", { line: number })), code);
  }

  function answer({ id, ...match }, place, matches, lines) {
    const item = make("li", `match ${match.kind}`, make("h2", "", linkTo(id)));
    item.append(reasons(match, place, matches));
    for (const [number, words] of [...match.words].slice(0, MOST_LINES))
      item.append(logLine(number, lines[number - 1], words));
    return withHelp(item, id);
  }

  function withHelp(item, id) {
    item.append(make("p", "", ...copyOf(id, "cause")));
    item.append(make("p", "", make("strong", "", phrase("do")), " ", ...copyOf(id, "fix")));
    item.append(make("p", "match-more", linkWith(id, phrase("more"))));
    return item;
  }

  function showFound(text, matches) {
    const lines = text.split("\n");
    const items = matches.map((match, place) => answer(match, place, matches, lines));
    found.replaceChildren(make("ol", "matches", ...items));
    return phrase(matches.length === 1 ? "found-one" : "found-more", { count: matches.length });
  }

  function showNearest(ids) {
    const items = ids.map((id) => {
      const near = make("p", "match-why", phrase("near"));
      return withHelp(make("li", "match near", make("h2", "", linkTo(id)), near), id);
    });
    const ask = [...one(".ask-others").cloneNode(true).childNodes];
    found.replaceChildren(make("ul", "matches", ...items), make("div", "ask-others", ...ask));
    return phrase(ids.length ? "none-near" : "none");
  }

  function showAnswer() {
    const text = log.value;
    if (text === answered) return;
    answered = text;
    const matches = find(text);
    if (!text.trim()) {
      found.replaceChildren();
      one("#log-says").textContent = "";
    } else
      one("#log-says").textContent =
        matches.length ? showFound(text, matches) : showNearest(nearest(text));
  }

  let waiting;
  log.addEventListener("input", () => {
    clearTimeout(waiting);
    const typed = Math.abs(log.value.length - answered.length) < TYPED;
    if (typed) waiting = setTimeout(showAnswer, PAUSE);
    else showAnswer();
  });

  // --- the list filters ---

  const filter = one("#index-filter");
  const QUOTES = Object.entries(errorRules.quotes).filter(([mark]) => mark.length === 1);
  const plain = (text) =>
    QUOTES.reduce((plain, [mark, letter]) => plain.replaceAll(mark, letter), text).toLowerCase();
  for (const { id, patterns } of errorRules.errors) {
    const entry = entries.get(id);
    const words = ["message", "cause", "facts"].map((part) => one(`.error-${part}`, entry.item));
    const pieces = patterns.map((pattern) => pattern.join(" "));
    entry.text = plain([id, ...words.map((part) => part?.textContent ?? ""), ...pieces].join(" "));
  }

  function showFiltered() {
    const words = plain(filter.value).split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { item, text } of entries.values()) {
      item.hidden = !words.every((word) => text.includes(word));
      count += !item.hidden;
    }
    for (const list of all(".error-index"))
      list.closest("section").hidden = words.length > 0 && !one("li:not([hidden])", list);
    const says = one("#index-filter-says");
    if (count) {
      const name = words.length ? "some" : "all";
      says.textContent = phrase(name, { count, all: entries.size });
    } else says.replaceChildren(phrase("nothing"), " ", toTheBox());
  }

  function toTheBox() {
    const link = make("a", "", one("label[for=log]").textContent);
    link.href = "#log";
    link.addEventListener("click", () => setTimeout(() => log.focus()));
    return link;
  }

  filter.addEventListener("input", showFiltered);
  filter.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    filter.value = "";
    showFiltered();
  });

  // --- start: empty, whatever the browser remembers ---

  function start() {
    log.value = filter.value = "";
    showAnswer();
    showFiltered();
  }

  addEventListener("pageshow", (event) => event.persisted || start());
  start();
  for (const field of all(".clinic-field")) field.hidden = false;
})();
