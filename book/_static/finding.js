"use strict";
// find and nearest of src/torchclinic/errors.py, by the rules that errors.rules() gives; what they
// mean is said there. A test compares both on the same logs. No pattern is a regular expression, and
// one pass over the text finds where any of them may begin.
const finding = (rules) => {
  const KEY = 8; // letters by which a pattern is looked for
  const COLOURS = rules.colours.map((colour) => new RegExp(colour, "g"));
  // On the whole log, where a line ends at \n and nothing else: no $, which knows more ends.
  const PREFIX = new RegExp(rules.prefix.replaceAll("|$)", "|(?![^\\n]))"), "y");
  const TELLING = new RegExp(rules.telling);
  const isLetter = (code) => code > 32 && code < 127;

  // What a character is in ASCII. None is longer than three; what is in no table is a DEL, which
  // stands in no pattern, and the wide blanks are those that a prefix may have.
  const DEL = 127, TAB = 9;
  const MARKS = Object.entries(rules.quotes);
  const WORDS = MARKS.filter(([mark]) => mark.length > 1);
  const LONG = new Map(MARKS.filter(([mark, text]) => mark.length === 1 && text.length > 1));
  const ASCII = new Uint8Array(1 << 16).fill(DEL);
  for (let code = 0; code < 128; code++) ASCII[code] = code;
  for (const blank of "\u00a0\u3000\ufeff") ASCII[blank.charCodeAt(0)] = TAB;
  for (const [mark, text] of MARKS)
    if (mark.length === 1) ASCII[mark.charCodeAt(0)] = text.length > 1 ? 0 : text.charCodeAt(0);

  const bytesOf = (piece) => Uint8Array.from(piece, (letter) => letter.charCodeAt(0));
  const patterns = rules.errors.flatMap((error) =>
    error.patterns.map((pieces) => ({ id: error.id, pieces: pieces.map(bytesOf) })));

  // --- where a pattern may begin: a table from a hash of eight letters to patterns ---

  const hash = (high, low) => (Math.imul(high, 0x9e3779b1) ^ Math.imul(low, 0x85ebca6b)) >>> 16;
  const table = new Int16Array(1 << 16).fill(-1);
  const [next, keyHigh, keyLow] = [0, 0, 0].map(() => new Int32Array(patterns.length));
  const isShort = ({ pieces: [first] }) => first.length < KEY;
  patterns.forEach((pattern, number) => {
    if (isShort(pattern)) return;
    const letters = new DataView(pattern.pieces[0].buffer);
    [keyHigh[number], keyLow[number]] = [letters.getInt32(0), letters.getInt32(4)];
    const place = hash(keyHigh[number], keyLow[number]);
    [next[number], table[place]] = [table[place], number];
  });

  // --- squeezing ---

  function ascii(log) {
    const bytes = new Uint8Array(3 * log.length);
    let length = 0;
    for (let at = 0; at < log.length; at++) {
      const code = log.charCodeAt(at);
      const letter = ASCII[code];
      if (letter || !code) bytes[length++] = letter;
      else for (const each of LONG.get(log[at])) bytes[length++] = each.charCodeAt(0);
    }
    return new TextDecoder().decode(bytes.subarray(0, length));
  }

  function plain(log) {
    log = ascii(log);
    for (const [mark, text] of WORDS) log = log.replaceAll(mark, text);
    for (const colour of COLOURS) log = log.replace(colour, "");
    return log;
  }

  /** All lines as one text of letters, and where in it each line starts. */
  function squeeze(log) {
    log = plain(log);
    const text = new Uint8Array(log.length);
    const starts = new Int32Array(log.length + 2);
    let [length, lines] = [0, 0];
    for (let at = 0; at <= log.length; ) {
      let end = log.indexOf("\n", at);
      if (end < 0) end = log.length;
      starts[lines++] = length;
      if (end > at) {
        PREFIX.lastIndex = at;
        PREFIX.test(log);
        for (let i = PREFIX.lastIndex; i < end; i++) {
          const code = log.charCodeAt(i);
          if (isLetter(code)) text[length++] = code;
        }
      }
      at = end + 1;
    }
    starts[lines] = length;
    return { text: text.subarray(0, length), starts: starts.subarray(0, lines + 1) };
  }

  // --- finding ---

  const isAt = (text, at, piece) => {
    if (at + piece.length > text.length) return false;
    for (let i = 0; i < piece.length; i++) if (text[at + i] !== piece[i]) return false;
    return true;
  };

  function indexOf(text, piece, from, end) {
    for (let at = from; at <= end - piece.length; at++) if (isAt(text, at, piece)) return at;
    return -1;
  }

  function allOf(text, piece) {
    const all = [];
    for (let at = text.indexOf(piece[0]); at >= 0; at = text.indexOf(piece[0], at + 1))
      if (isAt(text, at, piece)) all.push(at);
    return all;
  }

  /** Where the pieces of a pattern lie whose first may be at `start`, or null. */
  function piecesAt(text, { pieces }, start) {
    if (!isAt(text, start, pieces[0])) return null;
    const places = [[start, start + pieces[0].length]];
    for (const piece of pieces.slice(1)) {
      const from = places.at(-1)[1];
      const most = Math.min(text.length, from + rules.gap + piece.length);
      const at = indexOf(text, piece, from, most);
      if (at < 0) return null;
      places.push([at, at + piece.length]);
    }
    return places;
  }

  /** For each entry that the text holds, where its patterns begin, in order. */
  function placesIn(text) {
    const places = new Map();
    const look = (number, start) => {
      if (!piecesAt(text, patterns[number], start)) return;
      const { id } = patterns[number];
      if (places.has(id)) places.get(id).push(start);
      else places.set(id, [start]);
    };
    let [high, low] = [0, 0];
    for (let at = 0; at < text.length; at++) {
      high = (high << 8) | (low >>> 24);
      low = (low << 8) | text[at];
      for (let number = table[hash(high, low)]; number >= 0; number = next[number])
        if (keyHigh[number] === high && keyLow[number] === low) look(number, at - KEY + 1);
    }
    for (let number = 0; number < patterns.length; number++) {
      if (!isShort(patterns[number])) continue;
      for (const at of allOf(text, patterns[number].pieces[0])) look(number, at);
    }
    for (const starts of places.values()) starts.sort((a, b) => a - b);
    return places;
  }

  /** The number, from 0, of the last of `starts` that is not after a place; of lines, its line. */
  function lineOf(starts, place) {
    let [low, high] = [0, starts.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= place) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** The entries that a log holds, as errors.find: `line` is counted from 1; `over`: the more
   *  general ones that gave way; `lines`: for each line of the log that matched, the words. */
  function find(log) {
    const { text, starts } = squeeze(log);
    const places = placesIn(text);
    const line = (place) => lineOf(starts, place);
    const known = rules.errors.filter(({ id }) => places.has(id));
    const named = known.length ? allOf(text, bytesOf("Error")) : [];
    const first = new Map();
    for (const { id } of known) {
      const others = known.filter(({ over }) => over.includes(id));
      const special = others.flatMap((error) => places.get(error.id)).sort((a, b) => a - b);
      const lines = special.map(line);
      const apart = places.get(id).find((place) => {
        const near = lines[lineOf(lines, line(place) - rules.near - 1) + 1];
        if (near <= line(place) + rules.near) return false;
        const after = special[lineOf(special, place - 1) + 1];
        return after === undefined || lineOf(named, place) < lineOf(named, after - 1);
      });
      if (apart !== undefined) first.set(id, apart);
    }
    const left = known.filter(({ id }) => first.has(id));
    const rank = ({ kind }) => rules.kinds[kind];
    left.sort((a, b) => rank(a) - rank(b) || first.get(a.id) - first.get(b.id));
    return left.map((error) => ({
      id: error.id,
      kind: error.kind,
      line: line(first.get(error.id)) + 1,
      over: error.over.filter((id) => places.has(id) && !first.has(id)),
      words: wordsOf(text, starts, piecesOf(text, error.id, first.get(error.id))),
    }));
  }

  function piecesOf(text, id, start) {
    const own = patterns.filter((pattern) => pattern.id === id);
    return own.map((pattern) => piecesAt(text, pattern, start)).find(Boolean);
  }

  /** The letters that matched, by the number of the line in which they are. */
  function wordsOf(text, starts, pieces) {
    const words = new Map();
    for (const [start, end] of pieces)
      for (let at = start; at < end; ) {
        const line = lineOf(starts, at);
        const stop = Math.min(end, starts[line + 1]);
        const letters = String.fromCharCode(...text.subarray(at, stop));
        words.set(line + 1, [...(words.get(line + 1) ?? []), letters]);
        at = stop;
      }
    return words;
  }

  // --- showing ---

  /** A line as a reader sees it, and where in it the `words` stand: pairs of start and end. Only
   *  letters and digits are compared, since the words lack what rules.quotes replaces. */
  function shown(line, words) {
    for (const colour of COLOURS) line = line.replace(colour, "");
    line = line.slice(line.lastIndexOf("\r") + 1).trim() || line.trim();
    const places = new Int32Array(line.length);
    let text = "";
    for (const { 0: letters, index } of line.matchAll(/\\[nt]|\w+/g))
      if (letters[0] !== "\\")
        for (let i = 0; i < letters.length; i++) {
          places[text.length] = index + i;
          text += letters[i];
        }
    const marks = [];
    let from = 0;
    for (const word of words.map((word) => word.replace(/\W/g, "")).filter(Boolean)) {
      const place = text.indexOf(word, from);
      if (place < 0) continue;
      from = place + word.length;
      marks.push([places[place], places[from - 1] + 1]);
    }
    return { text: line, marks };
  }

  // --- when nothing is found ---

  function tellingLines(log) {
    const lines = [];
    const telling = TELLING.test(log);
    const most = telling ? 50 : 20;
    for (let end = log.length; end >= 0 && lines.length < most; ) {
      const start = end > 0 ? log.lastIndexOf("\n", end - 1) + 1 : 0;
      const line = log.slice(start, end);
      if (!telling || (line && TELLING.test(line))) lines.push(line);
      end = start - 1;
    }
    return lines.reverse();
  }

  /** The first 2000 characters, as Python counts them. */
  const head = (line) =>
    line.length <= 2000 ? line : [...line.slice(0, 4000)].slice(0, 2000).join("");

  /** Ids of entries that share rare words with what a log says of an error, as errors.nearest. */
  function nearest(log, most = 3) {
    const said = tellingLines(log).map(head).join("\n");
    const words = new Set(said.match(new RegExp(rules.word, "g")) ?? []);
    const scored = rules.errors.map(({ id, words: own }) => {
      const shared = own.filter((word) => words.has(word));
      const score = shared.reduce((sum, word) => sum + rules.weights[word], 0);
      return { id, score: shared.length >= 2 ? score : 0 };
    });
    const near = scored.filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
    return near.slice(0, most).map(({ id }) => id);
  }

  return { find, nearest, shown };
};
