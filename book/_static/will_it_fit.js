"use strict";
// The calculators of book/will_it_fit.md; `estimating` has the formulas of torchclinic.will_it_fit. The
// words are in the page itself: labels, tables, phrases.
(() => {
  const PARTS = ["parameters", "gradients", "optimizer", "activations", "casts", "communication", "step"];
  const SIZES = ["layers", "hidden", "heads", "vocabulary", "sequence"];
  const MIXED = ["experts", "chosen"];
  const USUAL = ["kv_heads", "mlp", "head_size", ...MIXED]; // 0 is what a GPT has
  const COUNTED = ["kind", "architecture", "tied", ...SIZES.slice(0, 4), ...USUAL]; // a change counts parameters anew
  const COLUMNS = { one: 0, ddp: 1, fsdp: 3, hsdp: 4 }; // of the table of memory, whose third is ZeRO-2
  const [RUNGS, USUALLY] = [["ddp", "fsdp", "hsdp"], [2, 4, 8, 16, 32, 64]]; // GPUs
  const OFFLOADED = "held=blocks";
  // What one may do if a model does not fit, each by a change of fields
  const CURES = {
    parts: { loss: "parts" }, norms: { norms: "fused" }, checkpointing: { checkpointing: "on" }, one: { batch: "1" },
    eight: { optimizer: "adam-8bit" }, half: { precision: "bf16" }, lora: { train: "lora", bits: "16" }, qlora: { train: "lora", bits: "4" },
    backward: { held: "one-gradient", optimizer: "adam-8bit-paged" }, offload: { held: "blocks" },
    attention: { matrices: "lora_attention" }, away: { checkpointing: "offloaded" },
  };
  // What no measurement has that the memory's formulas are held against
  const UNTESTED = {
    lora: "kind=transformer&train=lora", gpt: "kind=transformer&architecture=gpt",
    qwen3: "kind=transformer&architecture=qwen3", parts: "kind=transformer&loss=parts",
    muon: "optimizer=muon", paged: "optimizer=adam-8bit-paged", offload: OFFLOADED,
    away: "kind=transformer&checkpointing=offloaded",
  };

  // --- numbers, as people write them: 25.6M, 7 B, 1,024, 1e9 ---

  const SUFFIXES = { T: 1e12, B: 1e9, G: 1e9, M: 1e6, k: 1e3, K: 1e3 };

  function parse(text) {
    let plain = text.trim().toLowerCase();
    if (/^-?[1-9]\d{0,2}(,\d{3})+(?!\d)/.test(plain)) plain = plain.replaceAll(",", "");
    const found = /^(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)$/.exec(plain);
    return found ? Number(found[1]) * (SUFFIXES[found[2].toUpperCase()] ?? 1) : NaN;
  }

  /** A number of parameters, as a person would write it into the field. */
  function write(value) {
    const rounded = Number(value.toPrecision(3));
    const fits = Object.keys(SUFFIXES).find((letter) => rounded >= SUFFIXES[letter]);
    return fits ? rounded / SUFFIXES[fits] + fits : String(rounded);
  }

  const fixed = (value, digits = 0) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const unit = (bytes) => UNITS.find(([, size]) => bytes >= size) ?? UNITS.at(-1);
  const inBytes = (bytes) => `${fixed(bytes / unit(bytes)[1], 1)}\u00a0${unit(bytes)[0]}`;
  const rough = (value) => (value < 100 ? String(Number(value.toPrecision(3))) : fixed(value));

  // --- fields: several may have one name, and then show one setting ---

  class Wrong extends Error {}
  const fields = Map.groupBy(all("[data-name]"), (field) => field.dataset.name);
  const initial = new Map([...fields].map(([name, [field]]) => [name, field.value]));
  const choices = all("select[data-name]");
  const text = (name) => fields.get(name)[0].value;
  const put = (name, value) => fields.get(name).forEach((field) => (field.value = value));
  const reveal = (field) => field.closest("details")?.setAttribute("open", "");
  const putAll = (pairs) => pairs.forEach((pair) => put(...pair));
  /** Whether the fields are so: kind=transformer&architecture=llama|qwen3 */
  const are = (wanted) => wanted.split("&").map((one) => one.split("="))
    .every(([name, values]) => values.split("|").includes(text(name)));

  /** What is wrong with a number, or an empty string. */
  function complaint(field) {
    if (field.options) return "";
    const [value, from, to] = [field.value, field.dataset.from, field.dataset.to].map(parse);
    if (!field.value.trim()) return phrase("empty");
    if (Number.isNaN(value)) return phrase("no-number");
    if (value < from || value > to) return phrase("limits", field.dataset);
    if (field.dataset.whole && !Number.isInteger(value)) return phrase("not-whole");
    const [gpus] = fields.get("gpus");
    return field.dataset.name === "cp" && !complaint(gpus) && parse(gpus.value) % value ? phrase("shared") : "";
  }

  function number(name) {
    const [field] = fields.get(name);
    const wrong = complaint(field);
    if (wrong) throw new Wrong(`${one(`#${field.id}-label`).textContent}: ${wrong}`);
    return parse(field.value);
  }

  /** The fewest machines that share the GPUs evenly. */
  function machines(gpus) {
    let count = Math.ceil(gpus / number("per"));
    while (gpus % count) count += 1;
    return count;
  }

  /** What a transformer's sizes say about its parameters and its blocks. */
  function counted() {
    const known = [...SIZES, ...USUAL].every((size) => !complaint(fields.get(size)[0]));
    if (text("kind") !== "transformer" || !known) return {};
    const { parameters: params, largest_block: block } = transformer(text("precision"));
    return { params, block };
  }

  /** With what a valid field does not agree, or an empty string. */
  function doubt(name) {
    const sizes = counted();
    if (name === "chosen" && parse(text(name)) > parse(text("experts"))) return phrase("chosen");
    if (name === "heads" && sizes.params && !number("head_size") && number("hidden") % parse(text(name))) return phrase("heads");
    // No model is quite its formula.
    return Math.abs(parse(text(name)) / sizes[name] - 1) > 0.1 ? phrase("sizes", { value: write(sizes[name]) }) : "";
  }

  function showFields() {
    for (const control of all("[data-if]")) control.hidden = control.dataset.if && !are(control.dataset.if);
    for (const error of all("[data-error]")) {
      const field = error.parentElement.querySelector("[data-name]");
      const wrong = complaint(field);
      error.textContent = wrong || doubt(field.dataset.name);
      error.hidden = !error.textContent;
      error.dataset.verdict = wrong ? "not" : "close";
      field.setAttribute("aria-invalid", Boolean(wrong));
      if (!error.hidden) reveal(error);
    }
  }

  const direct = (name, value) =>
    JSON.parse([...fields.get(name)[0].options].find((option) => option.value === value).dataset.set);
  /** What a preset sets, and what the presets that it chooses set. */
  const sets = (name, value = text(name)) => Object.entries(direct(name, value)).flatMap(([set, to]) =>
    [[set, to], ...(fields.get(set)[0].options ? sets(set, to) : [])]);

  function change({ target }) {
    const { name } = target.dataset;
    if (!fields.has(name)) return;
    const [field] = fields.get(name);
    put(name, target.value);
    gpusChosen ||= name === "gpus";
    // A number changed by hand makes its preset "own". The link may be another one than the GPU's, a
    // model takes more or fewer tokens, and a machine has more or fewer GPUs.
    for (const { dataset } of choices) {
      const { [name]: usual = text(name) } = direct(dataset.name, text(dataset.name));
      if (usual !== text(name) && !field.options && !["sequence", "per", "gpus"].includes(name)) put(dataset.name, "own");
    }
    const all_sets = target.value === "own" ? [...target.options].map(({ value }) => direct(name, value)) : [];
    for (const set of Object.keys(Object.assign({}, ...all_sets)))
      fields.get(set).forEach(reveal);
    if (target.options) putAll(sets(name).filter(([set]) => !(gpusChosen && set === "gpus")));
    if (COUNTED.includes(name))
      putAll(Object.entries(counted()).map(([set, value]) => [set, write(value)]));
    update();
    writeLink();
    // A screen reader is told the answer when the fields are at rest.
    clearTimeout(resting);
    const says = target.closest(".calculator").querySelector(".answer p");
    resting = setTimeout(() => (spoken.textContent = says.textContent), 1000);
  }

  // --- links: what differs from the first settings and from what the presets set ---

  function writeLink() {
    const usual = new Map(initial);
    for (const select of choices)
      if (select.value !== initial.get(select.dataset.name))
        sets(select.dataset.name).forEach((pair) => usual.set(...pair));
    const changed = [...usual].filter(([name, value]) => text(name) !== value || ["model", "gpu"].includes(name));
    note(`#${new URLSearchParams(changed.map(([name]) => [name, text(name)]))}`);
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
    putAll([...initial, ...known]);
    const chosen = new Map(known); // in the page's order: a card chooses a link, a link its numbers
    for (const { dataset } of choices)
      if (chosen.has(dataset.name)) putAll(sets(dataset.name, chosen.get(dataset.name)));
    putAll(known);
    gpusChosen = chosen.has("gpus");
    const settings = link.filter((setting) => !isKnown(setting)).map((setting) => setting.join("=")).join(", ").slice(0, 80);
    message.textContent = settings && phrase("unknown", { settings });
    update();
  }

  // --- will it fit? ---

  /** GPUs that share a sequence. */
  const sharing = () => (are("kind=transformer&architecture=llama|qwen3") ? number("cp") : 1);

  function transformer(precision, more = {}) {
    const given = [...SIZES, ...USUAL].map((name) => [name, number(name)]);
    const sizes = Object.fromEntries(given.filter(([name, value]) => value || SIZES.includes(name)));
    if (are("architecture=gpt")) MIXED.forEach((name) => delete sizes[name]);
    else sizes.chosen = Math.min(sizes.chosen, sizes.experts);
    const how = { fused_attention: are("attention=fused"), fused_norms: are("norms=fused"), loss: text("loss") };
    how.checkpointing = { off: false, on: true }[text("checkpointing")] ?? text("checkpointing");
    const built = { block: text("architecture"), tied: text("tied") === "yes", frozen: text("train") === "lora" };
    return estimating.transformer({ ...sizes, precision, ...how, ...built, ...more });
  }

  /** What a sample saves; and the parameters outside the blocks and of the largest tensor, if we know them. */
  function oneSample(precision, share = sharing()) {
    const part = estimating.PRECISIONS[precision].activation / 4; // of what float32 takes
    if (text("kind") === "counted") return { activation_bytes: number("saved") * 1e6 * part, root: 0 };
    const { activation_bytes, least_bytes, root, largest } = transformer(precision, { sequence: number("sequence") / share });
    return { activation_bytes, least_bytes, root, largest };
  }

  /** For LoRA, the numbers in the adapters, and the bytes of each other weight. */
  function adapters() {
    if (!are("kind=transformer&train=lora")) return {};
    const ranks = transformer("bf16")[text("matrices")];
    // PEFT casts the tables of a model in 4 or 8 bits to float32; scales in 4 bits are half a bit each.
    const [frozen_bytes, frozen_root_bytes] = { 4: [4.5 / 8, 4], 8: [1, 4], 16: [2, 2] }[text("bits")];
    return { lora: number("rank") * ranks, frozen_bytes, frozen_root_bytes };
  }

  /** A function from the number of GPUs to the memory of each column of the table. */
  function memories() {
    const [precision, parameters, largest_block] = [text("precision"), number("params"), number("block")];
    const how = { precision, largest_block, optimizer: text("optimizer"), batch: number("batch") };
    const step = { weight_decay: are("decay=yes"), accumulation: number("accumulation"), held: text("held") };
    const options = { largest: largest_block, ...oneSample(precision), ...how, ...step, lora: null, ...adapters() };
    // FSDP's MixedPrecisionPolicy casts what is passed from layer to layer; autocast does not.
    const sharded = { rung: "fsdp", ...oneSample(precision.replace("-mixed", "")) };
    const whole = oneSample(precision, 1); // one GPU shares with none
    return (gpus) => [
      whole, { rung: "ddp", gpus }, { ...sharded, rung: "zero2", gpus }, { ...sharded, gpus }, { ...sharded, rung: "hsdp", gpus, machines: machines(gpus) },
    ].map((rung) => estimating.memory_per_gpu(parameters, { ...options, ...rung }));
  }

  /** Even with the most that others have seen beside the tensors? */
  function verdict(memory, have) {
    if (estimating.on_the_gpu(memory.total)[1] <= have) return "fits";
    return estimating.on_the_gpu(memory.at_least)[0] <= have ? "close" : "not";
  }

  /** Without others there is no rung of many, but FSDP may offload. On one machine, HSDP is FSDP. */
  const alone = (gpus) => gpus === 1 && !are(OFFLOADED);

  const ways = (on, gpus) =>
    [["one", on(gpus)[0]], [are(OFFLOADED) ? "offloaded" : "fsdp", on(gpus)[COLUMNS.fsdp]]].slice(0, alone(gpus) ? 1 : 2);

  /** The answer: the first way that fits, else that may fit, else what is missing on all GPUs. */
  function answer(on, gpus, have) {
    const found = (kind) => ways(on, gpus).find(([, memory]) => verdict(memory, have) === kind);
    const [name, memory] = found("fits") ?? found("close") ?? ways(on, gpus).at(-1);
    const kind = verdict(memory, have);
    const gaps = { rung: phrase(name, { gpus }), have: inBytes(have), ...amounts(memory) };
    if (kind === "fits") return [kind, phrase(kind, gaps), untested(gpus)];
    const [end, count] = enough(on, gpus, have);
    const more = phrase(end, { ...gaps, gpus: fixed(count) });
    return [kind, phrase(kind, gaps), ...cures(gpus, have, kind), more, phrase("host"), untested(gpus)];
  }

  /** From how many GPUs on, more than these, FSDP does better; or that it never does, up to how many. */
  function enough(on, gpus, have) {
    const [step, kind] = [sharing(), (count) => verdict(on(count)[COLUMNS.fsdp], have)];
    let [less, more] = [gpus, step * Math.floor(parse(fields.get("gpus")[0].dataset.to) / step)];
    const best = kind(more);
    if (best !== "fits" && best === kind(gpus)) return [`never-${best}`, more];
    while (more - less > step) {
      const middle = less + step * Math.floor((more - less) / step / 2);
      [less, more] = kind(middle) === best ? [less, middle] : [middle, more];
    }
    return [`enough-${best}`, more];
  }

  /** What of the settings was not measured with. */
  function untested(gpus) {
    const names = Object.keys(UNTESTED).filter((name) => are(UNTESTED[name]));
    if (are("kind=transformer&architecture=llama|qwen3") && number("experts") > 1) names.push("experts");
    if (machines(gpus) > 1) names.push("hsdp");
    const words = new Intl.ListFormat("en", { type: "disjunction" }).format(names.map((name) => phrase(`untested-${name}`)));
    return words && phrase("untested", { what: words });
  }

  /** The fewest changes with which it would fit on these GPUs, by one or by FSDP, or might where now it does not. */
  function cures(gpus, have, now) {
    const wanted = now === "not" ? ["fits", "close"] : ["fits"];
    const changes = (names) => Object.assign({}, ...names.map((name) => CURES[name]));
    const words = (names) => names.map((name) => phrase(`cure-${name}`)).join(phrase("cures-and"));
    const helps = (names) => { // not if a number is wrong that is hidden now
      const before = Object.keys(changes(names)).map((field) => [field, text(field)]);
      putAll(Object.entries(changes(names)));
      try {
        return ways(memories(), gpus).some(([, memory]) => wanted.includes(verdict(memory, have)));
      } catch (error) {
        if (!(error instanceof Wrong)) throw error;
      } finally {
        putAll(before);
      }
    };
    let sets = [[]]; // each once, in the order of the alphabet
    for (let size = 1; size <= 4; size += 1) {
      sets = sets.flatMap((set) => Object.keys(CURES).filter((name) => !(name <= set.at(-1))).map((name) => [...set, name]));
      const found = sets.filter(helps).slice(0, 4);
      if (found.length) return [phrase(`cures-${now}`), ...found.map((names) => cure(words(names), changes(names))), make("br")];
    }
    return [];
  }

  /** A button that makes the changes. */
  function cure(words, changes) {
    const button = Object.assign(make("button", "cure", words), { type: "button" });
    button.addEventListener("click", () => {
      putAll(Object.entries(changes));
      update();
      writeLink();
      const [field] = fields.get(Object.keys(changes)[0]);
      reveal(field);
      field.focus({ preventScroll: true }); // the button is gone
    });
    return button;
  }

  function amounts({ total, at_least }) {
    const [low, high] = estimating.on_the_gpu(total).map(inBytes);
    return { need: inBytes(total), least: inBytes(at_least), floor: inBytes(estimating.on_the_gpu(at_least)[0]), low, high };
  }
  const colour = (part) => `--part: var(--fit-${part})`;
  const styled = (tag, style, words = "") => Object.assign(make(tag, "", words), { style });

  function drawBars(figure, columns, table, have) {
    const most = 1.02 * Math.max(have, ...columns.map((memory) => memory.total));
    const percent = (bytes) => `${(100 * bytes) / most}%`;
    figure.style = `--have: ${percent(have)}`;
    const bars = columns.map((memory, column) => {
      const kind = verdict(memory, have);
      const [track, said] = [make("div", "bar-track"), make("span", "", phrase(`${kind}-bar`, amounts(memory)))];
      said.dataset.verdict = kind;
      // Adam's copy comes when the activations are gone: what it adds is what it has more.
      const step = Math.max(0, memory.step - memory.activations - memory.casts);
      for (const [part, size] of Object.entries({ ...memory, step }))
        if (PARTS.includes(part) && size > 0)
          track.append(styled("i", `width: ${percent(size)}; ${colour(part)}`));
      return make("div", "bar", all("thead th", table)[column + 1].textContent, said, track);
    });
    const legend = PARTS.map((part, row) => styled("span", colour(part), table.tBodies[0].rows[row].cells[0].textContent));
    figure.replaceChildren(make("div", "bars-limit", phrase("limit", { have: inBytes(have) })), ...bars, make("div", "bars-legend", ...legend));
  }

  function showMemory(table, says, figure) {
    const more = one(".memory-more");
    more.replaceChildren();
    const [have, gpus, on] = [number("memory") * 1e9, number("gpus"), memories()];
    const columns = on(gpus);
    const [name, size] = unit(Math.min(...columns.map((memory) => memory.total)));
    one(".memory-table th").textContent = phrase("unit", { unit: name });
    columns.forEach((memory, column) => {
      const sizes = [...PARTS, "total", "at_least"].map((part) => memory[part] / size);
      const values = sizes.map((amount) => fixed(amount, amount < 100 ? 1 : 0));
      values.push(phrase(`${verdict(memory, have)}-short`));
      values.forEach((value, row) => (table.tBodies[0].rows[row].cells[column + 1].textContent = value));
    });
    const [kind, sentence, ...others] = answer(on, gpus, have);
    say(says, kind, sentence);
    more.append(...others.flatMap((part) => [part, " "]));
    drawBars(figure, columns.slice(0, alone(gpus) ? 1 : machines(gpus) === 1 ? COLUMNS.hsdp : undefined), table, have);
  }

  // --- will two be faster? ---

  function computing(percent = number(text("kind") === "counted" ? "conv" : "reached")) {
    if (text("time") === "measured") return number("ms") / 1e3;
    if (text("precision") === "fp32" && text("gpu") !== "own") throw new Wrong(phrase("no-peak"));
    return (number("batch") * work()) / (number("peak") * 1e10 * percent);
  }

  /** Percents of the peak that others measured, and on what; of a card with few measurements, on all. */
  function span() {
    if (are("time=measured") || are("gpu=own")) return [];
    const card = ["a100", "h100"].find((name) => text("gpu").startsWith(name)) ?? "all";
    return phrase(`span-${are("kind=counted") ? "conv" : card}`).split(", ");
  }

  /** FLOPs to train on a sample, or of a GPU's share of it. */
  function work(more) {
    if (text("kind") === "counted") return number("flops") * 1e9;
    const { flops, parameters } = transformer(text("precision"), more);
    return (flops * number("params")) / parameters / sharing(); // it may have more than the sizes give
  }

  /** Of a mixture of experts, how many parameters compute. */
  function met() {
    const { experts, parameters, active } = are("kind=transformer") ? transformer("bf16") : {};
    return experts ? phrase("active", { params: write(parameters), active: write(active) }) : "";
  }

  /** What GPUs train on in a second, their shares of the peak, and the hours and their price. */
  function rates(gpus, gain, seconds) {
    const each = (gain * number("batch")) / seconds;
    const samples = each / sharing();
    const tokens = samples * (text("kind") === "transformer" ? number("sequence") : 1);
    const [hours, price] = [number("amount") / tokens / 3600, number("price")];
    const share = (flops) => rough((100 * flops * each) / (gpus * number("peak") * 1e12));
    const shares = { mfu: share(work({ checkpointing: false })), hfu: share(work()) };
    const money = price ? phrase("money", { money: rough(hours * gpus * price) }) : "";
    return { samples: rough(samples), tokens: rough(tokens), hours: rough(hours), money, ...shares };
  }

  function showSpeed(table, says) {
    const more = one(".speed-more");
    more.replaceChildren();
    const [gpus, seconds, params] = [number("gpus"), computing(), number("params")];
    const [have, on, { lora = params, frozen_bytes = 0, frozen_root_bytes = 0 }] = [number("memory") * 1e9, memories(), adapters()];
    const { root = 0 } = are("kind=transformer") ? transformer("bf16") : {};
    const size = estimating.PRECISIONS[text("precision")];
    const [gradients, weights] = [size.gradient * lora, size.cast * lora + frozen_bytes * (params - root) + frozen_root_bytes * root];
    const bytes = (rung) => (rung === "ddp" ? gradients : (2 * weights + gradients) / 3);
    const link = [number("latency") / 1e6, number("bandwidth") * 1e9];
    const network = [number("far_latency") / 1e6, number("far_bandwidth") * 1e9];
    const accumulation = number("accumulation");
    const options = { overlap: number("overlap"), scaling: text("scaling"), network, gradients, accumulation };
    const gain = (n, rung, more, alone = seconds) =>
      estimating.speed_up(alone, bytes(rung), n, ...link, { ...options, rung, machines: machines(n), ...more });
    const kind = (n, rung) => verdict(on(n)[COLUMNS[rung]], have);
    const gaps = (n, rung) => ({
      gpus: n, rung: rung.toUpperCase(), gain: fixed(gain(n, rung), 2),
      percent: fixed((100 * gain(n, rung)) / n), one: phrase(verdict(on(n)[0], have) === "not" ? "one-not" : "one-fits"),
      ms: rough((1e3 * seconds * accumulation * (options.scaling === "weak" ? n : 1)) / gain(n, rung)),
    });
    const counts = [...new Set([...USUALLY.filter((n) => n % sharing() === 0), Math.max(2, gpus)])].sort((a, b) => a - b);
    table.tBodies[0].replaceChildren(...counts.map((n) => {
      const words = RUNGS.flatMap((rung) => [phrase(`${kind(n, rung)}-cell`, gaps(n, rung)), gaps(n, rung).gain]);
      return make("tr", n === gpus && "chosen", ...[n, ...words].map((word) => make("td", "text-right", word)));
    }));
    // The answer: the fastest rung that fits, else that may fit; then the others.
    const chosen = Math.max(2, gpus);
    const rungs = RUNGS.slice(0, machines(chosen) > 1 ? 3 : 2);
    const best = (word) => rungs.filter((rung) => kind(chosen, rung) === word)
      .reduce((a, b) => (a && gain(chosen, a) >= gain(chosen, b) ? a : b), undefined);
    const lead = best("fits") ?? best("close");
    const faster = lead && gain(chosen, lead) > 1;
    const first = lead ? `${faster ? "faster" : "slower"}-${kind(chosen, lead)}` : "none";
    const others = rungs.filter((rung) => rung !== (lead ?? "ddp")).map((rung) =>
      phrase(lead && kind(chosen, rung) === "not" ? "misfit" : "other", gaps(chosen, rung)));
    say(says, faster ? kind(chosen, lead) : "not", [phrase(first, gaps(chosen, lead ?? "ddp")), ...others].join(" "));
    const sent = { gradients: inBytes(gradients), weights: inBytes(weights) };
    const [from, to, where] = span();
    const [slow, fast] = [computing(from), computing(to)];
    const ms = (alone) => rough(1e3 * alone * accumulation);
    const between = from ? phrase("between", { from, to, where, low: ms(fast), high: ms(slow) }) : "";
    const trains = gpus > 1 ? lead : kind(1, "one") !== "not";
    const rate = (alone) => rates(gpus, gpus > 1 ? gain(gpus, lead, {}, alone) : 1, alone);
    const range = from && trains ? phrase("range", { low: rate(slow).tokens, high: rate(fast).tokens }) : "";
    const who = trains && phrase(gpus > 1 ? "many-train" : "one-trains", gaps(chosen, lead ?? "ddp"));
    const told = trains ? ` ${phrase(`rate-${text("kind")}`, { who, ...rate(seconds), range })}` : "";
    const offload = are(OFFLOADED) || are(UNTESTED.away) ? ` ${phrase("offload-time")}` : "";
    one(".speed-sent p").textContent = met() + phrase("alone", { ms: ms(seconds), between, ...sent }) + told + offload;
    const many = gaps(chosen, lead ?? "ddp");
    const short = (is, n, times) => (is ? Object.values(rates(n, times, seconds)).slice(1, 3) : ["–", "–"]); // tokens, hours
    const brief = [[ms(seconds), ...short(kind(1, "one") !== "not", 1, 1)], [many.ms, ...short(lead, chosen, gain(chosen, lead ?? "ddp"))]];
    all(".speed-brief tbody tr").forEach(({ cells }, row) => brief.forEach((column, at) => (cells[at + 1].textContent = column[row])));
    one(".speed-brief th:last-child").textContent = phrase("several", many);
    const eased = gain(chosen, "ddp", { accumulation: 8 });
    if (lead && kind(chosen, "ddp") !== "not" && eased > 1.1 * gain(chosen, lead))
      more.append(cure(phrase("accumulate", { gain: fixed(eased, 2) }), { accumulation: "8" }));
  }

  // --- how fast will it answer? ---

  function showServing(table, says) {
    if (text("kind") !== "transformer") throw new Wrong(phrase("only-transformers"));
    const [model, share, weightBits] = [transformer("bf16"), number("share"), parse(text("weight_bits"))];
    if (number("heads") % share) throw new Wrong(phrase("share-heads"));
    const [memory, bandwidth, tokens, cache_bytes] = [number("memory") * 1e9, number("reads") * 1e9, number("context"), number("cache_bits") / 8];
    const serving = (bits, gpus) => estimating.serving(model, { memory, bandwidth, tokens, cache_bytes, bits, gpus });
    const words = ({ weights, requests, one, all, cache }) =>
      ({ weights: inBytes(weights), count: fixed(requests), one: rough(one), all: rough(all), cache: inBytes(cache) });
    [16, 8, 4].forEach((bits, row) => Object.values(words(serving(bits, share))).slice(0, 4)
      .forEach((word, at) => (table.tBodies[0].rows[row].cells[at + 1].textContent = word)));
    const found = serving(weightBits, share);
    const kind = found.requests ? "fits" : found.one ? "close" : "not";
    const gpus = USUALLY.find((count) => count > share && number("heads") % count === 0 && serving(weightBits, count).requests);
    const where = phrase(share > 1 ? "together" : "one", { gpus: share });
    const gaps = { ...words(found), where, more: gpus ? phrase("would-do", { gpus }) : "" };
    say(says, kind, phrase(`serves-${kind}`, gaps));
    one(".serving-sent a").textContent = phrase(`use-${kind}`, gaps);
  }

  // --- start ---

  /** A verdict, whose first line is the answer. */
  function say(says, kind, words) {
    const [answer, ...more] = words.split("\n");
    says.dataset.verdict = kind;
    says.replaceChildren(make("strong", "", answer), ...more.map((line) => `\n${line}`));
  }

  /** All answers; one that a wrong number keeps back says so, and shows no old numbers. */
  function update() {
    showFields();
    for (const [name, show] of [["memory", showMemory], ["speed", showSpeed], ["serving", showServing]]) {
      const [table, says, figure] = ["table table", "says p", "figure"].map((part) => one(`.${name}-${part}`));
      try {
        show(table, says, figure);
      } catch (error) {
        if (!(error instanceof Wrong)) throw error;
        say(says, "close", phrase("wrong", { what: error.message }));
        figure?.replaceChildren();
        all(`.${name}-sent :is(p, a), .${name}-brief td + td`).forEach((old) => (old.textContent = "–"));
        for (const cell of all("tbody td:nth-child(n + 2)", table)) cell.textContent = "–";
      }
      figure?.setAttribute("aria-label", phrase(`${name}-figure`, { sentences: says.textContent }));
    }
  }

  let resting, gpusChosen; // whether a reader has said how many GPUs
  const [spoken, message] = ["visually-hidden", "control-error"].map((kind) => Object.assign(make("p", kind), { role: "status" }));
  message.dataset.verdict = "close";
  one(".calculator").before(spoken, message);
  for (const example of all("[data-settings]"))
    example.append(Object.assign(make("a", "", ...example.childNodes), { href: `#${example.dataset.settings}` }));
  document.addEventListener("input", change);
  if (matchMedia("(max-width: 700px)").matches) for (const fold of all(".controls details")) fold.open = false;
  addEventListener("hashchange", () => {
    readLink();
    if (location.hash.includes("=")) one(".calculator").scrollIntoView();
  });
  readLink();
})();
