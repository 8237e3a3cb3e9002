"use strict";
// The calculators of book/will_it_fit.md; their formulas are in estimating.js. The words are in the
// page itself, where they are translated: labels, tables, phrases.
(() => {
  const PARTS = [
    "parameters", "gradients", "optimizer", "activations", "casts", "communication", "step",
  ];
  const SIZES = ["layers", "hidden", "heads", "sequence", "vocabulary"];
  const COUNTED = ["kind", "layers", "hidden", "vocabulary"]; // a change counts parameters anew
  const MOST_GPUS = 4096;
  const all = (selector, around = document) => [...around.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);

  function make(tag, attributes = {}, words = "", kind = "1999/xhtml") {
    const element = document.createElementNS(`http://www.w3.org/${kind}`, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = words;
    return element;
  }

  function phrase(name, gaps = {}) {
    const text = one(`[data-phrase="${name}"]`).textContent;
    return text.replace(/\{(\w+)\}/g, (gap, key) => gaps[key] ?? gap);
  }

  // --- numbers, as people write them: 25.6M, 7 B, 1,024, 1e9 ---

  const SUFFIXES = { T: 1e12, B: 1e9, G: 1e9, M: 1e6, k: 1e3 };
  const suffix = (letter) => Object.keys(SUFFIXES).find((s) => s.toLowerCase() === letter);

  function parse(text) {
    const plain = text.trim().toLowerCase().replace(/,(?=\d{3}(\D|$))/g, "");
    const found = /^(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)$/.exec(plain);
    return found ? Number(found[1]) * (SUFFIXES[suffix(found[2])] ?? 1) : NaN;
  }

  /** The value of a slider, as a person would write it into the field. */
  function write(value, { whole, count }) {
    const rounded = whole ? Math.round(value) : Number(value.toPrecision(3));
    const fits = count && Object.keys(SUFFIXES).find((letter) => rounded >= SUFFIXES[letter]);
    return fits ? rounded / SUFFIXES[fits] + fits : String(rounded);
  }

  function fixed(value, digits = 0) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return value.toLocaleString("en-US", options);
  }

  const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const unit = (bytes) => UNITS.find(([, size]) => bytes >= size) ?? UNITS.at(-1);
  const inBytes = (bytes) => `${fixed(bytes / unit(bytes)[1], 1)} ${unit(bytes)[0]}`;
  const inMs = (ms) => (ms < 100 ? String(Number(ms.toPrecision(2))) : fixed(ms));

  // --- fields: several may have one name, and then show one setting ---

  class Wrong extends Error {}
  const fields = new Map();
  for (const field of all("[data-name]"))
    fields.set(field.dataset.name, [...(fields.get(field.dataset.name) ?? []), field]);
  const initial = new Map([...fields].map(([name, [field]]) => [name, field.value]));
  const choices = all("select[data-name]");
  const text = (name) => fields.get(name)[0].value;
  const put = (name, value) => fields.get(name).forEach((field) => (field.value = value));
  const limits = ({ dataset }) => [parse(dataset.from), parse(dataset.to)];

  /** What is wrong with a number, or an empty string. */
  function complaint(field) {
    const value = parse(field.value);
    const [from, to] = limits(field);
    if (!field.value.trim()) return phrase("empty");
    if (Number.isNaN(value)) return phrase("no-number");
    if (value < from || value > to) return phrase("limits", field.dataset);
    return field.dataset.whole && !Number.isInteger(value) ? phrase("not-whole") : "";
  }

  function number(name) {
    const [field] = fields.get(name);
    const wrong = complaint(field);
    if (wrong) throw new Wrong(`${one(`#${field.id}-label`).textContent}: ${wrong}`);
    return parse(field.value);
  }

  /** From a share between 0 and 1 to a value and back; wide ranges are logarithmic. */
  function scale(field) {
    const [from, to] = limits(field);
    if (from > 0 && to / from > 100) {
      const range = Math.log(to / from);
      return [(share) => from * Math.exp(share * range), (value) => Math.log(value / from) / range];
    }
    return [(share) => from + share * (to - from), (value) => (value - from) / (to - from)];
  }

  function moveSlider(slider) {
    const [field] = fields.get(slider.dataset.slider);
    slider.setAttribute("aria-valuetext", field.value);
    // One that is being moved stays: a whole number may take several steps to the next.
    if (slider === document.activeElement || complaint(field)) return;
    slider.value = slider.max * scale(field)[1](parse(field.value));
  }

  function showFields() {
    for (const control of all("[data-if]")) {
      const conditions = control.dataset.if.split(" ").map((condition) => condition.split("="));
      control.hidden = conditions.some(([name, value]) => name && text(name) !== value);
    }
    for (const error of all("[data-error]")) {
      const field = error.parentElement.querySelector("[data-name]");
      error.textContent = complaint(field);
      error.hidden = !error.textContent;
      field.setAttribute("aria-invalid", !error.hidden);
    }
    all("[data-slider]").forEach(moveSlider);
  }

  /** What the chosen preset sets. A change of one of these by hand makes the preset "own". */
  const sets = (select) => JSON.parse(select.selectedOptions[0].dataset.set);

  function change({ target }) {
    const name = target.dataset.name ?? target.dataset.slider;
    if (!fields.has(name)) return;
    const [field] = fields.get(name);
    const moved = target.dataset.slider && scale(field)[0](target.value / target.max);
    put(name, target.dataset.slider ? write(moved, field.dataset) : target.value);
    for (const select of choices) if (name in sets(select)) put(select.dataset.name, "own");
    if (target.options) Object.entries(sets(target)).forEach(([set, value]) => put(set, value));
    if (COUNTED.includes(name) && text("kind") === "transformer") countParameters();
    update();
    writeLink();
  }

  /** A transformer's sizes say how many parameters it has, and its blocks. */
  function countParameters() {
    if (SIZES.some((size) => complaint(fields.get(size)[0]))) return;
    const { parameters, largest_block } = transformer(text("precision"));
    put("params", write(parameters, { count: true }));
    put("block", write(largest_block, { count: true }));
  }

  // --- links: what differs from the first settings and from what the presets set ---

  function writeLink() {
    const usual = new Map(initial);
    for (const select of choices)
      if (select.value !== initial.get(select.dataset.name))
        for (const [name, value] of Object.entries(sets(select))) usual.set(name, value);
    const changed = [...usual].filter(([name, value]) => text(name) !== value);
    const link = new URLSearchParams(changed.map(([name]) => [name, text(name)]));
    history.replaceState(null, "", `#${link}`);
  }

  function readLink() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) return; // leads to a heading
    const isKnown = ([name, value]) => {
      const options = fields.get(name)?.[0].options;
      return fields.has(name) && (!options || [...options].some((o) => o.value === value));
    };
    const link = [...new URLSearchParams(hash)];
    const known = link.filter(isKnown).map(([name, value]) => [name, value.slice(0, 24)]);
    for (const [name, value] of [...initial, ...known]) put(name, value);
    for (const [name] of known)
      if (fields.get(name)[0].options)
        for (const [set, value] of Object.entries(sets(fields.get(name)[0]))) put(set, value);
    for (const [name, value] of known) put(name, value);
    const unknown = link.filter((setting) => !isKnown(setting));
    const settings = unknown.map((setting) => setting.join("=")).join(", ").slice(0, 80);
    message.textContent = settings && phrase("unknown", { settings });
    update();
  }

  // --- will it fit? ---

  function transformer(precision) {
    const sizes = Object.fromEntries(SIZES.map((name) => [name, number(name)]));
    const fused_attention = text("attention") === "fused";
    const checkpointing = text("checkpointing") === "on";
    return estimating.transformer({ ...sizes, precision, fused_attention, checkpointing });
  }

  /** What a sample saves; and the parameters outside the blocks, if we know them. */
  function oneSample(precision) {
    if (text("kind") === "transformer") return transformer(precision);
    const part = estimating.PRECISIONS[precision].activation / 4; // of what float32 takes
    return { activation_bytes: number("saved") * 1e6 * part, root: 0 };
  }

  /** A function from the number of GPUs to the memory of each column of the table. */
  function memories() {
    const precision = text("precision");
    const parameters = number("params");
    const { activation_bytes, root } = oneSample(precision);
    // FSDP's MixedPrecisionPolicy casts what is passed from layer to layer; autocast does not.
    const cast = oneSample(precision.replace("-mixed", ""));
    const options = {
      precision, optimizer: text("optimizer"), batch: number("batch"),
      activation_bytes, largest_block: number("block"), root,
    };
    const fsdp = { rung: "fsdp", activation_bytes: cast.activation_bytes };
    const rungs = [{ rung: "dp" }, { rung: "dp", first: false }, { rung: "ddp" }, fsdp];
    return (gpus) => [{}, ...rungs.map((rung) => ({ ...rung, gpus }))].map((rung) =>
      estimating.memory_per_gpu(parameters, { ...options, ...rung }));
  }

  /** A tenth of a GPU is left for what the formulas leave out. */
  function verdict(memory, have) {
    if (memory.total <= 0.9 * have) return "fits";
    return memory.at_least <= have ? "close" : "not";
  }

  function memorySentences(on, gpus, have) {
    const said = (name, memory) => phrase(verdict(memory, have), {
      rung: phrase(name, { gpus }), have: inBytes(have),
      need: inBytes(memory.total), least: inBytes(memory.at_least),
    });
    const [single, , , ddp, fsdp] = on(gpus);
    const sentences = [said("one", single)];
    if (gpus > 1) sentences.push(said("ddp", ddp), said("fsdp", fsdp));
    const fits = (n) => verdict(on(n)[4], have) === "fits";
    let enough = gpus;
    while (enough <= MOST_GPUS && !fits(enough)) enough += 1;
    if (enough > MOST_GPUS) sentences.push(phrase("never", { most: MOST_GPUS }));
    else if (enough > gpus) sentences.push(phrase("enough", { gpus: enough }));
    return sentences.join(" ");
  }

  const colour = (part) => `--part: var(--fit-${part})`;

  function drawBars(columns, names, have) {
    const most = 1.02 * Math.max(have, ...columns.map((memory) => memory.total));
    const percent = (bytes) => `${(100 * bytes) / most}%`;
    const limit = make("div", { class: "bars-limit" });
    const style = `left: ${percent(have)}`;
    const inside = `${style}; transform: translateX(-${percent(have)})`;
    limit.append(make("span", { style: inside }, phrase("limit", { have: inBytes(have) })));
    const bars = columns.flatMap((memory, column) => {
      const track = make("div", { class: "bar-track" });
      // Adam's copy comes when the activations are gone: what it adds is what it has more.
      const step = Math.max(0, memory.step - memory.activations - memory.casts);
      for (const [part, size] of Object.entries({ ...memory, step }))
        if (PARTS.includes(part) && size > 0)
          track.append(make("i", { style: `width: ${percent(size)}; ${colour(part)}` }));
      track.append(make("b", { style }));
      const total = make("span", { class: "bar-total" }, inBytes(memory.total));
      return [make("span", { class: "bar-name" }, names[column]), track, total];
    });
    one(".memory-figure").replaceChildren(limit, ...bars);
  }

  function showMemory(table, says, figure) {
    const [have, gpus, on] = [number("memory") * 1e9, number("gpus"), memories()];
    const columns = on(gpus);
    const [name, size] = unit(Math.min(...columns.map((memory) => memory.total)));
    const [corner, ...heads] = all("thead th", table);
    corner.textContent = phrase("unit", { unit: name });
    const rows = all("tbody tr", table);
    PARTS.forEach((part, row) => (rows[row].cells[0].style = colour(part)));
    columns.forEach((memory, column) => {
      const amounts = [...PARTS, "total", "at_least"].map((part) => memory[part] / size);
      const values = amounts.map((amount) => fixed(amount, amount < 100 ? 1 : 0));
      values.push(phrase(`${verdict(memory, have)}-short`));
      values.forEach((value, row) => (rows[row].cells[column + 1].textContent = value));
    });
    says.textContent = memorySentences(on, gpus, have);
    drawBars(columns, heads.map((head) => head.textContent), have);
  }

  // --- will two be faster? ---

  function computing() {
    if (text("time") === "measured") return number("ms") / 1e3;
    const work = number("batch") / (number("peak") * 1e12 * (number("utilisation") / 100));
    if (text("kind") === "counted") return work * number("flops") * 1e9;
    const { flops, parameters } = transformer(text("precision"));
    return (work * flops * number("params")) / parameters; // it may have more than the sizes give
  }

  function showSpeed(table, says, figure) {
    const [gpus, seconds, params] = [number("gpus"), computing(), number("params")];
    const size = estimating.PRECISIONS[text("precision")];
    const [gradients, weights] = [size.gradient * params, size.cast * params];
    const bytes = { ddp: gradients, fsdp: (2 * weights + gradients) / 3 };
    const link = [number("latency") / 1e6, number("bandwidth") * 1e9];
    const options = { overlap: number("overlap"), scaling: text("scaling") };
    const gain = (n, rung) =>
      estimating.speed_up(seconds, bytes[rung], n, ...link, { ...options, rung });
    const gaps = (n, rung) => ({
      gpus: n, rung: rung.toUpperCase(), gain: fixed(gain(n, rung), 2),
      percent: fixed((100 * gain(n, rung)) / n),
      ms: inMs((1e3 * seconds * (options.scaling === "weak" ? n : 1)) / gain(n, rung)),
    });
    const counts = [...new Set([2, 4, 8, 16, 32, 64, Math.max(2, gpus)])].sort((a, b) => a - b);
    table.tBodies[0].replaceChildren(...counts.map((n) => {
      const cells = [gaps(n, "ddp"), gaps(n, "fsdp")];
      const words = cells.flatMap((cell) => [cell.ms, cell.gain, `${cell.percent} %`]);
      const row = make("tr", n === gpus ? { class: "chosen" } : {});
      row.append(...[n, ...words].map((word) => make("td", { class: "text-right" }, word)));
      return row;
    }));
    const sentences = ["ddp", "fsdp"].map((rung) => {
      const chosen = Math.max(2, gpus);
      return phrase(gain(chosen, rung) > 1 ? "faster" : "slower", gaps(chosen, rung));
    });
    const sent = { gradients: inBytes(gradients), weights: inBytes(weights) };
    sentences.push(phrase("alone", { ms: inMs(1e3 * seconds), ...sent }));
    says.textContent = sentences.join(" ");
    drawCurve(figure, [1, ...counts], gain);
  }

  /** Speed-up against the number of GPUs, both logarithmic: perfect scaling is a straight line. */
  function drawCurve(figure, counts, gain) {
    const [width, height] = [Math.max(280, figure.clientWidth), 280];
    const [left, right, top, bottom] = [44, width - 60, 12, height - 40];
    const gainsOf = (rung) => counts.map((n) => gain(n, rung));
    const gains = { ddp: gainsOf("ddp"), fsdp: gainsOf("fsdp") };
    const most = Math.log2(counts.at(-1));
    const least = Math.floor(Math.log2(Math.min(...gains.ddp, ...gains.fsdp)));
    const x = (n) => left + (Math.log2(n) / most) * (right - left);
    const y = (g) => bottom - ((Math.log2(g) - least) / (most - least)) * (bottom - top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height }, "", "2000/svg");
    const add = (tag, attributes, words) => svg.append(make(tag, attributes, words, "2000/svg"));
    const write = (x, y, anchor, words, more = {}) =>
      add("text", { x, y, "text-anchor": anchor, ...more }, words);
    for (let power = least; power <= most; power += most - least > 8 ? 2 : 1) {
      const at = y(2 ** power);
      add("line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
      write(left - 6, at + 4, "end", power < 0 ? `1/${2 ** -power}` : 2 ** power);
    }
    for (let power = 0; power <= most; power += most > 8 ? 2 : 1)
      write(x(2 ** power), height - 22, "middle", 2 ** power);
    write((left + right) / 2, height - 4, "middle", phrase("x"));
    write(0, 0, "middle", phrase("y"), { transform: `translate(12 ${bottom / 2}) rotate(-90)` });
    const points = (values) => values.map((g, i) => `${x(counts[i])},${y(g)}`).join(" ");
    add("polyline", { class: "perfect", points: points(counts) });
    const [ddp, fsdp] = [y(gains.ddp.at(-1)), y(gains.fsdp.at(-1))];
    const apart = Math.max(0, 7 - Math.abs(ddp - fsdp) / 2) * (ddp <= fsdp ? 1 : -1);
    for (const [rung, end] of [["ddp", ddp - apart], ["fsdp", fsdp + apart]]) {
      add("polyline", { class: rung, points: points(gains[rung]) });
      for (const [i, g] of gains[rung].entries())
        add("circle", { class: rung, cx: x(counts[i]), cy: y(g), r: 3 });
      write(right + 8, end + 4, "start", rung.toUpperCase(), { class: rung });
    }
    figure.replaceChildren(svg);
  }

  // --- start ---

  /** Both answers; one that a wrong number keeps back says so, and shows no old numbers. */
  function update() {
    showFields();
    for (const [name, show] of [["memory", showMemory], ["speed", showSpeed]]) {
      const [table, says] = [one(`.${name}-table table`), one(`.${name}-says p`)];
      const figure = one(`.${name}-figure`);
      try {
        show(table, says, figure);
      } catch (error) {
        if (!(error instanceof Wrong)) throw error;
        says.textContent = phrase("wrong", { what: error.message });
        figure.replaceChildren();
        for (const cell of all("tbody td:nth-child(n + 2)", table)) cell.textContent = "–";
      }
      figure.setAttribute("aria-label", phrase(`${name}-figure`, { sentences: says.textContent }));
    }
  }

  const message = make("p", { class: "control-error", role: "status" });
  one(".controls").before(message);
  all(".controls, .memory-figure, .speed-figure").forEach((part) => (part.hidden = false));
  all(".memory-says, .speed-says").forEach((part) => part.setAttribute("aria-live", "polite"));
  for (const example of all("[data-settings]")) {
    const link = make("a", { href: `#${example.dataset.settings}` });
    link.append(...example.childNodes);
    example.append(link);
    example.hidden = false;
  }
  document.addEventListener("input", change);
  addEventListener("hashchange", () => {
    readLink();
    if (location.hash.includes("=")) one(".controls").scrollIntoView();
  });
  new ResizeObserver(update).observe(one(".speed-figure")); // its words keep their size
  readLink();
})();
