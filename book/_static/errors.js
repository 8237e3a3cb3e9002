"use strict";
// The page book/errors.md: the box for a log. What is found in a log is decided in finding.js; the
// words are in the page itself. A log stays in its field: it is neither sent nor kept, and no link
// holds it.
(() => {
  const MOST_LINES = 4, BEFORE = 60, AROUND = 500; // of a log, and letters around the words that matched
  const TYPED = 20, PAUSE = 300; // so many letters may be typed; milliseconds until they are read
  const SHORT = 200; // letters of what may be asked of the search, too
  const IN_SIGHT = 400; // pixels of an answer that are enough
  // How a dump of PyTorch's flight recorder, a pickle, begins, in so many letters.
  const DUMP = /^\ufffd\x02\}(?=.*version).*(entries|pg_config)/s, START = 4096;
  const EXAMPLE = `[rank0]: Traceback (most recent call last):
[rank0]:   File "predict.py", line 12, in <module>
[rank0]:     model.load_state_dict(torch.load("best.pt"))
[rank0]: RuntimeError: Error(s) in loading state_dict for LeNet:
[rank0]: \tMissing key(s) in state_dict: "conv1.weight", "conv1.bias".
[rank0]: \tUnexpected key(s) in state_dict: "module.conv1.weight", "module.conv1.bias".
`;
  const { find, holds, onlyNotices, otherProgram, shown, signs } = finding(errorRules);

  // --- the list: each entry by its id ---

  const entries = new Map(all(".error-index > li").map((item) => {
    const link = one(".error-title a", item);
    return [decodeURIComponent(link.hash.slice(1)), { item, link }];
  }));

  const linkTo = (id) => entries.get(id).link.cloneNode(true);
  const copyOf = (id, part) => one(`.error-${part}`, entries.get(id).item).cloneNode(true);

  // --- the box for a log ---

  const [log, found] = [one("#log"), one("#found")];
  let answered = "";

  /** What the order of the answers rests on: the first error, then what may follow from it. */
  function reasons(match, place, matches) {
    const isError = ({ kind }) => kind === "error" || kind === "silent"; // of which the log has words
    const errors = matches.filter(isError).length;
    let reason = match.kind;
    if (isError(match)) reason = place > 0 ? "later" : errors > 1 ? "first" : "";
    else if (match.kind === "follows" && errors === 0) reason = "follows-alone";
    return [...(reason ? [phrase(reason)] : []), ...match.over.flatMap((id) => [` ${phrase("over")} `, linkTo(id)])];
  }

  /** A line of the log, the words that matched marked, and not much around them. */
  function logLine(number, line, words) {
    const { text, marks } = shown(line, words);
    const start = Math.max(0, (marks[0]?.[0] ?? 0) - BEFORE);
    const end = Math.min(text.length, start + AROUND);
    const code = make("code", "", start > 0 ? "… " : "");
    let at = start;
    for (const [from, to] of marks.filter(([from]) => from < end)) {
      code.append(text.slice(at, from), make("mark", "", text.slice(from, Math.min(to, end))));
      at = Math.min(to, end);
    }
    code.append(text.slice(at, end), end < text.length ? " …" : "");
    return make("p", "log-line", make("span", "", phrase("line", { line: number })), code);
  }

  /** The words that the head of a case, up to its first colon, quotes: those between two commas together. */
  function quoted(item) {
    const parts = [[]];
    for (const node of (one("p", item) ?? item).childNodes) {
      const text = node.textContent;
      if (node.nodeName !== "CODE") {
        if (text.split(/:(?:\s|$)/)[0].includes(",")) parts.push([]);
        if (/:(\s|$)/.test(text)) break;
      } else if (text.length > 3 && /[A-Za-z]/.test(text)) parts.at(-1).push(text);
    }
    return parts.filter((words) => words.length > 0);
  }

  /** What to do: before all else those of several cases whose heads quote what the log holds. */
  function cure(id, text) {
    const fix = copyOf(id, "fix");
    const ours = all(":scope > ul:first-of-type > li", fix).filter((item) =>
      quoted(item).some((words) => words.every((word) => holds(text, [word]))));
    if (ours.length > 0) {
      one("p", fix).prepend(phrase("otherwise"), " ");
      fix.prepend(make("ul", "", ...ours));
    }
    return fix;
  }

  /** The reader's own line, what it means, what to do; then in a fold why it is this entry. */
  function answer(id, kind, lines, text, ...why) {
    const more = linkTo(id);
    more.replaceChildren(phrase("more"));
    return make("li", `match ${kind}`,
      ...lines,
      make("h2", "", linkTo(id)),
      copyOf(id, "cause"),
      make("p", "", make("strong", "", phrase("do"))),
      cure(id, text),
      ...(kind === "warning" ? [make("p", "", phrase("warning"))] : []),
      ...(why.length ? [make("details", "match-why", make("summary", "", phrase("why")), make("p", "", ...why))] : []),
      make("p", "match-more", more));
  }

  function showFound(text, matches) {
    const lines = text.split("\n");
    const items = matches.map((match, place) => answer(match.id, match.kind,
      [...match.words].slice(0, MOST_LINES).map(([line, words]) => logLine(line, lines[line - 1], words)), text,
      ...reasons(match, place, matches)));
    found.replaceChildren(make("ol", "matches", ...items));
    if (onlyNotices(text, matches)) return phrase("notice");
    return phrase(matches.length === 1 ? "found-one" : "found-more", { count: matches.length });
  }

  function showNone(text) {
    const program = otherProgram(text);
    const [isError, isShort] = [program || signs(text).length > 0, text.length < SHORT && !text.trim().includes("\n")];
    if (!isError && !isShort) {
      const symptoms = one("#there-is-no-message-what-do-you-see > h2");
      const link = make("a", "", symptoms.firstChild.textContent);
      link.href = `#${symptoms.parentNode.id}`;
      found.replaceChildren(link);
      return phrase("healthy");
    }
    const search = make("a", "", phrase("search", { text }));
    search.href = `../search.html?q=${encodeURIComponent(text)}`;
    found.replaceChildren(...(isShort ? [make("p", "", search)] : []), one(".ask-others").cloneNode(true));
    if (isShort) bestHits(text).then((hits) => text === answered && found.prepend(hits), () => {});
    return phrase(program ? "other" : isError ? "none" : "short", { program });
  }

  /** Shows what is found in a text, and returns what to say of it. */
  function answerTo(text) {
    found.replaceChildren();
    if (!text.trim()) return "";
    if (DUMP.test(text.slice(0, START))) return phrase("dumps");
    const matches = find(text);
    return matches.length ? showFound(text, matches) : showNone(text);
  }

  function showAnswer() {
    if (log.value === answered) return;
    answered = log.value;
    one("#log-says").textContent = answerTo(answered);
  }

  let waiting;
  log.addEventListener("input", () => {
    clearTimeout(waiting);
    const typed = Math.abs(log.value.length - answered.length) < TYPED;
    if (typed) {
      waiting = setTimeout(showAnswer, PAUSE);
      return;
    }
    showAnswer();
    if (!found.hasChildNodes() || innerHeight - found.getBoundingClientRect().top > IN_SIGHT) return;
    if (matchMedia("(hover: none)").matches) log.blur(); // or a phone's keyboard is where the answer is
    one("#log-says").scrollIntoView();
  });

  const example = make("button", "try-example", phrase("example"));
  example.addEventListener("click", () => {
    log.value = EXAMPLE;
    showAnswer();
  });
  log.after(example);

  const clear = make("button", "try-example", phrase("clear"));
  clear.addEventListener("click", () => {
    log.value = "";
    showAnswer();
    log.focus();
  });
  one("#log-says").after(clear); // where an answer is read, the box is out of sight

  // --- files, whose text comes into the field ---

  async function showFiles(files) {
    const texts = await Promise.all([...files].map((file) => file.text()));
    log.value = texts.join("\n");
    showAnswer();
  }

  const chosen = Object.assign(make("input"), { type: "file", multiple: true });
  chosen.addEventListener("change", () => chosen.files.length && showFiles(chosen.files));
  log.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  log.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return; // text, which the browser puts in
    event.preventDefault();
    showFiles(event.dataTransfer.files);
  });
  example.after(make("label", "choose-files", phrase("files"), " ", chosen));

  // --- start: empty, whatever the browser remembers, or with what was pasted on the landing page ---

  if (window.name.startsWith("log:")) [log.value, window.name] = [window.name.slice(4), ""];
  else log.value = "";
  one(".clinic-field").hidden = false;
  showAnswer();
  if (log.value) addEventListener("load", () => one("#log-says").scrollIntoView());
})();
