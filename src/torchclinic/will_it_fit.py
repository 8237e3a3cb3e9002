"""Will it fit, will more GPUs be faster, how fast will it answer? The calculators' formulas.

What is counted is what PyTorch allocates for the tensors of a training step: parameters,
gradients, optimizer state, saved activations, the gradient of a transformer's logits, Adam's
temporary copy, and what a rung adds to exchange gradients. Not counted are the CUDA context,
workspaces of libraries, other temporary tensors inside an operation, and memory that the allocator
has reserved but cannot use: `on_the_gpu` says what others have measured of them.

The site translates these functions to JavaScript (book/_ext/formulas.py): plain arithmetic.
"""

from dataclasses import dataclass
from typing import NamedTuple

RUNGS = ("cpu", "gpu", "dp", "ddp", "zero2", "fsdp", "hsdp")
#: Numbers that the optimizer keeps for each parameter; "adam-8bit" keeps them in a byte each.
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adam-8bit": 2, "adam-8bit-paged": 2, "muon": 1}
HELD = ("all", "one-gradient", "blocks")
BLOCKS = ("gpt", "llama", "qwen3")
LOSSES = ("whole", "parts")
CHECKPOINTING = (False, True, "selective", "offloaded")


class Precision(NamedTuple):
    """Bytes a number. `master`: float32 weights kept besides; `cast`: what a step computes with."""

    parameter: int
    gradient: int
    state: int
    master: int
    cast: int
    activation: int


#: A `Precision` for each way to train, by the names that training gives them, and
#: ``"bf16-master"``, which DeepSpeed has: a float32 copy of the weights, 16 bytes with Adam.
PRECISIONS = {
    "fp32": Precision(4, 4, 4, 0, 4, 4),
    "bf16-mixed": Precision(4, 4, 4, 0, 2, 2),  # autocast: float32 weights, cast during the step
    "fp16-mixed": Precision(4, 4, 4, 0, 2, 2),
    "bf16": Precision(2, 2, 2, 0, 2, 2),  # model.bfloat16(): PyTorch's state has the same type
    "bf16-master": Precision(2, 2, 4, 4, 2, 2),
}


CONTEXT = (0.5 * 2**30, 2.0 * 2**30)  # bytes; more with the first collective
RESERVED = (1.0, 1.4)  # divided by what is allocated
FREE = (0.0, float("inf"))  # a link that costs nothing
PCIE3 = (10e-6, 4e9)  # latency, bandwidth between T4s, say: the preset of book/will_it_fit.md


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    casts: float
    communication: float
    step: float
    accumulated: float  # of the gradients, what is there when a backward pass begins
    spared: float  # pages of the optimizer that leave the GPU, what ZeRO-2 may do without
    least: float  # of the activations, what a compiled loss leaves

    @property
    def total(self) -> float:
        """The peak if all gradients are there in the backward pass, or in ``optimizer.step()``."""
        fixed = self.parameters + self.optimizer + self.communication
        return fixed + self.gradients + max(self.activations + self.casts, self.step)

    @property
    def at_least(self) -> float:
        """The peak if gradients appear exactly as activations go, and Adam is ``fused=True``.

        So it nearly is with ``zero_grad(set_to_none=True)`` and layers that are all alike. Casts
        are left out: checkpointing drops them when the forward pass ends.
        """
        fixed = self.parameters + self.optimizer + self.communication - self.spared
        return fixed + max(self.least + self.accumulated, self.gradients)


