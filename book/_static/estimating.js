"use strict";
// The formulas of src/torchclinic/will_it_fit.py, under its names; what they mean is said there. A
// test compares both on the cases of tests/site/estimates.json.
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
      output_bytes = 0, batch = 1, largest_block = parameters, root = 0, bucket_view = false,
      first = true,
    } = options;
    const size = PRECISIONS[precision];
    const shards = rung === "fsdp" ? gpus : 1;
    let gradients = size.gradient * parameters;
    let states = (STATES[optimizer] * size.state + size.master) * parameters;
    let communication = 0;
    if (rung === "ddp") {
      communication = gradients;
      if (bucket_view) gradients = 0;
    }
    if (rung === "fsdp" && gpus > 1)
      communication =
        (root + Math.min(2 * largest_block, parameters - root)) * (size.cast + size.gradient);
    if (rung === "dp" && gpus > 1) {
      communication = first ? gradients + gpus * batch * output_bytes : 0;
      if (!first) states = 0;
    }
    const foreach = optimizer === "adam" && states > 0 && !["cpu", "fsdp"].includes(rung);
    const memory = {
      parameters: (size.parameter * parameters) / shards,
      gradients: gradients / shards,
      optimizer: states / shards,
      activations: batch * activation_bytes,
      casts: size.cast < size.parameter && rung !== "fsdp" ? size.cast * parameters : 0,
      communication,
      step: foreach && !size.master ? size.parameter * parameters : 0,
    };
    const fixed = memory.parameters + memory.optimizer + communication;
    const total = fixed + memory.gradients + Math.max(memory.activations + memory.casts, memory.step);
    return { ...memory, total, at_least: fixed + Math.max(memory.activations, memory.gradients) };
  }

  function transformer({
    layers, hidden: h, heads, sequence: s, vocabulary, precision = "amp", fused_attention = true,
    checkpointing = false,
  }) {
    const { activation: size, parameter: stream } = PRECISIONS[precision];
    const [block, root] = [12 * h * h + 13 * h, (vocabulary + s) * h + 2 * h];
    const parameters = layers * block + root;
    const table = fused_attention ? 0 : (2 * size + 1) * heads * s * s;
    const layer = (14 * size + 2 * stream + 2) * s * h + table;
    const [ends, logits] = [(size + stream + 1) * s * h, 12 * s * vocabulary];
    const activation_bytes = ends + (checkpointing
      ? layers * stream * s * h + Math.max(layer, logits) : layers * layer + logits);
    const flops = (checkpointing ? 8 : 6) * parameters * s;
    return { parameters, largest_block: block, root, activation_bytes, flops };
  }

  function computing_seconds(flops, flops_per_second, { utilisation = 1 } = {}) {
    return flops / (flops_per_second * utilisation);
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
