"use strict";
// The formulas of src/torchclinic/will_it_fit.py that the page needs, under its names; what they mean
// is said there. A test compares both.
const estimating = (() => {
  const STATES = { sgd: 0, momentum: 1, adam: 2, "adam-8bit": 2, "adam-8bit-paged": 2, muon: 1 };
  const precision = (parameter, gradient, state, master, cast, activation) =>
    ({ parameter, gradient, state, master, cast, activation });
  const PRECISIONS = {
    fp32: precision(4, 4, 4, 0, 4, 4),
    "bf16-mixed": precision(4, 4, 4, 0, 2, 2),
    "fp16-mixed": precision(4, 4, 4, 0, 2, 2),
    bf16: precision(2, 2, 2, 0, 2, 2),
    "bf16-master": precision(2, 2, 4, 4, 2, 2),
  };

  function memory_per_gpu(parameters, {
    rung = "gpu", gpus = 1, precision = "fp32", optimizer = "sgd", activation_bytes = 0,
    least_bytes = activation_bytes, batch = 1, largest_block = parameters, root = 0, machines = 1, lora = null,
    frozen_bytes = 2, frozen_root_bytes = frozen_bytes, weight_decay = false, accumulation = 1, held = "all", largest = parameters,
  } = {}) {
    const size = PRECISIONS[precision];
    const sharded = ["zero2", "fsdp", "hsdp"].includes(rung);
    const shards = sharded ? gpus / machines : 1;
    const [trained, in_root, in_blocks] = lora === null ? [parameters, 0, 0]
      : [lora, frozen_root_bytes * root, frozen_bytes * (parameters - root)];
    const each = optimizer.includes("8bit") ? 1 : size.state;
    const adam = optimizer === "muon" && lora === null ? root : 0;
    const decayed = weight_decay && !optimizer.includes("adam");
    const copied = optimizer === "muon" ? adam : optimizer === "adam" || decayed ? trained : 0;
    const whole = rung === "zero2";
    const two = Math.min(1, (2 * largest_block) / (parameters - root || 1));
    const gathered = (root + two * (parameters - root)) / parameters;
    const freed = held === "one-gradient" && accumulation === 1 && rung !== "ddp";
    const one = Math.min(freed ? (sharded ? Math.max(largest_block, root) : largest) : trained, trained);
    const gradients = (size.gradient * one) / shards;
    const states = ((STATES[optimizer] * each + size.master) * trained + each * adam) / shards;
    const on_gpu = held === "blocks" && sharded ? 0 : 1;
    const memory = {
      parameters: (on_gpu * (size.parameter * trained + in_root + in_blocks)) / shards,
      gradients: on_gpu * gradients,
      optimizer: on_gpu * states,
      activations: batch * activation_bytes,
      casts: size.cast < size.parameter && !sharded ? size.cast * trained : 0,
      communication: sharded ? (whole ? 1 : gathered) * trained * (size.cast + size.gradient) + in_root + (whole ? 1 : two) * in_blocks
        : rung === "ddp" ? gradients : 0,
      step: size.master || freed ? 0 : (on_gpu * size.parameter * copied) / shards,
      accumulated: accumulation > 1 ? on_gpu * gradients : 0,
      spared: (optimizer.includes("paged") ? on_gpu * states : 0) +
        (whole ? (1 - gathered) * size.gradient * trained +
          (on_gpu * (in_root + in_blocks + (size.master && size.parameter * trained))) / shards : 0),
      least: batch * least_bytes,
    };
    const fixed = memory.parameters + memory.optimizer + memory.communication;
    const total = fixed + memory.gradients + Math.max(memory.activations + memory.casts, memory.step);
    const at_least = fixed - memory.spared + Math.max(memory.least + memory.accumulated, memory.gradients);
    return { ...memory, total, at_least };
  }

  function transformer({
    layers, hidden: h, heads, sequence: s, vocabulary, block = "gpt", kv_heads = heads, mlp: m = 4 * h,
    head_size = h / heads, tied = true, precision = "fp32", fused_attention = true, checkpointing = false,
    causal = false, frozen = false, loss = "whole", experts = 1, chosen = 1,
  }) {
    const { activation: size, parameter: stream } = PRECISIONS[precision];
    const [gpt, qwen, cast] = [block === "gpt", block === "qwen3", stream > size];
    const [wide, kv, table] = [heads * head_size, kv_heads * head_size, vocabulary * h];
    const vectors = (gpt ? wide + 2 * kv + m + 6 * h : 2 * h) + (qwen ? 2 * head_size : 0);
    const [router, mlps] = [experts > 1 ? h * experts : 0, experts * (gpt ? 2 : 3) * h * m];
    const one = 2 * h * (wide + kv) + mlps + router + vectors;
    const lookup = tied ? 0 : table;
    const root = table + lookup + (gpt ? s * h + 2 * h : h);
    const parameters = layers * one + root;
    const share = chosen / experts;
    const active = parameters - layers * mlps * (1 - share);

    const scores = gpt ? stream + size + 1 : size + (cast ? stream : 0);
    const keys = fused_attention ? kv : wide;
    const mixed = ((cast ? 4 : 2) + (cast ? 3 : 2) * chosen) * size + chosen * stream;
    const outputs = gpt ? 2 * size + 2 : experts > 1 ? mixed : (cast ? 5 : 2) * size;
    const position = size * (2 * wide + 2 * keys + (gpt ? 2 : 4) * m * chosen) + (2 * stream + outputs) * h +
      (qwen ? stream * (wide + kv) : 0);
    const layer = position * s + (fused_attention ? 0 : scores * heads * s * s);
    const ends = (size + stream + gpt) * s * h;
    const logits = s * (loss === "whole" ? vocabulary : Math.min(vocabulary, h));
    const [selective, in_mlp] = [checkpointing === "selective", experts > 1 ? 0 : gpt ? m : m + h];
    const saved = selective ? size * s * (kv + wide + (fused_attention ? wide : 0) + in_mlp) : 0;
    const [activation_bytes, least_bytes] = [12, 2 * size].map((each) => ends + (checkpointing
      ? layers * ((checkpointing === "offloaded" ? 0 : stream * s * h) + saved) + Math.max(layer - saved, each * logits) : layers * layer + each * logits));

    const mlp_again = experts > 1 ? router + mlps * share : gpt ? 0 : h * m;
    const again = selective ? layers * (h * (kv + wide) + mlp_again) : checkpointing ? active - lookup : 0;
    const pairs = (causal ? 6 : 12) * (checkpointing && !(selective && fused_attention) ? 4 / 3 : 1);
    const flops = ((frozen ? 4 : 6) * (active - lookup) + 2 * again) * s + pairs * layers * wide * s * s;
    const lora_attention = layers * (4 * h + 2 * (wide + kv));
    const lora = lora_attention + layers * experts * (gpt ? 2 : 3) * (h + m);
    const largest = Math.max(table, h * m, h * wide);
    const found = { parameters, largest_block: one, root, activation_bytes, least_bytes, largest, flops, lookup, active, share };
    return { ...found, cached: 2 * layers * kv, lora, lora_attention, experts: experts > 1 ? layers * mlps : 0 };
  }

  const on_the_gpu = (allocated) => [allocated + 2 ** 29, 1.4 * allocated + 2 ** 31];

  function all_reduce_seconds(nbytes, world_size, latency, bandwidth) {
    const messages = 2 * (world_size - 1);
    return messages * latency + ((messages / world_size) * nbytes) / bandwidth;
  }

  function speed_up(computing, nbytes, world_size, latency, bandwidth, {
    overlap = 0, scaling = "weak", rung = "ddp", machines = 1, network = [0, Infinity], gradients = nbytes,
    accumulation = 1,
  } = {}) {
    const own = scaling === "weak" ? computing : computing / world_size;
    const hybrid = rung === "hsdp" && machines > 1;
    const slowest = [Math.max(latency, network[0]), Math.min(bandwidth, network[1])];
    const link = machines > 1 && !hybrid ? slowest : [latency, bandwidth];
    const ring = all_reduce_seconds(nbytes, hybrid ? Math.floor(world_size / machines) : world_size, ...link);
    const across = hybrid ? all_reduce_seconds(gradients, machines, ...network) : 0;
    const exchange = (rung === "ddp" ? 1 : 1.5) * ring + across;
    const computed = own * (rung === "ddp" ? accumulation : 1);
    return (world_size * computed) / (computed + Math.max(0, exchange - overlap * own));
  }

  function serving(model, { tokens, memory, bandwidth, bits = 16, cache_bytes = 2 }) {
    const weights = ((model.parameters - model.root) * bits) / 8 + 2 * model.root;
    const [cache, read] = [model.cached * cache_bytes * tokens, weights - 2 * model.lookup];
    const requests = Math.max(0, Math.floor((0.9 * memory - weights) / cache));
    const unread = (n) => (model.experts * (1 - model.share) ** n * bits) / 8;
    const rate = (n) => (requests ? (n * bandwidth) / (read - unread(n) + n * cache) : 0);
    return { weights, cache, requests, one: rate(1), all: rate(requests) };
  }

  return { PRECISIONS, memory_per_gpu, transformer, on_the_gpu, speed_up, serving };
})();