def memory_per_gpu(
    parameters: float,
    *,
    rung: str = "gpu",
    gpus: int = 1,
    precision: str = "fp32",
    optimizer: str = "sgd",
    activation_bytes: float = 0.0,
    least_bytes: float | None = None,
    batch: float = 1,
    largest_block: float | None = None,
    root: float = 0.0,
    machines: int = 1,
    lora: float | None = None,
    frozen_bytes: float = 2,
    frozen_root_bytes: float | None = None,
    weight_decay: bool = False,
    accumulation: int = 1,
    held: str = "all",
    largest: float | None = None,
) -> Memory:
    """Bytes that training needs on one GPU.

    Parameters
    ----------
    parameters : float
        How many numbers the model has.
    rung : {"cpu", "gpu", "dp", "ddp", "zero2", "fsdp", "hsdp"}
        "zero2": DeepSpeed's stage 2, or ``fully_shard`` with ``reshard_after_forward=False``.
    precision : {"fp32", "bf16-mixed", "fp16-mixed", "bf16", "bf16-master"}
        See `PRECISIONS`. For FSDP, "mixed" is its ``MixedPrecisionPolicy``, not autocast.
    optimizer : {"sgd", "momentum", "adam", "adam-8bit", "adam-8bit-paged", "muon"}
        "muon": ``torch.optim.Muon`` for the blocks, and Adam for the `root`.
    activation_bytes, least_bytes : float
        What one sample needs where the backward pass begins: mostly what is saved for it; and the
        least of it, for `Memory.at_least`.
    batch : float
        Samples on each GPU.
    largest_block : float, optional
        FSDP: parameters of the largest part that is gathered at a time, all of them by default.
    root : float
        FSDP: parameters that belong to no block, such as embeddings.
    machines : int
        HSDP: a copy of the model on each, split over the GPUs of that machine.
    lora : float, optional
        Train only adapters, with so many numbers in all (see `Transformer`).
    frozen_bytes, frozen_root_bytes : float
        LoRA: of each frozen weight; of those of the `root`, which is never in 4 bits.
    weight_decay : bool
        SGD: with ``weight_decay=``. AdamW's and Muon's needs nothing.
    accumulation : int
        Batches in a step.
    held : {"all", "one-gradient", "blocks"}
        "one-gradient": the optimizer steps in the backward pass and frees each gradient there, if
        DDP or several batches in a step do not need it. "blocks": FSDP with ``CPUOffloadPolicy``.
    largest : float, optional
        For "one-gradient": parameters of the largest tensor, all of them by default.

    Notes
    -----
    `communication`. DDP: its buckets, a second set of gradients, unless it has
    ``gradient_as_bucket_view=True``; DP's first GPU, which adds up those of all, has one, too.
    FSDP: two blocks are there at a time, the one that computes and the one that is fetched or
    reduced meanwhile, each with parameters and gradients, the latter as they are reduced (for
    "mixed" in float32, PyTorch's default since 2.15), and the root's all the time. ZeRO-2 keeps all
    weights so. `total` has all their gradients besides, as DeepSpeed's
    ``estimate_zero2_model_states_mem_needs``; `at_least` those of two blocks and the root, and of
    weights in 16 bits no shards besides.

    On a GPU, Adam updates all parameters at once (``foreach``) and needs as much as they take for
    a moment: `step`. With ``fused=True`` it does not; for "bf16-master" that is assumed. SGD adds
    weight decay to a copy of all gradients. Muon, "adam-8bit" (bitsandbytes, torchao), and with
    "one-gradient" every optimizer, update one parameter at a time; what they need for that is left
    out, and the scales of 8 bits (0.03 bytes). Pages of "adam-8bit-paged" move to the host when the
    GPU is full.

    Examples
    --------
    >>> memory = memory_per_gpu(1e9, optimizer="adam")
    >>> memory.at_least, memory.total  # 4 + 4 + 2 * 4 bytes a parameter, and 4 in optimizer.step()
    (16000000000.0, 20000000000.0)
    >>> memory_per_gpu(1e9, optimizer="adam", rung="fsdp", gpus=4, largest_block=1e7).total
    5160000000.0
    >>> memory_per_gpu(1e9, optimizer="adam", lora=1e7, frozen_bytes=0.5).total  # and 20 * 1e7
    700000000.0
    """
    _check(rung=(rung, RUNGS), precision=(precision, PRECISIONS), optimizer=(optimizer, STATES))
    _check(held=(held, HELD))
    if gpus < 1 or (rung in ("cpu", "gpu") and gpus != 1):
        raise ValueError(f"gpus={gpus} on rung {rung!r}: one on cpu and gpu, at least one above.")
    if gpus % machines or (machines > 1 and rung != "hsdp"):
        raise ValueError(f"machines={machines}: of HSDP, and gpus={gpus} must be a multiple.")
    size = PRECISIONS[precision]
    sharded = rung in ("zero2", "fsdp", "hsdp")
    buckets = rung == "ddp" or (rung == "dp" and gpus > 1)
    whole = rung == "zero2"
    shards = gpus / machines if sharded else 1
    trained = parameters if lora is None else lora
    of_root = frozen_bytes if frozen_root_bytes is None else frozen_root_bytes
    in_root = 0 if lora is None else of_root * root
    frozen = 0 if lora is None else in_root + frozen_bytes * (parameters - root)
    each = 1 if "8bit" in optimizer else size.state
    adam = root if optimizer == "muon" and lora is None else 0  # Muon takes matrices of blocks only
    states = ((STATES[optimizer] * each + size.master) * trained + each * adam) / shards
    sgd = optimizer in ("sgd", "momentum")
    copies = trained if optimizer == "adam" or (sgd and weight_decay) else 0
    copied = adam if optimizer == "muon" else copies
    freed = held == "one-gradient" and accumulation == 1 and not buckets
    block = parameters if largest_block is None else largest_block
    tensor = parameters if largest is None else largest
    one = max(block, root) if sharded else tensor  # FSDP reduces a block at a time, or the root
    on_gpu = 0 if held == "blocks" and sharded else 1
    gradients = on_gpu * size.gradient * (min(one, trained) if freed else trained) / shards
    of_blocks = min(1, 2 * block / (parameters - root or 1))
    gathered = (root + of_blocks * (parameters - root)) / parameters
    # DeepSpeed has no shards besides of weights that are whole in 16 bits.
    again = on_gpu * (frozen + (size.parameter * trained if size.master else 0)) / shards
    divided = (1 - gathered) * size.gradient * trained + again if whole else 0
    if whole:
        of_blocks = gathered = 1
    communication = gradients if buckets else 0
    if sharded:
        communication = gathered * trained * (size.cast + size.gradient)
        communication += in_root + of_blocks * (frozen - in_root)
    one_at_a_time = freed or size.master or rung == "cpu"
    return Memory(
        parameters=on_gpu * (size.parameter * trained + frozen) / shards,
        gradients=gradients,
        optimizer=on_gpu * states,
        activations=batch * activation_bytes,
        casts=size.cast * trained if size.cast < size.parameter and not sharded else 0,
        communication=communication,
        step=0 if one_at_a_time else on_gpu * size.parameter * copied / shards,
        accumulated=gradients if accumulation > 1 else 0,
        spared=(on_gpu * states if "paged" in optimizer else 0) + divided,
        least=batch * (activation_bytes if least_bytes is None else least_bytes),
    )


