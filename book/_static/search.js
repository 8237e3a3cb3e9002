"use strict";
// The field of the search: what it finds, in the theme's dialog (Ctrl+K) and on search.html. What is
// found is decided in searching.js; a message of the error clinic is recognised by finding.js. These
// and the index are loaded when somebody is about to search, as scripts: a page that is opened as a
// file may not read another file.
(() => {
  const BEST = 3, IN_DIALOG = 3, ON_PAGE = 5, MOST = 50; // hits: of all, then of a group, shown and in a fold
  const GROUPS = { chapters: /\/\d\d_/, errors: /\/errors/, glossary: /glossary/, tools: /./ }; // of pages
  const PAUSE = 80; // milliseconds without a letter until what was typed is looked for
  const MOST_LETTERS = 2000; // that are asked: a log is for the error clinic
  const MESSAGE = 20; // letters that a message of the error clinic has at least
  const LIKE_AN_ERROR = /error|exception|warning|traceback|fail|expected|cannot|can['’]t|invalid|unable/i;
  const root = document.documentElement.dataset.content_root;
  const CLINIC = "book/errors.html";

  const scripts = new Map();
  function load(...names) {
    return Promise.all(names.map((name) => {
      // The error clinic's page has some of them already.
      if (!scripts.has(name) && !one(`script[src*="/${name}"]`))
        scripts.set(name, new Promise((done, failed) => {
          const script = { src: `${root}_static/${name}`, onload: done, onerror: failed };
          document.head.append(Object.assign(make("script"), script));
        }));
      return scripts.get(name);
    }));
  }

  let search, clinic, asker;
  async function ready() {
    await load("searching.js", "search_index.js");
    search ??= searching(searchIndex.pages, document.documentElement.lang, searchIndex.also);
  }

  const hasClinic = () => searchIndex.pages.some(([page]) => page === CLINIC); // a fork may have none

  /** All hits, first the entry that knows the message, if one does; `whole`: they have all words;
   *  `meant`: the query whose hits they are, if that has a typing error. */
  async function find(query) {
    await ready();
    const found = search.find(query);
    if ((query.length < MESSAGE && !LIKE_AN_ERROR.test(query)) || !hasClinic()) return found;
    await load("finding.js", "error_rules.js");
    clinic ??= finding(errorRules);
    const [known] = clinic.find(query);
    const entry = known && search.entry(known.id, query);
    if (!entry) return found;
    const others = found.hits.filter(({ page, anchor }) => page !== entry.page || anchor !== entry.anchor);
    return { hits: [{ ...entry, known: true }, ...others], whole: true };
  }

  // --- showing ---

  const phrase = (name, gaps = {}) => filled(searchIndex.words[name], gaps);

  const pieces = (parts) => parts.map(([text, found]) => (found ? make("mark", "", text) : text));

  const groupOf = ({ page }) => Object.keys(GROUPS).find((name) => GROUPS[name].test(page));

  function shown(hit) {
    const link = linkTo(`${hit.page}#${hit.anchor}`, ...pieces(hit.heading));
    const heading = hit.heading.map(([text]) => text).join("");
    const page = hit.title.endsWith(heading) ? hit.title.slice(0, -heading.length).replace(/^(?=\d)/, "Chapter ") : hit.title; // of the page itself its number
    const where = hit.known ? `${page} · ${phrase("known")}` : page;
    const { code, parts } = hit.excerpt;
    const excerpt = make(code ? "code" : "span", "", ...pieces(parts));
    return make("li", "", make("p", "hit-heading", link), make("p", "hit-page", where), make("p", "hit-text", excerpt));
  }

  function linkTo(address, ...parts) {
    return Object.assign(make("a", "", ...parts), { href: `${root}${address}` });
  }

  function advice(query) {
    if (!LIKE_AN_ERROR.test(query) || !hasClinic()) return make("p", "", phrase("fewer"));
    const [before, after] = phrase("paste").split("{box}");
    return make("p", "", before, linkTo(`${CLINIC}#log`, phrase("box")), after);
  }

  const asking = (query, says) => linkTo(`search.html?q=${inAddress(query)}`, says);
  const elsewhere = () => searchIndex.elsewhere.map(([says, address]) => make("p", "", linkTo(address, says)));
  const examples = () => phrase("examples").split("|").map((query) => make("p", "", asking(query, query)));

  function attach(form, most) {
    const input = one("input", form);
    input.maxLength = MOST_LETTERS;
    const says = make("p", "search-says");
    says.setAttribute("role", "status");
    const list = make("div");
    const more = make("div", "search-more");
    const advised = make("div", "search-advice");
    const box = make("div", "search-found", says, advised, list, more);
    box.hidden = true;
    form.after(box);

    function show(query, { hits, whole, meant }) {
      const count = hits.length;
      if (box.contains(document.activeElement)) input.focus(); // its hit is about to go
      says.textContent = phrase(!query ? "empty" : !count ? "none" : meant ? "meant" : !whole ? "part" : count > MOST ? "many" : "some", { count, query, meant, most: MOST });
      advised.replaceChildren(...(!query ? examples() : count && whole ? [] : [advice(query), ...(count ? [] : elsewhere())]));
      const [best, others] = [hits.slice(0, BEST), hits.slice(BEST)];
      const groups = [...new Set(others.map(groupOf))].map((name) => [name, others.filter((hit) => groupOf(hit) === name)]);
      if (count) groups.unshift(["best", best]);
      list.replaceChildren();
      more.replaceChildren();
      for (const [name, hits] of groups) {
        const listOf = (from, to) => make("ol", "search-hits", ...hits.slice(from, to).map(shown));
        list.append(make("p", "hit-group", phrase(name)), listOf(0, most));
        if (hits.length > most && most === ON_PAGE)
          list.append(make("details", "", make("summary", "", phrase("rest")), listOf(most, MOST)));
      }
      if (most === IN_DIALOG && count) more.append(make("p", "search-keys", phrase("keys")));
      if (most === IN_DIALOG && groups.some(([, hits]) => hits.length > most))
        more.append(asking(query, phrase("all", { count })));
    }

    let waiting, asked, looking;
    function look() {
      const query = input.value.trim().slice(0, MOST_LETTERS);
      return query === asked ? looking : (looking = answer((asked = query)));
    }

    async function answer(query) {
      sessionStorage.setItem("query", query);
      if (!search) says.textContent = "Loading the index …";
      box.hidden = false;
      let found = { hits: [], whole: true };
      try {
        await ready();
        if (query) found = await find(query);
      } catch {
        says.textContent = "The index could not be loaded. Reload the page.";
        return;
      }
      if (query !== asked) return; // more was typed meanwhile
      show(query, found);
      if (most === ON_PAGE) note(query ? `?q=${inAddress(query)}` : location.pathname, history.state);
    }

    input.addEventListener("focus", () => {
      if (!input.value) {
        input.value = sessionStorage.getItem("query") ?? ""; // of the page before, whose hit was no answer
        input.select();
      }
      look();
    });
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(look, PAUSE);
    });
    box.parentElement.addEventListener("keydown", (event) => step(event, input, box));
    return { input, look };
  }

  /** What is nearest to what somebody says, as the terminal has it, or what decides, for another page's script. */
  window.nearestHits = async (said) => {
    await Promise.all([ready(), load("nearest.js", "error_words.js")]);
    asker ??= nearest(errorWords);
    const near = asker.find(said).map((address) => search.at(address, said)).filter(Boolean);
    return { hits: make("ol", "search-hits", ...near.map(shown)), decides: asker.decides(said) };
  };

  /** The arrow keys go from the field through the hits and back. */
  function step(event, input, box) {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const stops = [input, ...all("a:not(details:not([open]) a), summary", box)];
    const at = stops.indexOf(document.activeElement);
    if (!way || at < 0) return;
    event.preventDefault();
    stops[Math.min(Math.max(at + way, 0), stops.length - 1)].focus();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const dialog = one("#pst-search-dialog form");
    if (dialog) {
      // Back to the button that opened it: the theme forgets the one of the head.
      let opener;
      for (const button of all(".search-button__button")) button.addEventListener("click", () => { opener = button; });
      dialog.parentElement.addEventListener("close", () => setTimeout(() => {
        opener?.focus();
        opener = null;
      }));
      const { input, look } = attach(dialog, IN_DIALOG);
      dialog.addEventListener("submit", async (event) => {
        event.preventDefault();
        await look(); // what was typed a moment ago
        if (matchMedia("(hover: none)").matches) input.blur(); // a phone's keyboard covers the hits
        else one(".search-hits a", dialog.parentElement)?.click();
      });
    }
    for (const button of all(".search-button__button")) button.addEventListener("pointerenter", ready);
    const form = one(".bd-search-container form");
    if (!form) return;
    const { input, look } = attach(form, ON_PAGE);
    form.addEventListener("submit", (event) => event.preventDefault());
    input.value = new URLSearchParams(location.search).get("q") ?? "";
    input.focus();
    look().then(() => scrollTo(0, history.state?.y ?? 0)); // where it was before a hit was followed
    addEventListener("pagehide", () => note("", { y: scrollY }));
  });
})();
