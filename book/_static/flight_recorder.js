"use strict";
// read and compare of src/torchclinic/flight_recorder.py, with the words of the catalogue's
// flight_recorder.toml; what they mean is said there. A test compares both on the same dumps.
const flightRecorder = (shared) => {
  const RANK = new RegExp(shared.rank), NOT_YOURS = new RegExp(shared.not_yours);
  const fail = (word, gaps) => { throw new Error(filled(shared.input[word], gaps)); };

  // --- reading ---

  /** Whether the bytes of a file may be those of a dump. */
  function isDump(bytes) {
    const start = String.fromCharCode(...bytes.subarray(0, 4096));
    const begins = start.startsWith("\x80\x02}") || start.trimStart().startsWith("{");
    return begins && start.includes("version") && /entries|pg_config/.test(start);
  }

  /** What a pickle of plain data holds: it knows no step that imports or calls. */
  function unpickled(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    let [at, stack, memo, marks] = [0, [], new Map(), []];
    const number = (read, size, ...order) => view[`get${read}`]((at += size) - size, ...order);
    const byte = () => number("Uint8", 1), word = () => number("Uint32", 4, true);
    const slice = (size) => at + size > bytes.length ? view.getUint8(bytes.length) : bytes.subarray(at, at += size);
    const long = (digits) => digits.reduceRight((sum, digit) => sum * 256 + digit, 0) - (digits.at(-1) > 127) * 256 ** digits.length;
    const set = (items) => items.forEach((key, at) => { if (at % 2 === 0) stack.at(-1)[text(key)] = items[at + 1]; });
    const marked = () => stack.splice(marks.pop());
    const steps = {
      "\x80": byte, "(": () => { marks.push(stack.length); }, N: () => stack.push(null),
      "\x88": () => stack.push(true), "\x89": () => stack.push(false), J: () => stack.push(number("Int32", 4, true)),
      K: () => stack.push(byte()), M: () => stack.push(number("Uint16", 2, true)), "\x8a": () => stack.push(long(slice(byte()))),
      G: () => stack.push(number("Float64", 8)), X: () => stack.push(new TextDecoder().decode(slice(word()))),
      q: () => memo.set(byte(), stack.at(-1)), r: () => memo.set(word(), stack.at(-1)),
      h: () => stack.push(memo.get(byte())), j: () => stack.push(memo.get(word())), "}": () => stack.push(Object.create(null)),
      s: () => set(stack.splice(-2)), u: () => set(marked()), "]": () => stack.push([]),
      a: () => { const item = stack.pop(); stack.at(-1).push(item); },
      e: () => { const items = marked(); for (const item of items) stack.at(-1).push(item); }, "\x86": () => stack.push(stack.splice(-2)),
    };
    for (let step = byte(); step !== 46; step = byte()) steps[String.fromCharCode(step)]();
    return stack.pop();
  }

  function load(name, bytes) {
    let dump;
    try {
      dump = bytes[0] === 0x80 ? unpickled(bytes) : JSON.parse(new TextDecoder().decode(bytes));
      dump.version = text(dump.version);
    } catch (error) {
      fail(error instanceof TypeError || !isDump(bytes) ? "none" : "cut", { name });
    }
    return dump.version.startsWith("2.") ? dump : fail("version", { name, version: dump.version.slice(0, 9) });
  }

  const unfit = () => { throw new TypeError(); }; // a dump may hold anything
  const text = (value) => typeof value === "string" ? [...value.slice(0, 4000)].slice(0, 2000).join("").replace(/(?! )[\p{C}\p{Z}]/gu, "?") : unfit();
  const number = (value) => typeof value === "number" && Math.abs(value) < 2 ** 63 ? value : unfit();
  const whole = (value) => Math.trunc(number(value));

  function callOf(entry) {
    const op = text(entry.profiling_name).split(":").slice(1).join(":");
    const [name, description] = [0, 1].map((place) => text(entry.process_group[place]));
    const shapes = entry.input_sizes.map((shape) => `[${shape.map(whole).join(", ")}]`);
    const { frames = [], timeout_ms = 1_800_000 } = entry;
    const places = frames.map(({ filename, line }) => [text(filename), whole(line)]);
    const yours = places.find(([file]) => !NOT_YOURS.test(file)) ?? places[0];
    const place = yours ? ` at ${yours[0].split(new RegExp(shared.slash)).at(-1)}:${yours[1]}` : "";
    return {
      op, number: whole(entry.collective_seq_id), p2p: entry.is_p2p === true, text: op + place,
      group: ["", "undefined"].includes(description) ? name : description,
      size: shared.same_size.includes(op) ? [...shapes, ...entry.input_dtypes.map(text)].join(" ") : "",
      seconds: number(entry.time_created_ns) / 1e9, limit: number(timeout_ms) / 1e3,
      ended: entry.state === "completed" || entry.retired === true,
    };
  }

  /** Each rank's calls, from the bytes of the dumps by name, and the ranks that have no dump. */
  function read(contents) {
    const [ranks, names, known] = [new Map(), new Map(), new Set()];
    for (const [name, bytes] of contents) {
      const rank = Number((RANK.exec(name) ?? fail("nameless", { name }))[1]);
      if (ranks.has(rank)) fail("twice", { name: names.get(rank), other: name, ranks: ranksText([rank]) });
      const dump = load(name, bytes);
      names.set(rank, name);
      try {
        ranks.set(rank, dump.entries.map(callOf));
        for (const group of Object.values(dump.pg_config))
          for (const other of group.ranks.match(/\d{1,6}/g) ?? []) known.add(Number(other));
      } catch {
        fail("version", { name, version: dump.version.slice(0, 9) });
      }
    }
    for (let rank = Math.max(...ranks.keys()); rank >= 0; rank--) known.add(rank);
    const absent = [...known].filter((rank) => !ranks.has(rank)).sort((a, b) => a - b);
    if (ranks.size === 1 && absent.length) fail("one", { name: contents[0][0] });
    checkRun(ranks);
    return [new Map([...ranks].sort(([a], [b]) => a - b)), absent];
  }

  function checkRun(ranks) {
    const first = new Map();
    for (const [rank, calls] of ranks)
      for (const call of calls.filter(({ p2p }) => !p2p)) {
        const key = `${call.group} ${call.number}`;
        const [other, before] = first.get(key) ?? [rank, call];
        first.set(key, [other, before]);
        const [apart, limit] = [call.seconds - before.seconds, Math.min(call.limit, before.limit)];
        const told = { ...call, seconds: Math.round(Math.abs(apart)), limit: Math.round(limit) };
        const [late, early] = apart > 0 ? [rank, other] : [other, rank];
        if (Math.abs(apart) > limit) fail("runs", { ...told, ranks: ranksText([late]), other: ranksText([early]) });
      }
  }

  // --- comparing ---

  function compare(ranks) {
    const groups = new Map(), found = new Map();
    for (const [rank, calls] of ranks)
      for (const call of calls.filter(({ p2p }) => !p2p)) {
        const { group, number } = call;
        if (!groups.has(group)) groups.set(group, new Map(group === "default_pg" ? [...ranks.keys()].map((r) => [r, new Map()]) : []));
        const made = groups.get(group).get(rank) ?? new Map();
        groups.get(group).set(rank, made.has(number) ? made : made.set(number, call));
      }
    for (const [name, made] of groups) {
      const told = difference(made);
      if (told) found.set(name, told);
    }
    const where = (rank, call, word = "in") => {
      if (!call && ranks.get(rank).length) {
        call = ranks.get(rank).at(-1);
        word = (call.p2p ? !call.ended : call.number >= found.get(call.group)?.number) ? "in" : "after";
      }
      return filled(shared.line[call ? word : "never"], call ?? {});
    };
    for (const [group, told] of found) {
      const said = new Map([...groups.get(group)].map(([rank, made]) => {
        const [call, then] = [made.get(told.number), made.get(told.next)];
        const word = told.kind === "skipped" && told.ranks.includes(rank) ? "in" : told.kind;
        return [rank, where(rank, call && { ...call, then: then?.text }, word)];
      }));
      const named = ranksText(told.ranks).replace("r", "R");
      told.says = filled(shared.says[told.kind], { ...told, group, ranks: named });
      Object.assign(told, { entry: shared.entry[told.kind], lines: lines(said) });
    }
    const everywhere = new Map([...ranks.keys()].map((rank) => [rank, where(rank)]));
    const same = { kind: "same", says: shared.says.same, lines: lines(everywhere) };
    return found.size ? [...found.values()].sort((a, b) => a.seconds - b.seconds) : [same];
  }

  function difference(ranks) {
    const sorted = new Map([...ranks].map(([rank, made]) => [rank, [...made.keys()].sort((a, b) => a - b)]));
    const start = Math.max(...[...sorted.values()].map(([first = 0]) => first));
    const numbers = new Set([...sorted.values()].flat());
    for (const number of [...numbers].filter((n) => n >= start).sort((a, b) => a - b)) {
      const here = [...ranks].filter(([rank, made]) => made.has(number) || number > (sorted.get(rank).at(-1) ?? 0));
      const calls = here.map(([, made]) => made.get(number)).filter(Boolean);
      for (const [kind, key] of [["skipped", "op"], ["size", "size"]]) {
        const count = (value) => calls.filter((call) => call[key] === value).length;
        const first = calls.reduce((most, call) => count(call[key]) > count(most[key]) ? call : most);
        const odd = here.filter(([, made]) => made.get(number)?.[key] !== first[key]).map(([rank]) => rank);
        if (!odd.length) continue;
        const pairs = [...ranks.values()].map((made) => [number, number + 1].map((n) => made.get(n)?.op ?? ""));
        const [there, back] = [pairs[0].join(" "), [...pairs[0]].reverse().join(" ")];
        const order = there !== back && pairs.every((pair) => pair.every(Boolean) && [there, back].includes(pair.join(" ")));
        const told = { number, next: number + 1, ranks: odd, op: first.op, seconds: first.seconds };
        return { ...told, kind: kind === "skipped" && order ? "order" : kind };
      }
    }
    return null;
  }

  function lines(said) {
    const alike = new Map();
    for (const [rank, text] of [...said].sort(([a], [b]) => a - b)) alike.set(text, [...alike.get(text) ?? [], rank]);
    return [...alike].map(([text, ranks]) => `${ranksText(ranks)}: ${text}`);
  }

  function ranksText(ranks) {
    const runs = [];
    for (const rank of [...ranks].sort((a, b) => a - b))
      if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
      else runs.push([rank, rank]);
    return `rank${ranks.length > 1 ? "s" : ""} ${runs.map(([a, b]) => (a < b ? `${a}-${b}` : a)).join(", ")}`;
  }

  const absentText = (absent) => filled(shared.input.absent, { ranks: ranksText(absent) });
  return { isDump, read, compare, absentText };
};
