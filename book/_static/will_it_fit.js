"use strict";
// The formulas of src/torchladder/estimating.py, under its names; a test compares both on the cases
// of tests/site/estimates.json. What they mean is said there.
const estimating = (() => {
  const STATES = { sgd: 0, momentum: 1, adam: 2 };
  const precision = (parameter, gradient, state, master, cast, activation) => ({
    parameter, gradient, state, master, cast, activation,
  });
  const PRECISIONS = {
    fp32: precision(4, 4, 4, 0, 4, 4),
    amp: precision(4, 4, 4, 0, 2, 2),
    bf16: precision(2, 2, 2, 0, 2, 2),
    master: precision(2, 2, 4, 4, 2, 2),
  };

  function memory_per_gpu(parameters, options = {}) {
    const {
      rung = "gpu", gpus = 1, precision = "fp32", optimizer = "sgd", activation_bytes = 0,
      output_bytes = 0, batch = 1, largest_block = parameters, bucket_view = false, first = true,
    } = options;
    const size = PRECISIONS[precision];
    const shards = rung === "fsdp" ? gpus : 1;
    const gradients = size.gradient * parameters;
    let states = (STATES[optimizer] * size.state + size.master) * parameters;
    let communication = 0;
    if (rung === "ddp" && !bucket_view) communication = gradients;
    if (rung === "fsdp" && gpus > 1)
      communication = Math.min(2 * largest_block, parameters) * 2 * size.cast;
    if (rung === "dp" && gpus > 1) {
      communication = first ? gradients + gpus * batch * output_bytes : 0;
      if (!first) states = 0;
    }
    const memory = {
      parameters: (size.parameter * parameters) / shards,
      gradients: gradients / shards,
      optimizer: states / shards,
      activations: batch * activation_bytes,
      casts: size.cast < size.parameter && rung !== "fsdp" ? size.cast * parameters : 0,
      communication,
    };
    const total = Object.values(memory).reduce((sum, part) => sum + part);
    const turns = Math.min(memory.activations + memory.casts, memory.gradients);
    return { ...memory, total, at_least: total - turns };
  }

  function transformer({
    layers, hidden: h, heads, sequence: s, vocabulary, precision = "amp", fused_attention = true,
    checkpointing = false,
  }) {
    const size = PRECISIONS[precision].activation;
    const block = 12 * h * h + 13 * h;
    const table = fused_attention ? 0 : (2 * size + 1) * heads * s * s;
    const layer = (16 * size + 2) * s * h + table;
    const ends = (2 * size + 1) * s * h + 4 * s * vocabulary;
    const saved = checkpointing ? layers * size * s * h + layer : layers * layer;
    return {
      parameters: layers * block + (vocabulary + s) * h + 2 * h,
      largest_block: block,
      activation_bytes: saved + ends,
    };
  }

  function computing_seconds(parameters, tokens, flops_per_second, options = {}) {
    const { utilisation = 1, checkpointing = false } = options;
    return ((checkpointing ? 8 : 6) * parameters * tokens) / (flops_per_second * utilisation);
  }

  function all_reduce_seconds(nbytes, ranks, latency, bandwidth) {
    const messages = 2 * (ranks - 1);
    return messages * latency + ((messages / ranks) * nbytes) / bandwidth;
  }

  function exchange_seconds(nbytes, ranks, latency, bandwidth, rung = "ddp") {
    return (rung === "fsdp" ? 1.5 : 1) * all_reduce_seconds(nbytes, ranks, latency, bandwidth);
  }

  function step_seconds(computing, all_reduce, overlap = 0) {
    return computing + Math.max(0, all_reduce - overlap * computing);
  }

  function speed_up(computing, nbytes, ranks, latency, bandwidth, options = {}) {
    const { overlap = 0, scaling = "weak", rung = "ddp" } = options;
    const own = scaling === "weak" ? computing : computing / ranks;
    const exchange = ranks > 1 ? exchange_seconds(nbytes, ranks, latency, bandwidth, rung) : 0;
    return (ranks * own) / step_seconds(own, exchange, overlap);
  }

  return {
    PRECISIONS, memory_per_gpu, transformer, computing_seconds, all_reduce_seconds,
    exchange_seconds, step_seconds, speed_up,
  };
})();

