"use strict";
// Finds sections: by their text as it is, so what one sees on a page is found, brackets and underscores
// included, in any language; and by what people ask. `also` has as what else a word stands in the book.
// A megabyte takes milliseconds.
const searching = (pages, language, others) => {
  const also = { __proto__: null, ...others };
  const MESSAGE = 5, NAME = 0.5; // in the error clinic: its own words, a name that a chapter explains
  const PHRASE = 3, HEADING = 3, TITLE = 0.5; // what a match there counts beside one in the text
  const TOP = 2; // what a match in the title or the name of a chapter counts for its beginning
  // What a question counts that is like the query, and how soon less; then of a query with more than LONG
  // words, such as a thread's title: few of its words say what it is about
  const ASKED = [4, 6], SHARP = [2, 1.5], LONG = 4;
  const TYPOS = 5; // words that nobody has: a text with more has no typing errors, and each takes long
  const COMMON = 0.4; // a word in more than this share of the sections need not be in a hit
  const MOST = 6; // occurrences of a word that count
  const EXCERPT = 220, BEFORE = 60; // letters of it, and so many before what matched

  // Of a question, what says nothing of its subject.
  const STOP = new Set(`a an the of in on at to for from with by and or is are be do does did can should i my your me we it its
    this that these how what why when where which who vs than then so not no if after before while during use using used make get
    give need work works pytorch torch example tutorial way best good about issue issues question questions problem problems always
    just case really correctly right want trying try help please anyone there any also am has have had been will would could as but`.split(/\s+/));

  // One letter for each, so that a place in the one text is the place in the other.
  const fold = (text) => text.toLowerCase().replace(/[‘’`]/g, "'").replace(/[“”]/g, '"')
    .replace(/[_–]/g, "-").replace(/[\t\n\f]/g, " ").replace(/iz(?=[aei])/g, "is");
  const brief = (text) => text.replace(/\b(an?|the|my|your) /g, "");
  const isLetter = (text, at) => {
    const code = text.charCodeAt(at);
    return (code > 96 && code < 123) || (code > 47 && code < 58);
  };

  const ASKS_WHAT = /^(?:(?:what(?:'s| is| are| does)|define|meaning of) (?:an? |the )?(.+?)(?: mean| stand for)?|(.+) (?:meaning|definition))[?]?$/;
  const telling = (word) => word && !STOP.has(word);
  const known = new RegExp(`(${Object.keys(also).filter((word) => /\p{Script=Han}/u.test(word)).sort((a, b) => b.length - a.length).join("|")})`);
  const segmenter = Intl.Segmenter && new Intl.Segmenter(language, { granularity: "word" });
  /** A sentence without blanks, as Chinese writes it, has words all the same. */
  function split(word) {
    if (!segmenter || !/\p{Script=Han}/u.test(word)) return [word];
    return word.split(known).flatMap((part) => (also[part] ? [part] :
      [...segmenter.segment(part)].filter((part) => part.isWordLike).map((part) => part.segment)));
  }

  const sections = pages.flatMap(([page, title, parts]) => {
    const clinic = /errors_\w+.html$/.test(page); // whose message stands below the heading
    return parts.map(([heading, anchor, weight, text, asked], place) => ({
      page, title, heading, anchor, weight, text, clinic,
      defines: /glossary.html$/.test(page) ? fold(heading).split(/ ?[()]/) : [], // the term, its short form
      top: place > 0 ? 0 : /\/\d\d_rung/.test(page) ? 1.2 : /\/\d\d_/.test(page),
      asked: asked.map(fold)
        .map((text) => ({ text, length: text.split(" ").flatMap(split).filter(telling).length })),
      folded: {
        heading: fold(clinic ? `${heading} ${text.split("\f")[0]}` : heading),
        title: fold(`${title} ${page.replace(/.*\/|\.html$/g, "")}`),
        text: fold(text),
      },
    }));
  });
  const mean = sections.reduce((sum, { text }) => sum + text.length, 0) / sections.length;

  // --- what is asked for ---

  /** The words of a query. A plural finds the singular too: a word is found where it begins one. */
  function termsOf(query) {
    const words = query.split(" ").filter(Boolean).flatMap(split)
      .map((word) => word.replace(/^["'(\[{,;:!?.]+|["')\]},;:!?.]+$/g, "") || word);
    const subject = words.filter((word) => telling(word) && (also[word] || !/^[a-z]{1,2}$/.test(word)));
    return [...new Set(subject.length ? subject : words)].map((word) => {
      const text = /[a-z]{3}[^s\W]s$/.test(word) ? word.slice(0, -1) : word;
      const stem = /^[a-z]{4,}(?:ing|ed|es|e|y)$/.test(word) ? word.replace(/(?:ing|ed|es|e|y)$/, "") : text;
      return { text, texts: [...new Set([stem, text.replace(/-/g, " "), ...(also[word] ?? also[text] ?? [])])], whole: word.length < 3 };
    });
  }

  /** The places where a term begins a word, each with its end. */
  function* places({ texts, whole }, text) {
    for (const term of texts)
      for (let at = text.indexOf(term); at >= 0; at = text.indexOf(term, at + 1)) {
        const end = at + term.length;
        if (!(isLetter(term, 0) && isLetter(text, at - 1)) && !(whole && isLetter(text, end))) yield [at, end];
      }
  }

  // --- finding ---

  function count(term, text, most) {
    let count = 0;
    for (const [, end] of places(term, text)) count += isLetter(text, end) ? 0.7 : 1;
    return Math.min(count, most);
  }

  function look(term) {
    term.found = sections.map(({ folded, asked }) => ({
      asked: asked.map(({ text }) => count(term, text, 1)),
      text: count(term, folded.text, MOST),
      heading: count(term, folded.heading, 1),
      title: count(term, folded.title, 1),
    }));
    const inAny = term.found.filter(({ text, heading, title, asked }) => text || heading || title || asked.some(Boolean)).length;
    term.common = inAny > COMMON * sections.length;
    term.rare = Math.log(1 + sections.length / inAny); // Infinity: it is nowhere
    return term;
  }

  function score(section, number, query, terms) {
    const { heading, text } = section.folded;
    const words = heading.split(/[^\p{L}\p{N}]+/u).filter(telling).length || 1;
    const named = terms.filter(({ found }) => found[number].heading).length;
    const share = terms.filter(({ found }) => found[number].heading || found[number].title).length / terms.length;
    const length = 0.25 + (0.75 * text.length) / mean;
    let [score, all] = [0, 0];
    for (const { found, rare } of terms) {
      const { heading, title, text } = found[number];
      const above = HEADING * heading * (named * share / words) ** 0.5 + (section.top * TOP * share || TITLE) * title;
      score += rare * (text / (text + 1.2 * length) + above);
      all += rare;
    }
    if (query.includes(" ")) {
      const factor = (section.clinic ? MESSAGE : PHRASE) * (query.length / heading.length) ** 0.5;
      const isNamed = section.clinic ? heading.includes(query) : brief(heading).includes(brief(query));
      if (isNamed) score += factor * all;
      else if (text.includes(query)) score += all;
    } else if (section.clinic && /\w[-.]\w/.test(query)) score *= NAME;
    return score * section.weight + ASKED[+(terms.length > LONG)] * all * likeness(section, number, terms, all);
  }

  /** How near a query is to the nearest question that the section answers: 1 if it is that one. */
  function likeness(section, number, terms, all) {
    return Math.max(0, ...section.asked.map(({ length }, which) => {
      const shared = terms.filter(({ found }) => found[number].asked[which]);
      const weight = shared.reduce((sum, { rare }) => sum + rare, 0) / all;
      return (weight * Math.min(1, shared.length / length) ** 0.5) ** SHARP[+(terms.length > LONG)];
    }));
  }

  const plain = (asked) => fold(asked.replace(/\s+/g, " ")).trim();
  const isRare = ({ rare, common }) => rare < Infinity && !common;
  const isIn = ({ found }, number) => found[number].text > 0 || found[number].heading > 0 || found[number].asked.some(Boolean);

  /** Parts of words that are nowhere: a version's name, a path. */
  function partsOf(terms) {
    const names = terms.filter(({ rare }) => rare === Infinity).map(({ text }) => text);
    const parts = names.flatMap((name) => name.split(/[^\p{L}\p{N}]+/u).filter((part) => part !== name));
    return termsOf(parts.filter((part) => part.length > 2).join(" ")).map(look);
  }

  /** The commonest word with one letter more, less or other, or with two that changed places. */
  function corrected(word) {
    const forms = [...word].flatMap((letter, at) => {
      const [before, after] = [word.slice(0, at), word.slice(at + 1)];
      return [`${before}[a-z]?${after}`, `${before}[a-z]${letter}${after}`, before + after.slice(0, 1) + letter + after.slice(1)];
    });
    const near = new RegExp(`(?<![a-z])(?:${forms.join("|")})(?![a-z])`, "g");
    const known = { __proto__: null };
    for (const { folded } of sections)
      for (const [found] of folded.text.matchAll(near)) known[found] = (known[found] ?? 0) + 1;
    return Object.keys(known).sort((a, b) => known[b] - known[a])[0] ?? word;
  }

  /** The sections with words of a query, the best first: a score counts by the share of words that are there. */
  function find(asked, meant) {
    const query = plain(asked);
    const typed = termsOf(query).map(look);
    const unknown = typed.filter(({ text, rare }) => rare === Infinity && /^[a-z]{3,40}$/.test(text));
    const right = (unknown.length > TYPOS ? [] : unknown).reduce((query, { text }) => query.replace(text, corrected(text)), query);
    if (right !== query && !meant) return find(right, right);
    const terms = [...typed, ...partsOf(typed)].filter(({ rare }) => rare < Infinity);
    const needed = terms.some(isRare) ? terms.filter(isRare) : terms;
    const [, what, term = what] = query.match(ASKS_WHAT) ?? [];
    const hits = [];
    for (const [number, section] of sections.entries()) {
      const has = (term) => isIn(term, number) || term.found[number].title > 0;
      if (needed.some((term) => isIn(term, number)))
        hits.push({ section, all: needed.filter(has).length, score: score(section, number, query, terms), first: section.defines.includes(term) });
    }
    const most = Math.max(...hits.map(({ all }) => all));
    const best = hits.sort((a, b) => b.first - a.first || b.score * b.all - a.score * a.all);
    // A term alone has its definition among the best.
    const at = best.findIndex(({ section }) => section.defines.some((name) => name.replace(/-/g, " ") === query.replace(/-/g, " ")));
    if (at > 2) best.splice(2, 0, ...best.splice(at, 1));
    const whole = most === needed.length && terms.length === typed.length;
    return { hits: best.map(({ section }) => hit(section, query, needed)), whole, meant };
  }

  // --- showing: text as pairs of a piece and whether it matched ---

  const hit = (section, query, terms) => ({
    ...section,
    heading: marked(section.heading, query, terms),
    get excerpt() { return excerpt(section, query, terms); },
  });

  /** Where the query stands, and where its words do; the whole of each word. */
  function matches(text, query, terms) {
    const found = [];
    for (const term of [{ texts: query ? [query] : [] }, ...terms])
      for (let [at, end] of places(term, text)) {
        while (isLetter(text, end)) end++;
        if (!found.some(([start, stop]) => at < stop && end > start)) found.push([at, end]);
      }
    return found.sort(([a], [b]) => a - b);
  }

  function marked(text, query, terms) {
    const parts = [];
    let from = 0;
    for (const [start, end] of matches(fold(text), query, terms)) {
      parts.push([text.slice(from, start), false], [text.slice(start, end), true]);
      from = end;
    }
    return [...parts, [text.slice(from), false]].filter(([piece]) => piece);
  }

  /** Of the paragraph or the code that has most of a query, what stands around it. */
  function excerpt({ text, defines }, query, terms) {
    const worth = (block) => terms.reduce((sum, term) => sum + (places(term, block).next().done ? 0 : term.rare), 0);
    const blocks = text.split("\f").map((block) => ({ block, worth: worth(fold(block)) + fold(block).includes(query) }));
    // Prose is easier to read in a list of hits, but for who asks in code.
    const prose = /[_.(=]/.test(query) ? [] : blocks.filter(({ block }) => !block.startsWith("\t"));
    const best = defines.length ? blocks[0].block : (prose.length ? prose : blocks).reduce((best, next) => (next.worth > best.worth ? next : best)).block;
    const code = best.startsWith("\t");
    const indent = code ? Math.min(...best.slice(1).split("\n").map((line) => line.search(/\S/))) : 0;
    const block = code ? best.slice(1).replace(new RegExp(`^ {${indent}}`, "gm"), "") : best;
    const start = defines.length ? 0 : startOf(block, matches(fold(block), query, terms)[0]?.[0] ?? 0);
    const end = start + EXCERPT < block.length ? block.slice(0, start + EXCERPT).search(/\s\S*$/) : block.length;
    const parts = marked(block.slice(start, end), query, terms);
    return { code, parts: [[start > 0 ? "… " : "", false], ...parts, [end < block.length ? " …" : "", false]] };
  }

  /** Where the sentence or the line begins, if that is near, else a word. */
  function startOf(block, at) {
    const near = Math.max(0, at - BEFORE);
    const before = block.slice(near, at);
    return near && near + Math.max(before.search(/(?<=[.?] |\n)(?!.*([.?] |\n))/s), before.indexOf(" ") + 1);
  }

  /** The first section of which something is true, as a hit. */
  function section(is, asked) {
    const found = sections.find(is);
    const query = plain(asked);
    return found && hit(found, query, termsOf(query).map(look).filter(isRare));
  }

  const entry = (id, asked) => section(({ clinic, anchor }) => clinic && anchor === id, asked);

  /** What an address such as notebooks/page#anchor leads to, as a hit. */
  function at(address, asked) {
    const [name, id] = address.split("#");
    return section(({ page, anchor }) => page === `${name}.html` && (!id || anchor === id), asked);
  }

  return { find, entry, at };
};
