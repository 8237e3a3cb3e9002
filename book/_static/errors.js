"use strict";
// The page book/errors.md: the box for a log. What is found in a log is decided in finding.js; the
// words are in the page itself. A log stays in its tab: it is neither sent nor kept for longer, and no link
// holds more of it than the line that a reader may search for.
(() => {
  const BEFORE = 60, AROUND = 500; // letters around the words that matched
  const MOST = 50_000_000; // letters that are read
  const KEPT = 1e6; // letters that a tab keeps for Back
  const TYPED = 20, PAUSE = 300; // so many letters may be typed; milliseconds until they are read
  const SHORT = 200; // letters of what may be asked of the search, too
  const IN_SIGHT = 400; // pixels of an answer that are enough
  // How a dump of PyTorch's flight recorder, a pickle, begins, in so many letters.
  const DUMP = /^\ufffd\x02\}(?=.*version).*(entries|pg_config)/s, START = 4096;
  const COPIED = 20; // letters of code in a cure that are worth a button
  const FEW = 4; // cases that are seen at once; of more, the others are in a fold
  const EXAMPLE = `[rank0]: Traceback (most recent call last):
[rank0]:   File "predict.py", line 12, in <module>
[rank0]:     model.load_state_dict(torch.load("best.pt"))
[rank0]: RuntimeError: Error(s) in loading state_dict for LeNet:
[rank0]: \tMissing key(s) in state_dict: "conv1.weight", "conv1.bias".
[rank0]: \tUnexpected key(s) in state_dict: "module.conv1.weight", "module.conv1.bias".
`;
  const clinic = finding(errorRules);

  // --- the list: each entry by its id ---

  const entries = new Map(all(".error-index > li").map((item) => {
    const link = one(".error-title a", item);
    return [decodeURIComponent(link.hash.slice(1)), { item, link }];
  }));

  const linkTo = (id) => entries.get(id).link.cloneNode(true);
  const copyOf = (id, part) => one(`.error-${part}`, entries.get(id).item).cloneNode(true);

  // A phone shows what one may see, and the causes when one is opened.
  for (const list of matchMedia("(max-width: 600px)").matches ? all("#there-is-no-message-what-do-you-see section > ul") : []) {
    const fold = make("details", "", make("summary", "", phrase("causes", { count: list.children.length })));
    list.replaceWith(fold);
    fold.append(list);
  }

  // --- the box for a log ---

  const [log, says, found] = [one("#log"), one("#log-says"), one("#found")];
  const part = make("p", "field-hint"); // what of a long text the field has
  const size = (letters) => (letters < 1e6 ? `${Math.round(letters / 1e3)} kB` : `${(letters / 1e6).toFixed(1)} MB`);
  let answered = "";

  const isDump = (text) => DUMP.test(text.slice(0, START));

  /** A checkpoint or a picture, say: bytes that are no letters. */
  function isBinary(text) {
    const start = text.slice(0, START);
    return start.includes("\0") || start.split("\ufffd").length > start.length / 20 + 1;
  }

  /** A log that PowerShell has written is UTF-16. */
  async function textOf(file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    return new TextDecoder(bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16" : "utf-8").decode(bytes);
  }

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
  function logLine({ line, text, marks }) {
    const start = Math.max(0, (marks[0]?.[0] ?? 0) - BEFORE);
    const end = Math.min(text.length, start + AROUND);
    const code = make("code", "", start > 0 ? "… " : "");
    let at = start;
    for (const [from, to] of marks.filter(([from]) => from < end)) {
      code.append(text.slice(at, from), make("mark", "", text.slice(from, Math.min(to, end))));
      at = Math.min(to, end);
    }
    code.append(text.slice(at, end), end < text.length ? " …" : "");
    return make("p", "log-line", make("span", "", phrase("line", { line })), code);
  }

  /** Words of a log that say when something is to be done: they begin a paragraph or a case, up to a colon. */
  function isQuoted(code) {
    const item = code.closest("li"), { textContent: text } = item ?? code.parentElement, at = text.indexOf(code.textContent);
    const isFirst = item ? !/:\s/.test(text.slice(0, at)) : at === 0;
    return isFirst && /^(?:(?!\.\s)[^])*?:\s/.test(text.slice(at + code.textContent.length));
  }

  /** Code that one types and that is long enough to be copied, with a button. */
  function withButtons(fix) {
    for (const code of all("code.literal", fix).filter((code) => code.textContent.length >= COPIED && !isQuoted(code))) {
      const button = Object.assign(make("button", "copy-code"), { ariaLabel: phrase("copy") });
      button.addEventListener("click", () => navigator.clipboard.writeText(code.textContent).then(() => { button.ariaLabel = phrase("copied"); }));
      let text = code;
      while (text.lastChild) text = text.lastChild;
      code.append(make("span", "copied", text.splitText(text.data.search(/\S{1,12}$/)), button)); // which no line parts
    }
    return fix;
  }

  /** What to do: before all else the `cases` that the log is about; of many others, those beyond the first in a fold. */
  function cure(id, cases) {
    const fix = copyOf(id, "fix");
    const bullets = all(":scope > ul:first-of-type > li", fix);
    const others = bullets.filter((_, which) => !cases.includes(which));
    if (others.length > FEW) {
      const rest = others.slice(cases.length ? 0 : FEW - 1), list = rest[0].parentElement;
      list[cases.length ? "replaceWith" : "after"](make("details", "", make("summary", "", phrase("cases", { count: rest.length })), make("ul", "", ...rest)));
    }
    if (cases.length > 0) {
      one("p", fix).prepend(phrase("otherwise"), " ");
      fix.prepend(make("ul", "", ...cases.map((which) => bullets[which])));
    }
    return withButtons(fix);
  }

  /** What it means, what to do, the reader's own lines; then in a fold why it is this entry. */
  function answer({ id, kind, lines, cases, program }, why) {
    const more = linkTo(id);
    more.replaceChildren(phrase("more"));
    return make("li", `match ${kind}`,
      make("h2", "", linkTo(id)),
      copyOf(id, "cause"),
      make("div", "do", make("p", "", make("strong", "", cases.length ? phrase("do-ours") : phrase("do"))), cure(id, cases)),
      ...(kind === "warning" ? [make("p", "", phrase("warning"))] : []),
      ...lines.map(logLine),
      ...yours(program),
      ...(why.length ? [make("details", "match-why", make("summary", "", phrase("why")), make("p", "", ...why))] : []),
      make("p", "match-more", more));
  }

  /** The line of the reader's program that led to an error. */
  const yours = (program) => (program ? [make("p", "log-line", make("span", "", phrase("yours")), make("code", "", program))] : []);

  /** The first error, if no entry knows it, before what follows from it; or what a program said last. */
  function root(unknown) {
    if (!unknown) return [];
    const { line, text, program, as = "unknown" } = unknown;
    const search = as === "last-words" ? [] : [searchFor(text.slice(0, SHORT))];
    return [make("p", "", phrase(as, { line })), make("p", "log-line", make("code", "", text)), ...yours(program), ...search];
  }

  function searchFor(text) {
    const link = Object.assign(make("a", "", phrase("search", { text })), { href: `../search.html?q=${inAddress(text)}` });
    return make("p", "", link);
  }

  function showFound({ matches, notice, unknown, last }) {
    const items = matches.map((match, place) => answer(match, reasons(match, place, matches)));
    found.replaceChildren(...root(unknown ?? last), make("ol", "matches", ...items));
    if (notice) return phrase("notice");
    return phrase(matches.length === 1 ? "found-one" : "found-more", { count: matches.length });
  }

  function showNone(text, { program, isError, unknown, last }) {
    const isShort = text.length < SHORT && !text.trim().includes("\n");
    const said = program ? "" : saidIn(text);
    if (!program && !isError && !isShort && !said) {
      const symptoms = one("#there-is-no-message-what-do-you-see > h2");
      const link = make("a", "", symptoms.firstChild.textContent);
      link.href = `#${symptoms.parentNode.id}`;
      found.replaceChildren(link);
      return phrase("healthy");
    }
    const first = root(!program && (unknown ?? (!isShort && (clinic.fails(text) || isError && !said) && last)));
    found.replaceChildren(...(first.length || !isShort ? first : [searchFor(text)]), one(".ask-others").cloneNode(true));
    const nothing = phrase(program ? "other" : isError ? "none" : "short", { program });
    if (!said) return nothing;
    showNearest(said, nothing, text, isError);
    return clinic.fails(text) ? nothing : ""; // of words, what is near is said first
  }

  /** What is nearest to what somebody says, above it so; or what decides; or that there is `nothing`. */
  async function showNearest(said, nothing, text, isError) {
    const { hits, decides } = await nearestHits(said).catch(() => ({}));
    if (text !== answered) return;
    const [isNear, isMessage] = [hits?.hasChildNodes(), clinic.fails(text)];
    const cases = !isNear && !isMessage && decides?.[0] && casesOf(...decides);
    if (isNear) found.prepend(hits);
    else if (hits && (cases || !isMessage && !isError)) found.prepend(cases || make("p", "", phrase("far")));
    says.textContent ||= isNear ? phrase("near") : cases ? phrase("decides") : nothing;
  }

  /** What decides in a kind of symptom, and its cases: first the one that has the words said. */
  function casesOf(kind, first) {
    const cases = one(`.deciding-${kind}`).cloneNode(true), case_ = all("li", cases)[first];
    if (case_) one("ul", cases).prepend(case_);
    return cases;
  }

  let worker;
  /** What is in a text, read by a script beside the page, which goes on meanwhile. */
  async function readBeside(text) {
    const script = `onmessage = ({ data }) => postMessage((${finding})(${JSON.stringify(errorRules)}).read(data))`;
    worker = new Worker(URL.createObjectURL(new Blob([script])));
    worker.postMessage(text);
    return new Promise((onmessage, onerror) => Object.assign(worker, { onmessage, onerror }))
      .then(({ data }) => data).finally(() => worker.terminate());
  }

  /** Shows what is found in a text. */
  async function showAnswer(text) {
    if (text === answered) return;
    answered = text;
    worker?.terminate();
    found.replaceChildren();
    part.textContent = before && phrase("part", { size: size(text.length) });
    says.textContent = text.length > FIELD_HOLDS ? phrase("reading", { size: size(text.length) }) : "";
    if (!text.trim() || isDump(text)) return void (says.textContent = text.trim() && phrase("dumps"));
    const inPage = () => clinic.read(text);
    const told = text.length > FIELD_HOLDS ? await readBeside(text).catch(inPage) : inPage();
    says.textContent = told.matches.length ? showFound(told) : showNone(text, told);
  }

  // --- the field, which takes long to show a long text: it has the end, and what is `before` is read with it ---

  let before = "";
  let waiting;
  let gathered = []; // files, of which some lie in several folders, so they are chosen one after the other

  function put(text) {
    gathered = [];
    clearTimeout(waiting); // what was typed before comes no more
    if (text.length > MOST) return refuse(tooLong(text.length));
    before = text.length > FIELD_HOLDS ? text.slice(0, -FIELD_HOLDS / 2) : "";
    log.value = text.slice(before.length);
    return showAnswer(text);
  }

  const tooLong = (letters) => phrase("too-long", { size: size(letters), most: size(MOST) });
  const refuse = (why) => put("").then(() => { says.textContent = why; });

  function goToAnswer() {
    if (!found.hasChildNodes() || innerHeight - found.getBoundingClientRect().top > IN_SIGHT) return;
    if (matchMedia("(hover: none)").matches) log.blur(); // or a phone's keyboard is where the answer is
    says.scrollIntoView();
  }

  log.addEventListener("beforeinput", () => {
    if (log.selectionEnd - log.selectionStart === log.value.length) before = ""; // all of it goes
  });
  onLong(log, (text) => put(before + text).then(goToAnswer));

  log.addEventListener("input", () => {
    gathered = [];
    clearTimeout(waiting);
    const text = log.value && before + log.value;
    const show = log.value.length > FIELD_HOLDS || !text ? put : showAnswer;
    if (Math.abs(text.length - answered.length) < TYPED) waiting = setTimeout(show, PAUSE, text);
    else show(text).then(goToAnswer);
  });

  const example = make("button", "try-example", phrase("example"));
  example.addEventListener("click", () => put(EXAMPLE));
  log.after(part, example);

  const clear = make("button", "try-example", phrase("clear"));
  clear.addEventListener("click", () => {
    put("");
    log.focus();
  });
  says.after(clear); // where an answer is read, the box is out of sight

  // --- files, whose text comes into the field ---

  /** Files after those that were chosen before; first dumps, then those that have an error of their own. */
  async function showFiles(files) {
    const all = [...gathered, ...files];
    const bytes = all.reduce((sum, file) => sum + file.size, 0);
    if (bytes > MOST) return refuse(tooLong(bytes));
    const texts = await Promise.all(all.map(textOf)).catch(() => []);
    const binary = texts.find((text) => isBinary(text) && !isDump(text));
    if (binary) return refuse(phrase("binary"));
    const placed = texts.map((text) => [isDump(text) ? 0 : clinic.fails(text) ? 1 : 2, text]);
    placed.sort(([a], [b]) => a - b);
    await (texts.length ? put(placed.map(([, text]) => text).join("\n")) : refuse(phrase("unread")));
    gathered = texts.length ? all : [];
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

  // --- start: empty, whatever the browser remembers, or with what was pasted on the landing page, or, after
  // Back, with what was here ---

  one(".clinic-field").hidden = false;
  const pasted = window.name.startsWith("log:") ? window.name.slice(4) : "";
  if (pasted) window.name = "";
  const isBack = performance.getEntriesByType("navigation")[0].type === "back_forward";
  put(pasted || (isBack && sessionStorage.getItem("log")) || "");
  const forget = () => sessionStorage.removeItem("log");
  forget();
  addEventListener("pageshow", ({ persisted }) => persisted && forget()); // the page is back as it was
  if (pasted) addEventListener("load", () => says.scrollIntoView());
  // Whoever follows a link of an answer comes back; other pages need not have the log.
  found.addEventListener("click", ({ target, ctrlKey, metaKey, shiftKey }) => {
    const link = target.closest("a[href]");
    if (!link || link.pathname === location.pathname || ctrlKey || metaKey || shiftKey) return;
    forget();
    if (answered.length < KEPT) sessionStorage.setItem("log", answered);
  });
})();