// The page. Its words are in the page itself, where they are translated: labels, tables, phrases.
(() => {
  const PARTS = ["parameters", "gradients", "optimizer", "activations", "casts", "communication"];
  const MOST_GPUS = 4096;
  const all = (selector, around = document) => [...around.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);

  // --- numbers: 25.6M, 7 B, 1,024, 1e9 ---

  const SUFFIXES = { k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };

  function parse(text) {
    const plain = text.trim().replace(/,(?=\d{3}(\D|$))/g, "");
    const found = /^(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)$/i.exec(plain);
    return found ? Number(found[1]) * (SUFFIXES[found[2].toLowerCase()] ?? 1) : NaN;
  }

  function write(value, field) {
    const rounded = field.dataset.whole ? Math.round(value) : Number(value.toPrecision(3));
    if (!field.dataset.count) return String(rounded);
    const suffix = ["T", "B", "M", "k"].find((letter) => rounded >= SUFFIXES[letter.toLowerCase()]);
    return suffix ? rounded / SUFFIXES[suffix.toLowerCase()] + suffix : String(rounded);
  }

  const fixed = (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const significant = (value) => (value >= 1e4 ? fixed(value, 0) : String(+value.toPrecision(3)));

  function unit(bytes) {
    const units = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    return units.find(([, size]) => bytes >= size) ?? units.at(-1);
  }

  function inBytes(bytes, [name, size] = unit(bytes)) {
    return `${fixed(bytes / size, 1)} ${name}`;
  }

  function phrase(name, gaps = {}) {
    const text = one(`[data-phrase="${name}"]`).textContent;
    return text.replace(/\{(\w+)\}/g, (gap, key) => gaps[key] ?? gap);
  }

  // --- fields: those of one name show one setting ---

  class Wrong extends Error {}
  const fields = Map.groupBy
    ? Map.groupBy(all("[data-name]"), (field) => field.dataset.name)
    : all("[data-name]").reduce((map, field) =>
        map.set(field.dataset.name, [...(map.get(field.dataset.name) ?? []), field]), new Map());
  const initial = new Map([...fields].map(([name, [field]]) => [name, field.value]));
  const text = (name) => fields.get(name)[0].value;
  const put = (name, value) => fields.get(name).forEach((field) => (field.value = value));
  const label = (field) => one(`#${field.id}-label`).textContent;
  const limits = (field) => [parse(field.dataset.from), parse(field.dataset.to)];

  /** What is wrong with a number, or an empty string. */
  function complaint(field) {
    const value = parse(field.value);
    const [from, to] = limits(field);
    if (!field.value.trim()) return phrase("empty");
    if (Number.isNaN(value)) return phrase("no-number");
    if (field.dataset.whole && !Number.isInteger(value)) return phrase("not-whole");
    const gaps = { from: field.dataset.from, to: field.dataset.to };
    return value < from || value > to ? phrase("limits", gaps) : "";
  }

  function number(name) {
    const [field] = fields.get(name);
    const wrong = complaint(field);
    if (wrong) throw new Wrong(`${label(field)}: ${wrong}`);
    return parse(field.value);
  }

  const isLogarithmic = ([from, to]) => from > 0 && to / from > 100;

  function fromSlider(slider) {
    const [field] = fields.get(slider.dataset.slider);
    const [from, to] = limits(field);
    const share = slider.value / slider.max;
    const value = isLogarithmic([from, to]) ? from * (to / from) ** share : from + share * (to - from);
    put(slider.dataset.slider, write(value, field));
  }

  function moveSlider(slider) {
    const [field] = fields.get(slider.dataset.slider);
    const [from, to] = limits(field);
    const value = Math.min(to, Math.max(from, parse(field.value) || from));
    const share = isLogarithmic([from, to])
      ? Math.log(value / from) / Math.log(to / from)
      : (value - from) / (to - from);
    // One that is being moved stays: a whole number may take several steps to the next.
    if (slider !== document.activeElement) slider.value = share * slider.max;
    slider.setAttribute("aria-valuetext", field.value);
  }

  function showFields() {
    for (const control of all("[data-if]")) {
      const conditions = control.dataset.if.split(" ").filter(Boolean);
      control.hidden = !conditions.every((condition) => {
        const [name, value] = condition.split("=");
        return text(name) === value;
      });
    }
    for (const field of [...fields.values()].flat().filter((field) => field.dataset.from)) {
      const wrong = complaint(field);
      const error = one(`#${field.id}-error`);
      field.setAttribute("aria-invalid", Boolean(wrong));
      error.textContent = wrong;
      error.hidden = !wrong;
    }
    all("[data-slider]").forEach(moveSlider);
  }

  /** What a preset sets; changing one of these by hand makes the preset "own". */
  const sets = (select) => JSON.parse(select.selectedOptions[0]?.dataset.set ?? "{}");
  const choices = all("select[data-name]");

  function choose(name) {
    for (const [other, value] of Object.entries(sets(fields.get(name)[0]))) put(other, value);
  }

  function leavePresets(name) {
    for (const select of choices) if (name in sets(select)) put(select.dataset.name, "own");
  }

  // --- links ---

  function expected() {
    const values = new Map(initial);
    for (const select of choices)
      if (select.value !== initial.get(select.dataset.name))
        Object.entries(sets(select)).forEach(([name, value]) => values.set(name, value));
    return values;
  }

  function writeLink() {
    const link = new URLSearchParams();
    const usual = expected();
    for (const [name] of fields) {
      const changed = text(name) !== (name in {} ? "" : usual.get(name));
      if (changed) link.set(name, text(name));
    }
    history.replaceState(null, "", `#${link}`);
  }

  function readLink() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) return; // an ordinary anchor
    const unknown = [];
    for (const [name, value] of initial) put(name, value);
    const link = [...new URLSearchParams(hash)];
    for (const presets of [true, false])
      for (const [name, value] of link) {
        const [field] = fields.get(name) ?? [];
        const known = field && (!field.options || [...field.options].some((o) => o.value === value));
        if (!known && presets) unknown.push(`${name}=${value}`.slice(0, 60));
        if (!known) continue;
        put(name, value.slice(0, 24));
        if (presets && field.options) choose(name);
      }
    message.textContent = unknown.length ? phrase("unknown", { settings: unknown.join(", ") }) : "";
    update();
  }

  // --- will it fit? ---

  function oneSample(precision) {
    if (text("kind") === "counted")
      return (number("saved") * 1e6 * estimating.PRECISIONS[precision].activation) / 4;
    const sizes = ["layers", "hidden", "heads", "sequence", "vocabulary"];
    const options = Object.fromEntries(sizes.map((name) => [name, number(name)]));
    options.fused_attention = text("attention") === "fused";
    options.checkpointing = text("checkpointing") === "on";
    return estimating.transformer({ ...options, precision }).activation_bytes;
  }

  function columns() {
    const precision = text("precision");
    const options = {
      precision, optimizer: text("optimizer"), batch: number("batch"),
      activation_bytes: oneSample(precision), largest_block: number("block"),
    };
    const parameters = number("params");
    return (gpus) => [
      estimating.memory_per_gpu(parameters, { ...options, rung: "gpu" }),
      ...[{ rung: "dp" }, { rung: "dp", first: false }, { rung: "ddp" }, { rung: "fsdp" }].map(
        (more) => estimating.memory_per_gpu(parameters, { ...options, ...more, gpus })),
    ];
  }

  /** The rest of a GPU, a tenth, is for what the formulas leave out. */
  function verdict(memory, have) {
    if (memory.total <= 0.9 * have) return "fits";
    return memory.at_least <= have ? "close" : "not";
  }

  function memorySentences(memories, have, gpus, on) {
    const said = (name, memory) => {
      const known = verdict(memory, have);
      const gaps = { rung: phrase(name, { gpus }), have: inBytes(have), need: inBytes(memory.total) };
      return phrase(known, { ...gaps, least: inBytes(memory.at_least) });
    };
    const [single, , , ddp, fsdp] = memories;
    const sentences = [said("one", single)];
    if (gpus > 1) sentences.push(said("ddp", ddp), said("fsdp", fsdp));
    if (verdict(fsdp, have) !== "fits") {
      let enough = gpus + 1;
      while (enough <= MOST_GPUS && verdict(on(enough)[4], have) !== "fits") enough++;
      const gaps = { gpus: enough, most: MOST_GPUS };
      sentences.push(phrase(enough > MOST_GPUS ? "never" : "enough", gaps));
    }
    return sentences.join(" ");
  }

  function drawBars(memories, names, have) {
    const scale = 1.02 * Math.max(have, ...memories.map((memory) => memory.total));
    const share = (bytes) => `${(100 * bytes) / scale}%`;
    const bars = memories.map((memory, column) => {
      const track = make("div", { class: "bar-track" });
      for (const part of PARTS)
        track.append(make("i", { class: `part part-${part}`, style: `width: ${share(memory[part])}` }));
      track.append(make("i", { class: "bar-limit", style: `left: ${share(have)}` }));
      const name = make("span", { class: "bar-name" }, names[column]);
      return [name, track, make("span", { class: "bar-total" }, inBytes(memory.total))];
    });
    const gpu = make("span", { style: `left: ${share(have)}` }, phrase("limit", { have: inBytes(have) }));
    const top = make("div", { class: "bars-limit" });
    top.append(gpu);
    one(".bars").replaceChildren(top, ...bars.flat());
  }

  function showMemory() {
    const table = one(".memory-table table");
    const rows = all("tbody tr", table);
    const names = all("thead th", table).slice(1).map((cell) => cell.textContent);
    const says = one(".memory-says p");
    try {
      const have = number("memory") * 1e9;
      const gpus = number("gpus");
      const on = columns();
      const memories = on(gpus);
      const [name, size] = unit(Math.max(...memories.map((memory) => memory.total)));
      table.querySelector("thead th").textContent = phrase("unit", { unit: name });
      memories.forEach((memory, column) => {
        const values = [...PARTS, "total", "at_least"].map((part) => fixed(memory[part] / size, 1));
        values.push(phrase(`${verdict(memory, have)}-short`));
        values.forEach((value, row) => (rows[row].cells[column + 1].textContent = value));
      });
      says.textContent = memorySentences(memories, have, gpus, on);
      drawBars(memories, names, have);
      one(".bars").setAttribute("aria-label", phrase("bars", { sentences: says.textContent }));
    } catch (error) {
      blank(error, says, table, 1);
      one(".bars").replaceChildren();
    }
  }

  /** Say what is wrong, and show no numbers that do not belong to the settings. */
  function blank(error, says, table, firstColumn) {
    if (!(error instanceof Wrong)) throw error;
    says.textContent = phrase("wrong", { what: error.message });
    for (const row of all("tbody tr", table))
      [...row.cells].slice(firstColumn).forEach((cell) => (cell.textContent = "–"));
  }

  // --- will two be faster? ---

  function computing() {
    if (text("time") === "measured") return number("ms") / 1e3;
    const speed = number("peak") * 1e12;
    const options = { utilisation: number("utilisation") / 100 };
    if (text("kind") === "counted") // 6 FLOPs a parameter and token
      return estimating.computing_seconds(
        (number("flops") * 1e9) / 6, number("batch"), speed, options);
    options.checkpointing = text("checkpointing") === "on";
    const tokens = number("batch") * number("sequence");
    return estimating.computing_seconds(number("params"), tokens, speed, options);
  }

  function speeds() {
    const seconds = computing();
    const size = estimating.PRECISIONS[text("precision")];
    const bytes = { ddp: size.gradient * number("params"), fsdp: size.cast * number("params") };
    const link = [number("latency") / 1e6, number("bandwidth") * 1e9];
    const options = { overlap: number("overlap"), scaling: text("scaling") };
    const on = (ranks, rung) => {
      const gain = estimating.speed_up(seconds, bytes[rung], ranks, ...link, { ...options, rung });
      const work = options.scaling === "weak" ? ranks : 1;
      return { gain, ms: (1e3 * seconds * work) / gain, efficiency: gain / ranks };
    };
    return { seconds, bytes, on };
  }

  function showSpeed() {
    const table = one(".speed-table table");
    const body = table.querySelector("tbody");
    const says = one(".speed-says p");
    const figure = one(".curve");
    try {
      const gpus = number("gpus");
      const { seconds, bytes, on } = speeds();
      const counts = [2, 4, 8, 16, 32, 64];
      if (gpus > 1 && !counts.includes(gpus)) counts.push(gpus);
      counts.sort((a, b) => a - b);
      body.replaceChildren(...counts.map((ranks) => {
        const row = make("tr", ranks === gpus ? { class: "chosen" } : {});
        const cells = ["ddp", "fsdp"].flatMap((rung) => {
          const { ms, gain, efficiency } = on(ranks, rung);
          return [significant(ms), fixed(gain, 2), `${fixed(100 * efficiency, 0)} %`];
        });
        row.append(...[ranks, ...cells].map((cell) => make("td", { class: "text-right" }, cell)));
        return row;
      }));
      const ranks = Math.max(2, gpus);
      const said = (rung) => {
        const { gain, ms, efficiency } = on(ranks, rung);
        const percent = fixed(100 * efficiency, 0);
        const gaps = { gpus: ranks, gain: fixed(gain, 2), ms: significant(ms), percent };
        return phrase(gain > 1 ? "faster" : "slower", { ...gaps, rung: rung.toUpperCase() });
      };
      const sent = { ddp: inBytes(bytes.ddp), fsdp: inBytes(1.5 * bytes.fsdp) };
      const alone = phrase("alone", { ms: significant(1e3 * seconds), ...sent });
      says.textContent = [said("ddp"), said("fsdp"), alone].join(" ");
      drawCurve(figure, counts, on);
      figure.setAttribute("aria-label", phrase("curve", { sentences: says.textContent }));
    } catch (error) {
      blank(error, says, table, 1);
      figure.replaceChildren();
    }
  }

  function drawCurve(figure, counts, on) {
    const [width, height] = [Math.max(280, figure.clientWidth), 280];
    const [left, right, top, bottom] = [44, 60, 12, 40];
    const gains = { ddp: [1], fsdp: [1] };
    for (const rung of ["ddp", "fsdp"]) for (const n of counts) gains[rung].push(on(n, rung).gain);
    const most = Math.log2(counts.at(-1));
    const least = Math.floor(Math.log2(Math.min(...gains.ddp, ...gains.fsdp)));
    const x = (n) => left + (Math.log2(n) / most) * (width - left - right);
    const y = (gain) => height - bottom -
      ((Math.log2(gain) - least) / (most - least)) * (height - top - bottom);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": true });
    const add = (tag, attributes, words) => svg.append(draw(tag, attributes, words));
    for (let power = least; power <= most; power += most - least > 8 ? 2 : 1) {
      const at = y(2 ** power);
      add("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at });
      add("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, power < 0 ? `1/${2 ** -power}` : 2 ** power);
    }
    for (let power = 0; power <= most; power += most > 8 ? 2 : 1)
      add("text", { x: x(2 ** power), y: height - bottom + 18, "text-anchor": "middle" }, 2 ** power);
    add("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, phrase("x"));
    add("text", { class: "along", x: 0, y: 0, "text-anchor": "middle",
      transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)` }, phrase("y"));
    const line = (values) =>
      values.map((gain, i) => `${x([1, ...counts][i])},${y(gain)}`).join(" ");
    add("polyline", { class: "perfect", points: line([1, ...counts]) });
    const ends = { ddp: y(gains.ddp.at(-1)), fsdp: y(gains.fsdp.at(-1)) };
    const near = 7 - Math.abs(ends.ddp - ends.fsdp) / 2; // labels keep 14 pixels apart
    const shift = near > 0 ? near : 0;
    for (const rung of ["ddp", "fsdp"]) {
      add("polyline", { class: `line-${rung}`, points: line(gains[rung]) });
      gains[rung].forEach((gain, i) =>
        add("circle", { class: `line-${rung}`, cx: x([1, ...counts][i]), cy: y(gain), r: 3 }));
      const above = (rung === "ddp") === ends.ddp <= ends.fsdp;
      add("text", { class: `name-${rung}`, x: width - right + 8, y: ends[rung] + 4 + (above ? -shift : shift) },
        rung.toUpperCase());
    }
    figure.replaceChildren(svg);
  }

  function make(tag, attributes = {}, words = "") {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = words;
    return element;
  }

  function draw(tag, attributes, words = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = words;
    return element;
  }

  function update() {
    showFields();
    showMemory();
    showSpeed();
  }

  // --- start ---

  const message = make("p", { class: "control-error", role: "status" });
  one(".controls").before(message);
  all(".controls, .bars, .curve").forEach((part) => (part.hidden = false));
  all(".memory-says, .speed-says").forEach((part) => part.setAttribute("aria-live", "polite"));
  document.addEventListener("input", ({ target }) => {
    const name = target.dataset.name ?? target.dataset.slider;
    if (!fields.has(name)) return;
    if (target.dataset.slider) fromSlider(target);
    else put(name, target.value);
    if (target.options) choose(name);
    else leavePresets(name);
    update();
    writeLink();
  });
  addEventListener("hashchange", readLink);
  addEventListener("resize", showSpeed);
  readLink();
})();
