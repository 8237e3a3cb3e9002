"use strict";
// nearest, decides, is_said and said_in of src/torchclinic/errors/asking.py, with the words that errors.questions() gives.
/** Whether a text, which has no verb if it is a title, is neither code nor a line of a log. */
function speaks(text, isTitle) {
  const letters = text.match(/\p{L}/gu)?.length ?? 0;
  const verb = /\b(?:the|is|are|my|when|after|but|don?|doesn?|only|i|no|not|why|how|what|with|yet|have|it)\b|[\u4e00-\u9fff]{4}/;
  const least = /[\u4e00-\u9fff]{2}/.test(text) ? 0.5 : 0.7;
  return letters / Math.max(1, [...text.replace(/\s/g, "")].length) > least &&
    (isTitle || verb.test(text.toLowerCase())) && !/(?:^|\n)[[{]|[|@]|[^\W\d](?<!cuda)(?<!gpu)(?<!GPU):\d|\d:(?:\d\d:\d|\d{3})|(?:\n[*-] [a-z]{2,12}: .*){3}|huggingface\/tokenizers/.test(text);
}

/** What Python prints of an error, in one of several lines. */
const PRINTED = /^[^\w\n]*(?:(?:rank\d+|[A-Z]+)[^\w\n]{1,4})?(?:File ["']|Traceback |[\w.]{1,99}(?:Error|Exception): )/m;

/** Whether a text is what somebody says, and no log. */
function isSaid(text) {
  text = text.trim();
  const isLine = !text.includes("\n");
  return text.length < 600 && (isLine || !PRINTED.test(text)) && speaks(text, text.length < 200 && isLine);
}

/** What somebody says in a text: all of it, or the lines around code and logs. */
function saidIn(text) {
  const unsaid = /```[^]*?(?:```|(?![^]))|(?<![!-')-~])`[^`\n]{60,500}`|!?\[[^\]\n]{0,99}\]\([^)\n]{0,500}\)|^ *[-*] \*\*[^*\n]{1,40}\*\*[^\n]*|<[^<>\n]{1,300}>|https?:\S+|(?<!\S)@[\w-]+|^#{2,}[^\n]*|^ *[-*] \[.?\][^\n]*|^\[(?:bug|help|issue|qst|question)[^\]\n]{0,20}\]:?|(?<![^])\[(?!info|debug|warn|error|rank)[a-z][a-z ./-]{1,20}\](?=[^\n]*\n\n)/gim;
  const said = text.slice(0, 20_000).replace(unsaid, " ");
  if (said === text && isSaid(text)) return text;
  const lines = said.trim().split("\n"), told = lines.filter((line, at) => speaks(line, at === 0) && !PRINTED.test(line)).join("\n");
  if (told && (2 * told.length > lines.join("\n").length || /\b(?:i|my|we|our|hangs|(?:gets?|is|are) stuck|freezes)\b|^(?:why|how)\b/.test(told.toLowerCase()))) return told.slice(0, 1000);
  return isSaid(text) ? text : "";
}

const nearest = ({ documents, others, silent, denied, kinds }) => {
  const POOLED = 0.5, TOLD = 0.3, UNKNOWN = 6, ALIKE = 0.5, LEAST = 1, AHEAD = 0.6, MUCH = 5, ENOUGH = 4, SURE = 0.6, BEHIND = 0.5;

  function inOrder(text) {
    return (text.toLowerCase().match(/[a-z]+|\d+|[\u4e00-\u9fff]+/g) ?? []).flatMap((word) => {
      if (word <= "\u4e00") return [word.replace(word.length > 4 ? /(?:ing|ed|es|e|y|(?<!s)s)$/ : /(?<!s)s$/, "")];
      return word.length > 1 ? [...word.slice(1)].map((sign, at) => word[at] + sign) : [word];
    });
  }
  const words = (text) => [...new Set(inOrder(text))];

  const apart = (text) => (text ? text.split(" ") : []);
  const known = documents.map(([address, weight, asked, text, twins]) => ({ address, weight, asked: asked.map(apart), text: apart(text), twins }));
  const held = new Map();
  for (const { asked, text } of known)
    for (const word of new Set([...asked.flat(), ...text])) held.set(word, (held.get(word) ?? 0) + 1);
  const rare = (word) => Math.log(1 + known.length / held.get(word));

  /** How much each address is like a question. */
  function scores(question) {
    const asked = words(question);
    const weights = new Map(asked.filter((word) => held.has(word)).map((word) => [word, rare(word)]));
    const sum = (all, weight = (word) => weights.get(word)) => all.reduce((sum, word) => sum + weight(word), 0);
    const unknown = asked.filter((word) => !held.has(word) && !silent.includes(word) && /^[a-z]{3}/.test(word));
    const whole = sum([...weights.keys()]) + UNKNOWN * unknown.length;
    for (const [needed, also] of others)
      if (needed.every((word) => asked.includes(word)))
        for (const word of also) if (held.has(word) && !weights.has(word)) weights.set(word, rare(word) / 2);
    const all = whole || sum([...weights.keys()]);
    return known.map(({ address, weight, asked, text, twins }) => {
      const pooled = new Set();
      let [alike, counts] = [0, 0];
      for (const words of asked) {
        const shared = words.filter((word) => weights.has(word));
        for (const word of shared) pooled.add(word);
        if (!shared.length) continue;
        const [weighs, size] = [sum(shared), sum(words, rare)];
        alike = Math.max(alike, Math.min(1, weighs / (whole || weighs)) * Math.sqrt(weighs / size));
        counts = Math.max(counts, weighs * weighs / size);
      }
      const told = sum(text.filter((word) => weights.has(word) && !pooled.has(word)));
      const more = POOLED * sum([...pooled]) + TOLD * told;
      const [score, ...numbers] = [alike || told ? (alike + more / all) * weight : 0, alike, counts].map((number) => +number.toFixed(9));
      return { address, twins, score, alike: numbers[0], counts: numbers[1] };
    }).sort((a, b) => b.score - a.score);
  }

  /** Whether the best is likely: its question is nearly this one, or no other comes close to it. */
  function isSure([best, ...others], kind) {
    const second = others.find(({ address }) => !best.twins.includes(address)).score;
    const ahead = kind && !best.address.includes("/errors_") ? 0 : second ? best.score * (best.score / second) ** 2 : Infinity;
    return best.alike >= ALIKE && best.counts >= LEAST || ahead >= AHEAD && ahead * best.counts >= (kind ? MUCH : ENOUGH);
  }

  /** The addresses of what answers a question best; none, if it is a guess. */
  function find(question, most = 3) {
    question = said(question);
    const ranked = scores(question), best = ranked[0].score;
    const isMessage = !question.trim().includes("\n") && /(?:Error|Exception|error): /.test(question);
    if (!best || !isSure(ranked, kindOf(question)) || isMessage && best <= SURE) return [];
    const near = [];
    for (const { address, score, twins } of ranked)
      if (score > BEHIND * best && !near.some((better) => twins.includes(better))) near.push(address);
    return near.slice(0, most);
  }

  const said = (question) => question.replace(new RegExp(denied, "gi"), " ");

  function kindOf(question) {
    const asked = inOrder(question).join(" ");
    const late = (kind) => (kind !== "hangs") + (kind === "files");
    const places = kinds.flatMap(([kind, of]) => of.map((phrase) => asked.match(phrase)).filter(Boolean).map((has) => [late(kind), has.index + has[0].length, kind]));
    return places.sort(([a, c, e], [b, d, f]) => a - b || c - d || (e < f ? -1 : 1))[0]?.[2] ?? "";
  }

  /** The kind of symptom that a question is about, or "", and which of its cases it has most words of, or -1. */
  function decides(question) {
    const kind = kindOf(said(question)), asked = inOrder(said(question)).join(" ");
    const cases = kinds.find(([name]) => name === kind)?.[2] ?? [];
    const has = cases.map((of) => of.reduce((sum, phrase) => sum + (asked.match(phrase) ? phrase.split(" (?:").length : 0), 0));
    return [kind, Math.max(...has) > 0 ? has.indexOf(Math.max(...has)) : -1];
  }

  return { find, decides };
};