class Transformer(NamedTuple):
    """`activation_bytes` and `flops` are those of one sequence; `root` belongs to no block.

    `least_bytes`: activations with a compiled loss and fused norms. `largest`: parameters of the
    largest matrix. `lookup`: those of an input table that is not the output's. `cached`: numbers in
    the KV cache for each token, of `kv_heads` heads. `lora` and `lora_attention`: numbers that
    adapters of rank 1 have, on all matrices of the layers or on attention's four. `active`:
    parameters that a token meets; `experts`: those of all experts, of which it meets the part
    `share`.
    """

    parameters: float
    largest_block: float
    root: float
    activation_bytes: float
    flops: float
    lookup: float
    cached: float
    kv_heads: float
    lora: float
    lora_attention: float
    active: float
    experts: float
    share: float
    least_bytes: float
    largest: float


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    block: str = "gpt",
    kv_heads: int | None = None,
    mlp: int | None = None,
    head_size: int | None = None,
    tied: bool = True,
    precision: str = "fp32",
    fused_attention: bool = True,
    fused_norms: bool = True,
    checkpointing: bool | str = False,
    causal: bool = False,
    frozen: bool = False,
    loss: str = "whole",
    experts: int = 1,
    chosen: int = 1,
) -> Transformer:
    """Parameters, saved activations and FLOPs of a GPT or of a newer transformer.

    Parameters
    ----------
    block : {"gpt", "llama", "qwen3"}
        "gpt": biases, dropout, LayerNorm, learned positions. "llama": none of them, but RMSNorm
        and a gated MLP. "qwen3": the same, and a norm of each query and key.
    kv_heads, mlp, head_size : int, optional
        Heads of keys and values, hidden size of the MLP, size of a head. By default `heads`,
        ``4 * hidden``, ``hidden / heads``.
    tied : bool
        One table of embeddings for input and output.
    fused_attention : bool
        No table of every position against every other is saved.
    fused_norms : bool
        RMSNorm in one kernel that saves its input (``nn.RMSNorm``, Liger), not in several
        operations, as in Transformers: they also save it in float32, and what is to be scaled.
    checkpointing : bool or "selective" or "offloaded"
        Save only each layer's input; one layer at a time is computed again. "selective" also saves
        what fused attention and every second matrix give, as torchtitan's ``op`` does. "offloaded":
        the layers' inputs wait in the host's memory.
    causal : bool
        Count half of attention's FLOPs, as a kernel does that knows the mask. Papers count all.
    frozen : bool
        LoRA: no gradients of the weights, a third of the FLOPs that they cost.
    loss : {"whole", "parts"}
        "parts": never all logits at a time (``F.linear_cross_entropy`` with ``options=``, Liger).
    experts, chosen : int
        A mixture of experts: gated MLPs in each layer, and how many of them a token meets. `mlp`
        is the size of one.

    Notes
    -----
    V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022
    (https://arxiv.org/abs/2205.05198): a layer saves ``s h (34 + 5 a s / h)`` bytes in 16 bits, of
    which ``2 s h + a s^2`` are masks of dropout, one byte each; without dropout there is less.
    A Llama's layer saves, for each position and in 16 bits, ``h`` numbers six times (the inputs and
    outputs of the norms, queries, what attention gives), keys and values, and four times those of
    the MLP: its gate and its other half, the gate's activation, their product.

    Under autocast ("mixed") PyTorch keeps what is passed from layer to layer in float32, and on
    a GPU computes softmax in it: a score of attention's table then takes 7 bytes, not 5. The two
    norms of a layer save it. Autocast also casts the output of a norm again for each of Llama's
    five matrices that read it. FSDP's ``MixedPrecisionPolicy`` casts all: for FSDP take "bf16".

    `activation_bytes` holds 12 bytes for each logit, where the backward pass begins: what
    ``F.cross_entropy`` saves in float32, and its gradient, twice. `least_bytes` holds a logit and
    its gradient once, in the activations' precision, as a compiled loss. With checkpointing, all
    that is gone when the last layer is computed again; the larger of the two counts. In parts,
    PyTorch holds about as many logits at a time as the layer before has outputs.

    Selective checkpointing counts a layer's matrices in the order in which they are used: it saves
    what the first, the third, and so on give (queries, values, the gate, the MLP's output), and
    computes the others again, with all that is no product. Of experts it saves nothing. Each of the
    `chosen` saves its input, its output, that output weighted, and what an MLP saves.

    FLOPs, forwards and backwards: 6 for each parameter and position that computes, and attention's
    own, ``12 layers hidden sequence``. With checkpointing, a third more: the output's matrix, too,
    though it is not computed again. With selective checkpointing, 2 for each that is used again.
    """
    _check(precision=(precision, PRECISIONS), block=(block, BLOCKS), loss=(loss, LOSSES))
    _check(checkpointing=(checkpointing, CHECKPOINTING))
    if not 1 <= chosen <= experts or (experts > 1 and block == "gpt"):
        raise ValueError(f"chosen={chosen} of experts={experts}: at most all, and gated MLPs.")
    size = PRECISIONS[precision].activation
    stream = PRECISIONS[precision].parameter  # what is passed from layer to layer
    gpt, qwen, cast, mixture = block == "gpt", block == "qwen3", stream > size, experts > 1
    h, s, m = hidden, sequence, mlp or 4 * hidden
    wide = heads * (head_size or h / heads)
    kv = wide * (kv_heads or heads) / heads
    table = vocabulary * h
    vectors = wide + 2 * kv + m + 6 * h if gpt else 2 * h  # biases, norms
    vectors += 2 * wide / heads if qwen else 0
    router, mlps = (h * experts if mixture else 0), experts * (2 if gpt else 3) * h * m
    one = 2 * h * (wide + kv) + mlps + router + vectors
    lookup = 0 if tied else table
    root = lookup + table + (s * h + 2 * h if gpt else h)
    parameters = layers * one + root
    share = chosen / experts
    active = parameters - layers * mlps * (1 - share)

    scores = stream + size + 1 if gpt else size + (stream if cast else 0)
    keys = kv if fused_attention else wide  # else they are repeated for each head
    layer = size * (2 * wide + 2 * keys + (2 if gpt else 4) * m * chosen) + 2 * stream * h
    # Outputs of norms; dropout. Each expert has its own input; its output is weighted, and added.
    norms = 2 * size + 2 if gpt else (5 if cast else 2) * size
    if mixture:
        norms = ((4 if cast else 2) + (3 if cast else 2) * chosen) * size + chosen * stream
    layer += norms * h + (stream * (wide + kv) if qwen else 0)
    layer = layer * s + (0 if fused_attention else scores * heads * s * s)
    ends = (size + stream + gpt) * s * h  # last norm; dropout
    more = 0 if fused_norms or gpt else 4 * s  # bytes of each number that a norm takes
    of_heads = (2 if cast else 4) / 4 * (wide + kv) if qwen else 0
    logits = s * (vocabulary if loss == "whole" else min(vocabulary, h))
    selective = checkpointing == "selective"
    second = kv + (wide if fused_attention else 0) + wide
    second += 0 if mixture else m if gpt else m + h
    saved = size * second * s if selective else 0
    inputs = 0 if checkpointing == "offloaded" else stream * s * h

    def kept(layer, each):  # bytes of a layer and of a logit
        if checkpointing:
            return ends + layers * (inputs + saved) + max(layer - saved, each * logits)
        return ends + layers * layer + each * logits

    again = active - lookup if checkpointing else 0  # parameters that compute twice
    if selective:
        in_mlp = router + mlps * share if mixture else 0 if gpt else h * m
        again = layers * (h * (kv + wide) + in_mlp)
    tables_again = checkpointing and not (selective and fused_attention)
    pairs = (6 if causal else 12) * (4 / 3 if tables_again else 1)
    products = (4 if frozen else 6) * (active - lookup) + 2 * again
    lora_attention = layers * (4 * h + 2 * (wide + kv))
    return Transformer(
        parameters=parameters,
        largest_block=one,
        root=root,
        activation_bytes=kept(layer + more * (2 * h + of_heads), 12) + more * h,
        flops=products * s + pairs * layers * wide * s * s,
        lookup=lookup,
        cached=2 * layers * kv,
        kv_heads=kv_heads or heads,
        lora=lora_attention + layers * experts * (2 if gpt else 3) * (h + m),
        lora_attention=lora_attention,
        active=active,
        experts=layers * mlps if mixture else 0,
        share=share,
        least_bytes=kept(layer, 2 * size),
        largest=max(table, h * m, h * wide),
    )


