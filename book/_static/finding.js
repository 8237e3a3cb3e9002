"use strict";
// find of src/torchclinic/errors/finding.py, by the rules that errors.rules() gives; what they mean is said
// there. Tests compare both on the same logs.
const finding = (rules) => {
  const COLOUR = new RegExp(rules.colour, "g");
  const HARMLESS = new RegExp(rules.harmless.join("|"), "g");
  const PREFIX = new RegExp(rules.prefix, "y");
  const [prose, quoted, has, ends, denied] = [rules.prose, rules.quoted, rules.has, rules.named, rules.denied].map((rule) => new RegExp(rule));
  const MOST_LINES = 4; // that are shown of an entry
  const LONG = 10_000, BEFORE = 300, AFTER = 900; // letters of a line; shown of a longer one around a match
  const AROUND = 30, NAME = 6; // lines that may be an error's own; letters of a word that counts in code

  /** The log without prefixes, colours and white space, in ASCII, with one kind of quotes; where
   *  its lines start, and where it ends; which four letters follow each other in it. `ats`, if
   *  given, gets where in `plain`, which has the prefixes and all letters, each of them stands. */
  function squeeze(log, ats) {
    log = plainly(log);
    const letters = new Uint8Array(log.length), starts = [0], fours = new Uint8Array(1 << 20);
    let [count, four] = [0, 0];
    for (let at = 0; at <= log.length; at++) {
      PREFIX.lastIndex = at;
      PREFIX.test(log); // which it does, if only with nothing
      at = PREFIX.lastIndex;
      for (let code; at < log.length && (code = log.charCodeAt(at)) !== 10; at++) {
        if (code < 33 || code > 126) continue;
        letters[count++] = code;
        ats?.push(at);
        fours[hash(four = (four << 8) | code)] = 1;
      }
      starts.push(count);
    }
    return { text: new TextDecoder().decode(letters.subarray(0, count)), starts, fours, plain: log };
  }

  function plainly(log) {
    log = `\n${log}\n`;
    for (const [mark, plain] of Object.entries(rules.quotes)) log = log.replaceAll(mark, plain);
    return log.slice(1, -1).replace(COLOUR, "");
  }

  /** A line without its prefix. */
  function unprefixed(line) {
    const text = plainly(line);
    PREFIX.lastIndex = 0;
    PREFIX.test(text);
    return text.slice(PREFIX.lastIndex);
  }

  const hash = (four) => Math.imul(four, 0x9e3779b1) >>> 12;

  /** Whether a text with these `fours` may hold `piece`; to search it for all would take long. */
  function mayHold(fours, piece) {
    let four = 0;
    for (let at = 0; at < piece.length; at++) {
      four = (four << 8) | piece.charCodeAt(at);
      if (at >= 3 && !fours[hash(four)]) return false;
    }
    return true;
  }

  // --- finding ---

  /** Where the pieces of a pattern start and end whose first is at `start`, or null. */
  function piecesAt(text, [first, ...others], start) {
    if (!text.startsWith(first, start)) return null;
    const pieces = [[start, start + first.length]];
    for (const piece of others) {
      const from = pieces.at(-1)[1];
      const at = text.slice(from, from + rules.gap + piece.length).indexOf(piece);
      if (at < 0) return null;
      pieces.push([from + at, from + at + piece.length]);
    }
    return pieces;
  }

  function placesOf(text, pattern) {
    const places = [];
    for (let at = text.indexOf(pattern[0]); at >= 0; at = text.indexOf(pattern[0], at + 1))
      if (piecesAt(text, pattern, at)) places.push(at);
    return places;
  }

  /** How many of `sorted` are at most `limit`. */
  function countTo(sorted, limit) {
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= limit) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const inOrder = (places) => places.sort((a, b) => a - b);

  /** The entries that a log holds, as errors.find: `line` is counted from 1; `over`: the more
   *  general ones that gave way; `words`: for each line of the log that matched, the letters, and
   *  before which squeezed letters of that line the first stands. */
  function find(log, { text, starts, fours } = squeeze(log)) {
    const lineOf = (place) => countTo(starts, place);
    const places = new Map();
    for (const { id, patterns, unless } of rules.errors) {
      const possible = patterns.filter((pattern) => pattern.every((piece) => mayHold(fours, piece)));
      const found = possible.flatMap((pattern) => placesOf(text, pattern));
      if (found.length && !unless.some((pattern) => placesOf(text, pattern).length)) places.set(id, inOrder(found));
    }
    if (places.size && otherProgram(log)) return [];
    const known = rules.errors.filter(({ id }) => places.has(id));
    const named = known.length ? placesOf(text, ["Error"]) : [];
    const first = new Map();
    const isProse = (place) => {
      const after = lineOf(place), before = text.slice(starts[after - 1], place).toLowerCase();
      const around = `${before.slice(-200)}\n${text.slice(place, starts[after]).toLowerCase().slice(0, 300)}`;
      if (before.slice(-200).replace(ends, "").includes("error:")) return false;
      return denied.test(before.slice(-200)) || (!has.test(before) && (prose.test(before) || quoted.test(around)));
    };
    for (const { id } of known) {
      const others = known.filter(({ over }) => over.includes(id));
      const special = inOrder(others.flatMap((error) => places.get(error.id)));
      const near = special.map(lineOf);
      const apart = places.get(id).find((place) => {
        const line = lineOf(place);
        if (near[countTo(near, line - rules.near - 1)] <= line + rules.near) return false;
        const after = special[countTo(special, place - 1)];
        return (after === undefined || countTo(named, place) < countTo(named, after - 1)) && !isProse(place);
      });
      if (apart !== undefined) first.set(id, apart);
    }
    const left = known.filter(({ id }) => first.has(id));
    const rank = ({ kind }) => rules.kinds[kind];
    left.sort((a, b) => rank(a) - rank(b) || first.get(a.id) - first.get(b.id));
    return left.map(({ id, kind, over, patterns }) => ({
      id,
      kind,
      line: lineOf(first.get(id)),
      over: over.filter((other) => places.has(other) && !first.has(other)),
      words: wordsOf(text, starts, patterns, first.get(id)),
    }));
  }

  /** The program, other than PyTorch, that a log names, if it nowhere names PyTorch; or "". */
  function otherProgram(log) {
    const names = (words) => words.some((word) => log.includes(word));
    const other = Object.keys(rules.others).find((name) => names(rules.others[name])) ?? "";
    if (other) log = log.replaceAll(new RegExp(rules.environment, "g"), "");
    return names(rules.own) ? "" : other;
  }

  /** The lines of a log that may tell of an error. */
  function signs(log) {
    const told = log.toLowerCase().replace(HARMLESS, " ").split("\n");
    return log.split("\n").filter((_, number) => rules.signs.some((sign) => told[number].includes(sign)));
  }

  /** Whether `matches` are warnings, and the log has no sign of an error but in their lines. */
  function onlyNotices(log, matches) {
    if (!matches.every(({ kind }) => kind === "warning")) return false;
    const patterns = matches.flatMap(({ id }) => rules.errors.find((error) => error.id === id).patterns);
    const lines = signs(log), { text, starts } = squeeze(lines.join("\n"));
    return lines.every((_, at) => {
      const line = text.slice(starts[at], starts[at + 1]);
      return patterns.some((pattern) => placesOf(line, pattern).length > 0);
    });
  }

  // --- which of several cases: as cases.py ---

  function ownLines(lines, number, this_) {
    const from = Math.max(0, number - AROUND);
    const texts = lines.slice(from, number + AROUND).map((line, at) => {
      return unprefixed(from + at === number ? this_ : line.slice(0, LONG)).replace(/[^!-~]+/g, " ").trim();
    });
    const isApart = (text) => /^(?:File '|Traceback|$)/.test(text);
    const upward = texts.slice(0, number - from + 1).reverse();
    const apart = upward.findIndex(isApart);
    const named = upward.findIndex((text) => /^[\w.]*(?:Error|Exception|Warning)(?![a-z])/.test(text));
    const start = number - from - (named >= 0 && (apart < 0 || named < apart) ? named : 0);
    const after = texts.findIndex((text, at) => at > number - from && isApart(text));
    const begun = texts.findLastIndex((text, at) => at < start && text.startsWith("Traceback"));
    const frame = texts.findIndex((text) => text.startsWith("File '")); // of a longer one
    const code = texts.slice([begun, frame - (frame > 0), start].find((at) => at >= 0), start).map((text) => text.replace(/^File '.*?'/, ""));
    code.unshift(...(lines[number].match(/^\[rank\d+\]/) ?? []));
    const own = texts.slice(start, after < 0 ? texts.length : after).join(" ");
    return [own.replace(new RegExp(rules.environment, "g"), ""), code.join(" ")];
  }

  function numbersOf(own, around) {
    const text = own.replaceAll(" ", ""), numbers = { none: 0, one: 1 };
    for (const [name, [before, item]] of Object.entries(rules.counted))
      numbers[name] = [...text.matchAll(`${before}((?:'[^']*',?)*)`)]
        .reduce((sum, [, names]) => sum + [...names.matchAll(`'${item}'`)].length, 0);
    for (const [name, amount] of Object.entries(rules.measured)) {
      const [, size, unit] = text.match(amount) ?? [];
      if (unit) numbers[name] = size * rules.units[unit];
    }
    for (const [name, pattern] of Object.entries(rules.around)) {
      const said = around.match(pattern);
      if (said || !pattern.includes("(\\d")) numbers[name] = Number(said?.[1] ?? said !== null);
    }
    return numbers;
  }

  /** Which of an entry's cases, from 0, a log is about whose match begins in line `number`, of which this is `this_`. */
  function casesOf(id, lines, number, this_) {
    const { cases } = rules.errors.find((error) => error.id === id);
    if (!cases.length) return [];
    const [own, code] = ownLines(lines, number, this_);
    const near = lines.slice(Math.max(0, number - AROUND), number + AROUND).map((line) => line.slice(0, 300));
    const numbers = numbersOf(own, near.join("\n").toLowerCase());
    const whole = (word) => new RegExp(`${/^[A-Za-z0-9]/.test(word) ? "(?<![A-Za-z0-9])" : ""}${word.split("...")
      .map((part) => [...part].map((letter) => letter.replace(/\W/, "\\$&")).join(" ?")).join(".{0,80}?")}${/[A-Za-z0-9]$/.test(word) ? "(?![A-Za-z0-9])" : ""}`);
    const named = (parts, text, least) => parts.some((words) => words.every((word) => word.length >= least && whole(word).test(text)));
    const total = (sum) => sum.split(" + ").reduce((total, name) => total + numbers[name], 0); // NaN without one
    const holds = (rule) => rule.split(" and ").map((part) => part.split(" > ").map(total)).every(([left, right]) => left > right);
    const chosen = (is) => cases.flatMap((known, which) => (is(known) ? [which] : []));
    const ours = chosen(([words]) => named(words, own, 1));
    return ours.length ? ours : chosen(([words, sums]) => named(words, code, NAME) || sums.some(holds));
  }

  // --- what no entry knows: as roots.py ---

  const isError = ({ kind }) => rules.kinds[kind] === 0;

  function firstFailure(lines) {
    const failure = new RegExp(`^(?:${rules.failure})`);
    let tried = 0;
    for (const [number, line] of lines.entries()) {
      if (!rules.telling.some((word) => line.includes(word))) continue;
      const text = unprefixed(line.slice(0, 600)).trim();
      if (!failure.test(text)) continue;
      if (!find(text).some(({ kind }) => kind === "follows") && !new RegExp(rules.gone).test(text)) return [number, text];
      if (++tried > 50) return null;
    }
    return null;
  }

  /** The last line of the reader's program in the traceback above a line, with its function and code. */
  function programLine(lines, number) {
    let frames = null;
    for (let at = number - 1; at >= Math.max(0, number - 100); at--) {
      const shown = lines.slice(at, Math.min(at + 2, number)).map((line) => line.slice(0, 600)).join("\n").replace(COLOUR, "");
      const [frame, file, cell, line, inside, code] = shown.match(`^[^\n]*?${rules.frame}`) ?? [];
      if (frame && !new RegExp(rules.others_files).test(frame.split("\n")[0]))
        return `${file ?? cell}, line ${line}${inside ?? ""}${file && code ? `: ${code}` : ""}`;
      if (frame) frames = "";
      else if (lines[at].includes("Traceback (most recent")) break;
    }
    return frames;
  }

  /** The error of a program, or else what it said before it, or torchrun of it, was silent. */
  function lastWords(log) {
    const lines = log.split(new RegExp(rules.of_torchrun, "m"))[0].split("\n");
    const [number, text] = firstFailure(lines) ?? [];
    if (number !== undefined) return { line: number + 1, text, as: "its-error" };
    const own = lines.findLastIndex((line) => line.trim() && !line.includes("torch/distributed/"));
    return own < 0 ? null : { line: own + 1, text: lines[own].slice(0, 240).trim(), as: "last-words" };
  }

  /** The first error, if no entry knows it and a traceback leads to it: its line, its text, and where in the program it was. */
  function unknownRoot(lines, found) {
    const [number, text] = firstFailure(lines) ?? [];
    if (number === undefined) return null;
    let program = programLine(lines, number);
    if (text.includes(".py: ")) program ??= "";
    const message = lines.slice(Math.max(0, number - 2), number + 5).join("\n");
    const known = message.includes("above exception") ? found : find(message);
    return program === null || known.some(isError) ? null : { line: number + 1, text, program };
  }

  /** All that a page says of a log: what it holds, with the lines to show, and which cases it is about;
   *  if it has no entry, the other program and whether there is a sign of an error. */
  function read(log) {
    const squeezed = squeeze(log);
    const found = find(log, squeezed);
    const lines = log.split("\n"), known = {}, unknown = unknownRoot(lines, found);
    if (!found.length) return { matches: [], program: otherProgram(log), isError: signs(log).length > 0, unknown, last: lastWords(log) };
    const part = (line, at) => (known[line] ??= partOf(lines[line - 1]))(at);
    const show = ([line, { words, at }]) => ({ line, ...shown(part(line, at), words) });
    return {
      matches: found.map(({ words, ...match }) => {
        const { id, line } = match;
        const cases = casesOf(id, lines, line - 1, part(line, words.get(line).at));
        const program = (isError(match) && programLine(lines, line - 1)) || "";
        return { ...match, cases, program, lines: [...words].slice(0, MOST_LINES).map(show) };
      }),
      notice: onlyNotices(log, found),
      unknown,
      last: found.every(({ kind }) => kind === "follows" || kind === "warning") && found.some(({ kind }) => kind === "follows") ? lastWords(log) : null,
    };
  }

  /** What of a line stands around its squeezed letter `at`, if the line is long; else all of it. */
  function partOf(line) {
    if (line.length <= LONG) return () => line;
    const ats = [], { plain } = squeeze(line, ats);
    return (at) => plain.slice(Math.max(0, ats[at] - BEFORE), ats[at]).split("\r").at(-1) +
      plain.slice(ats[at], ats[at] + AFTER).split("\r")[0];
  }

  /** The letters that matched, by the number of the line in which they are. */
  function wordsOf(text, starts, patterns, place) {
    const words = new Map();
    const pieces = patterns.map((pattern) => piecesAt(text, pattern, place)).find(Boolean);
    for (const [start, end] of pieces)
      for (let at = start; at < end; ) {
        const line = countTo(starts, at);
        const stop = Math.min(end, starts[line]);
        if (!words.has(line)) words.set(line, { at: at - starts[line - 1], words: [] });
        words.get(line).words.push(text.slice(at, stop));
        at = stop;
      }
    return words;
  }

  // --- showing ---

  /** A line as a reader sees it, and where in it the `words` stand: pairs of start and end. Only
   *  letters and digits are compared, since the words lack what rules.quotes replaces. */
  function shown(line, words) {
    line = line.replace(COLOUR, "");
    line = line.slice(line.lastIndexOf("\r") + 1).trim() || line.trim();
    const long = Object.entries(rules.quotes).filter(([mark]) => mark.length > 1);
    const text = long.reduce((text, [mark, plain]) => text.replaceAll(mark, plain || " "), line);
    const letters = text.replace(/\W+/g, "");
    let [at, count] = [-1, -1];
    const indexOf = (letter) => {
      while (count < letter) if (/\w/.test(text[++at])) count++;
      return at;
    };
    const marks = [];
    let from = 0;
    for (const word of words.map((word) => word.replace(/\W/g, "")).filter(Boolean)) {
      const place = letters.indexOf(word, from);
      if (place < 0) continue;
      from = place + word.length;
      marks.push([indexOf(place), indexOf(from - 1) + 1]);
    }
    return { text: line, marks };
  }

  /** Whether a log has an error that does not follow from another rank's. */
  const fails = (log) => firstFailure(log.split("\n")) !== null;

  return { fails, find, onlyNotices, otherProgram, read, signs };
};
