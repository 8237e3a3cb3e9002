"use strict";
// The formulas of src/torchclinic/will_it_fit.py that the page needs, under its names; what they mean
// is said there. A test compares both.
const estimating = (() => {
  const STATES = { sgd: 0, momentum: 1, adam: 2 };
  const precision = (parameter, gradient, state, master, cast, activation) =>
    ({ parameter, gradient, state, master, cast, activation });
  const PRECISIONS = {
    fp32: precision(4, 4, 4, 0, 4, 4),
    "bf16-mixed": precision(4, 4, 4, 0, 2, 2),
    "fp16-mixed": precision(4, 4, 4, 0, 2, 2),
    bf16: precision(2, 2, 2, 0, 2, 2),
    "bf16-master": precision(2, 2, 4, 4, 2, 2),
  };

  function memory_per_gpu(parameters, options = {}) {
    const {
      rung = "gpu", gpus = 1, precision = "fp32", optimizer = "sgd", activation_bytes = 0,
      batch = 1, largest_block = parameters, root = 0, first = true,
    } = options;
    const size = PRECISIONS[precision];
    const shards = rung === "fsdp" ? gpus : 1;
    const replica = rung === "dp" && gpus > 1 && !first;
    const states = replica ? 0 : STATES[optimizer] * size.state + size.master;
    const copy = optimizer === "adam" && !(replica || size.master);
    let communication = 0;
    if (rung === "ddp" || (rung === "dp" && gpus > 1 && first))
      communication = size.gradient * parameters;
    if (rung === "fsdp")
      communication =
        (root + Math.min(2 * largest_block, parameters - root)) * (size.cast + size.gradient);
    const memory = {
      parameters: (size.parameter * parameters) / shards,
      gradients: (size.gradient * parameters) / shards,
      optimizer: (states * parameters) / shards,
      activations: batch * activation_bytes,
      casts: size.cast < size.parameter && rung !== "fsdp" ? size.cast * parameters : 0,
      communication,
      step: copy ? (size.parameter * parameters) / shards : 0,
    };
    const fixed = memory.parameters + memory.optimizer + communication;
    const total = fixed + memory.gradients + Math.max(memory.activations + memory.casts, memory.step);
    return { ...memory, total, at_least: fixed + Math.max(memory.activations, memory.gradients) };
  }

  function transformer({
    layers, hidden: h, heads, sequence: s, vocabulary, precision = "fp32", fused_attention = true,
    checkpointing = false, causal = false,
  }) {
    const { activation: size, parameter: stream } = PRECISIONS[precision];
    const [block, root] = [12 * h * h + 13 * h, (vocabulary + s) * h + 2 * h];
    const parameters = layers * block + root;
    const table = fused_attention ? 0 : (stream + size + 1) * heads * s * s;
    const layer = (14 * size + 2 * stream + 2) * s * h + table;
    const [ends, logits] = [(size + stream + 1) * s * h, 12 * s * vocabulary];
    const activation_bytes = ends + (checkpointing
      ? layers * stream * s * h + Math.max(layer, logits) : layers * layer + logits);
    const once = 6 * parameters * s + (causal ? 6 : 12) * layers * h * s * s;
    const flops = once * (checkpointing ? 4 / 3 : 1);
    return { parameters, largest_block: block, root, activation_bytes, flops };
  }

  function speed_up(computing, nbytes, world_size, latency, bandwidth, options = {}) {
    const { overlap = 0, scaling = "weak", rung = "ddp" } = options;
    const own = scaling === "weak" ? computing : computing / world_size;
    const messages = 2 * (world_size - 1);
    const all_reduce = messages * latency + ((messages / world_size) * nbytes) / bandwidth;
    const exchange = (rung === "fsdp" ? 1.5 : 1) * all_reduce;
    return (world_size * own) / (own + Math.max(0, exchange - overlap * own));
  }

  return { PRECISIONS, memory_per_gpu, transformer, speed_up };
})();