def on_the_gpu(allocated: float) -> tuple[float, float]:
    """Bytes that ``nvidia-smi`` shows at least and at most where tensors take `allocated`.

    The ranges are those that others have measured: benchmarks/measured_by_others.csv.
    """
    return RESERVED[0] * allocated + CONTEXT[0], RESERVED[1] * allocated + CONTEXT[1]


def all_reduce_seconds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce: latency in seconds a message, bandwidth in bytes a second."""
    messages = 2 * (world_size - 1)
    return messages * latency + messages / world_size * nbytes / bandwidth


def speed_up(
    computing: float,
    nbytes: float,
    world_size: int,
    latency: float,
    bandwidth: float,
    *,
    overlap: float = 0.0,
    scaling: str = "weak",
    rung: str = "ddp",
    machines: int = 1,
    network: tuple[float, float] = FREE,
    gradients: float | None = None,
    accumulation: int = 1,
) -> float:
    """Throughput of `world_size` GPUs divided by that of one.

    Parameters
    ----------
    computing : float
        Seconds that one GPU computes for a batch; `overlap` is the share that can hide
        communication.
    nbytes : float
        Of gradients. FSDP gathers the parameters twice and reduces and scatters the gradients
        once: 1.5 times as much as an all-reduce (S. Rajbhandari et al.,
        https://arxiv.org/abs/1910.02054, section 7.2). If its weights are sent in fewer bytes than
        its gradients, give the mean of the three: 8/3 a parameter for 2, 2 and 4.
    latency, bandwidth : float
        See `all_reduce_seconds`. Of the link between the GPUs of a machine.
    scaling : {"weak", "strong"}
        Weak scaling keeps the batch of each rank, strong scaling that of all ranks together.
    rung : {"ddp", "fsdp", "hsdp"}
        Which of them exchanges.
    machines : int
        That the GPUs are in, as many in each.
    network : (float, float)
        Latency, and the bandwidth of a machine's cards together. A ring through several machines
        is as slow as its slowest link. HSDP's stays in a machine, which then adds up `gradients`.
    gradients : float, optional
        Their bytes, for HSDP; `nbytes` by default.
    accumulation : int
        Batches before a step. DDP sends once, if all but the last are in ``no_sync``.

    Examples
    --------
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9), 2)
    5.91
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9, scaling="strong"), 2)
    2.09
    """
    _check(scaling=(scaling, ("weak", "strong")), rung=(rung, ("ddp", "fsdp", "hsdp")))
    share = computing if scaling == "weak" else computing / world_size
    hybrid = rung == "hsdp" and machines > 1
    if machines > 1 and not hybrid:
        latency, bandwidth = max(latency, network[0]), min(bandwidth, network[1])
    ring = int(world_size / machines) if hybrid else world_size
    exchange = all_reduce_seconds(nbytes, ring, latency, bandwidth) * (1 if rung == "ddp" else 1.5)
    if hybrid:
        summed = nbytes if gradients is None else gradients
        exchange += all_reduce_seconds(summed, machines, *network)
    batches = accumulation if rung == "ddp" else 1
    step = batches * share + max(0.0, exchange - overlap * share)
    return world_size * batches * share / step


class Serving(NamedTuple):
    """Bytes of the weights and of a request's KV cache; requests that fit; tokens a second.

    `requests` is 0 and `one` is not if one fits that leaves less than a tenth and 2 GiB free.
    """

    weights: float
    cache: float
    requests: int
    one: float
    all: float


def serving(
    model: Transformer,
    *,
    tokens: float,
    memory: float,
    bandwidth: float,
    bits: float = 16,
    cache_bytes: float = 2,
    gpus: int = 1,
) -> Serving:
    """How many requests one GPU answers at a time, or several together, and how fast at most.

    Parameters
    ----------
    tokens : float
        Of a request and its answer together, all in the cache.
    memory, bandwidth : float
        Of a GPU: bytes, of which a tenth and `CONTEXT` stay free, and bytes a second.
    bits, cache_bytes : float
        Of a weight in the layers, and of a number in the cache. Embedding tables keep 16 bits,
        as bitsandbytes, GPTQ and AWQ leave them; the scales of the others are left out. A new
        token reads all weights (of an input table one row, of experts those that one of the
        requests' tokens meets) and the caches of all requests.
    gpus : int
        That share each layer (tensor parallelism); those beyond the heads of keys and values keep
        copies of the cache. What they send each other is left out.

    Examples
    --------
    >>> sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336}
    >>> sizes |= {"sequence": 8192, "vocabulary": 128256, "block": "llama", "tied": False}
    >>> found = serving(transformer(**sizes), tokens=8192, memory=80e9, bandwidth=2039e9)
    >>> found.requests, round(found.one), round(found.all)
    (50, 127, 1484)
    """
    weights = (model.parameters - model.root) * bits / 8 + 2 * model.root
    cache = model.cached * cache_bytes * tokens * max(1, gpus / model.kv_heads)
    requests = max(0, int((gpus * (0.9 * memory - CONTEXT[1]) - weights) / cache))

    def rate(n):
        unread = model.experts * (1 - model.share) ** n  # as if each token chose at random
        read = weights - 2 * model.lookup - unread * bits / 8
        return n * gpus * bandwidth / (read + n * cache)

    one = 0.0 if gpus * (memory - CONTEXT[0]) < weights + cache else rate(1)
    return Serving(weights=weights, cache=cache, requests=requests, one=one, all=rate(requests))


def _check(**chosen) -> None:
    for option, (value, known) in chosen.items():
        if value not in known:
            raise ValueError(f"{option}={value!r}: one of {', '.join(map(repr, known))}.")
