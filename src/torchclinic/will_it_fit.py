"""Will it fit, will more GPUs be faster, how fast will it answer? The calculators' formulas.

Plain arithmetic: bytes, seconds, FLOPs, and numbers of parameters go in and come out as floats.
What is counted is what PyTorch allocates for the tensors of a training step: parameters,
gradients, optimizer state, saved activations, the gradient of a transformer's logits, Adam's
temporary copy, and what a rung adds to exchange gradients.

Not counted: the CUDA context with the libraries' own buffers, cuDNN's and cuBLAS's workspaces,
other temporary tensors inside an operation, and memory that the caching allocator has reserved but
cannot use (fragmentation). `on_the_gpu` says what others have measured of them.
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
PCIE3 = (10e-6, 4e9)  # latency, bandwidth between T4s, say: the preset of book/will_it_fit.md


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    casts: float = 0.0
    communication: float = 0.0
    step: float = 0.0
    accumulated: float = 0.0  # of the gradients, what is there when a backward pass begins
    spared: float = 0.0  # pages of the optimizer that leave the GPU, what ZeRO-2 may do without
    least: float = 0.0  # of the activations, what a compiled loss leaves

    @property
    def total(self) -> float:
        """The peak if all gradients are there in the backward pass, or in ``optimizer.step()``.

        So it is when gradients are kept from step to step, or add up over several batches. Adam's
        `step` is counted as PyTorch runs it on a GPU; it comes when the activations are gone.
        """
        fixed = self.parameters + self.optimizer + self.communication
        return fixed + self.gradients + max(self.activations + self.casts, self.step)

    @property
    def at_least(self) -> float:
        """The peak if gradients appear exactly as activations go, and Adam is ``fused=True``.

        So it nearly is with ``zero_grad(set_to_none=True)`` and layers that are all alike; where
        the first layers have the activations and the last ones the parameters, it is `total`.
        Casts are left out: checkpointing drops them when the forward pass ends. Gradients that
        add up over several batches take turns with nothing. What may be `spared` is.
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
    first: bool = True,
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
        How many numbers the model learns.
    rung : {"cpu", "gpu", "dp", "ddp", "zero2", "fsdp", "hsdp"}
        "zero2": DeepSpeed's stage 2, or ``fully_shard`` with ``reshard_after_forward=False``.
    precision : {"fp32", "bf16-mixed", "fp16-mixed", "bf16", "bf16-master"}
        See `PRECISIONS`. For FSDP, "mixed" is its ``MixedPrecisionPolicy``, not autocast.
    optimizer : {"sgd", "momentum", "adam", "adam-8bit", "adam-8bit-paged", "muon"}
        "muon": ``torch.optim.Muon`` for the blocks, and Adam for the `root`.
    activation_bytes : float
        What one sample needs in this precision where the backward pass begins: mostly what is
        saved for it.
    least_bytes : float, optional
        The same with a compiled loss, for `Memory.at_least`; `activation_bytes` by default.
    batch : float
        Samples on each GPU.
    largest_block : float, optional
        FSDP: parameters of the largest part that is gathered at a time. Default: all of them,
        as if `fully_shard` were called once, on the whole model.
    root : float
        FSDP: parameters that belong to no block, such as embeddings.
    first : bool
        DP: the first GPU or one of the others.
    machines : int
        HSDP: a copy of the model on each, split over the GPUs of that machine.
    lora : float, optional
        Train only adapters, with so many numbers in all (see `Transformer`).
    frozen_bytes : float
        LoRA: of each frozen weight. It has no gradient and no state.
    frozen_root_bytes : float, optional
        LoRA: of each frozen weight of the `root`, which is never in 4 bits. Default: as the others.
    weight_decay : bool
        SGD: with ``weight_decay=``. AdamW's and Muon's needs nothing.
    accumulation : int
        Batches whose gradients add up before a step.
    held : {"all", "one-gradient", "blocks"}
        "one-gradient": the optimizer steps inside the backward pass and frees each gradient there.
        DDP and several batches in a step need all of them all the same. "blocks": FSDP with
        ``CPUOffloadPolicy`` has on the GPU what it has gathered, and activations.
    largest : float, optional
        For "one-gradient": parameters of the largest tensor, all of them by default.

    Notes
    -----
    `communication`. DDP: its buckets, a second set of gradients, unless it has
    ``gradient_as_bucket_view=True``. DP: every step copies the parameters to the other GPUs. In
    the backward pass each copy has gradients, the first GPU's too; their sum there is the second
    set. FSDP: two blocks are there at a time, the one that computes and the one that is fetched or
    reduced meanwhile, each with parameters and gradients, the latter as they are reduced (for
    "mixed" in float32, PyTorch's default since 2.15). The root's are there all the time: by default
    `fully_shard` keeps them gathered from the forward pass to the end of the backward pass.
    ZeRO-2 keeps all weights so. `total` has all their gradients besides, as DeepSpeed's
    ``estimate_zero2_model_states_mem_needs``: with Adam ``4 + 16 / gpus`` bytes each. `at_least`
    has those of two blocks and the root, the others being divided as they appear, and of weights
    in 16 bits no shards besides.

    On a GPU, Adam updates all parameters at once (``foreach``) and needs as much as they take for
    a moment: `step`, under FSDP as much as its shards. With ``fused=True`` it does not. For
    "bf16-master", a fused optimizer is assumed. SGD adds weight decay to a copy of all gradients.
    Muon updates one matrix at a time, and what it needs for that is left out. "adam-8bit" is
    bitsandbytes' or torchao's Adam, which updates one parameter at a time; the scales of its blocks
    (0.03 bytes) are left out. With "one-gradient" every optimizer does, and what it needs for that
    is left out. Pages of "adam-8bit-paged" move to the
    host when the GPU is full, and `torch.cuda.memory_allocated` never has them.

    Examples
    --------
    >>> memory = memory_per_gpu(1e9, optimizer="adam")
    >>> memory.at_least, memory.total  # 4 + 4 + 2 * 4 bytes a parameter, and 4 in optimizer.step()
    (16000000000.0, 20000000000.0)
    >>> memory_per_gpu(1e9, optimizer="adam", rung="fsdp", gpus=4, largest_block=1e7).total
    5160000000.0
    >>> memory_per_gpu(1e9, optimizer="adam-8bit").total  # 4 + 4 + 2 * 1 bytes a parameter
    10000000000.0
    >>> memory_per_gpu(1e9, optimizer="adam", lora=1e7, frozen_bytes=0.5).total  # and 20 * 1e7
    700000000.0
    >>> paged = {"optimizer": "adam-8bit-paged", "held": "one-gradient", "largest": 5e7}
    >>> memory_per_gpu(1e9, precision="bf16", **paged).at_least  # 2 bytes a parameter, and 2 * 5e7
    2100000000.0
    """
    _check(rung=(rung, RUNGS), precision=(precision, PRECISIONS), optimizer=(optimizer, STATES))
    _check(held=(held, HELD))
    if gpus < 1 or (rung in ("cpu", "gpu") and gpus != 1):
        raise ValueError(f"gpus={gpus} on rung {rung!r}: one on cpu and gpu, at least one above.")
    if gpus % machines or (machines > 1 and rung != "hsdp"):
        raise ValueError(f"machines={machines}: of HSDP, and gpus={gpus} must be a multiple.")
    size, sharded = PRECISIONS[precision], rung in ("zero2", "fsdp", "hsdp")
    shards = gpus / machines if sharded else 1
    trained = parameters if lora is None else lora
    in_root = frozen_bytes if frozen_root_bytes is None else frozen_root_bytes
    still = (0, 0) if lora is None else (in_root * root, frozen_bytes * (parameters - root))
    frozen = sum(still)  # what is in the root and in the blocks
    replica = rung == "dp" and gpus > 1 and not first  # it has no optimizer and sums nothing
    each = 1 if "8bit" in optimizer else size.state
    adam = root if optimizer == "muon" and lora is None else 0  # Muon takes matrices of blocks only
    states = 0 if replica else (STATES[optimizer] * each + size.master) * trained + each * adam
    cast = size.cast < size.parameter and not sharded  # FSDP gathers what is cast
    copies = trained if optimizer == "adam" or (weight_decay and "adam" not in optimizer) else 0
    copied = adam if optimizer == "muon" else copies
    freed = held == "one-gradient" and accumulation == 1 and rung not in ("dp", "ddp")
    if sharded:  # FSDP reduces a block at a time, or the root
        largest = None if largest_block is None else max(largest_block, root)
    one = trained if largest is None or not freed else min(largest, trained)
    gradients = size.gradient * one / shards
    communication = divided = 0.0
    on_gpu = 0 if held == "blocks" and sharded else 1
    if sharded:
        of_blocks = 1.0 if largest_block is None else 2 * largest_block / (parameters - root or 1)
        of_blocks = min(of_blocks, 1.0)
        gathered = (root + of_blocks * (parameters - root)) / parameters
        if rung == "zero2":
            divided = (1 - gathered) * size.gradient * trained
            # DeepSpeed has no shards besides of weights that are whole in 16 bits.
            divided += on_gpu * (frozen + (size.parameter * trained if size.master else 0)) / shards
            of_blocks = gathered = 1.0
        communication = gathered * trained * (size.cast + size.gradient)
        communication += still[0] + of_blocks * still[1]
    elif rung == "ddp" or (rung == "dp" and gpus > 1 and first):
        communication = float(size.gradient * trained)
    one_at_a_time = replica or freed or size.master or rung == "cpu"
    return Memory(
        parameters=on_gpu * (size.parameter * trained + frozen) / shards,
        gradients=on_gpu * gradients,
        optimizer=on_gpu * states / shards,
        activations=batch * activation_bytes,
        casts=float(size.cast * trained) if cast else 0.0,
        communication=communication,
        step=0.0 if one_at_a_time else on_gpu * size.parameter * copied / shards,
        accumulated=on_gpu * gradients if accumulation > 1 else 0.0,
        spared=(on_gpu * states / shards if "paged" in optimizer else 0.0) + divided,
        least=batch * (activation_bytes if least_bytes is None else least_bytes),
    )


class Transformer(NamedTuple):
    """`activation_bytes` and `flops` are those of one sequence; `root` belongs to no block.

    `least_bytes`: activations with a compiled loss. `largest`: parameters of the largest matrix.
    `lookup`: parameters of an input table that is not the output's. `cached`: numbers in the KV
    cache for each token. `lora` and `lora_attention`: numbers that adapters of rank 1 have, on all
    matrices of the layers or on attention's four. `active`: parameters that a token meets;
    `experts`: those of all experts, of which it meets the part `share`.
    """

    parameters: float
    largest_block: float
    root: float
    activation_bytes: float
    flops: float
    lookup: float
    cached: float
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
    kv_heads : int, optional
        Heads of keys and values, `heads` by default.
    mlp : int, optional
        Hidden size of the MLP, ``4 * hidden`` by default.
    head_size : int, optional
        Of one head, ``hidden / heads`` by default.
    tied : bool
        One table of embeddings for input and output.
    fused_attention : bool
        Attention that does not save the table of every position against every other
        (``F.scaled_dot_product_attention``'s fused kernels).
    checkpointing : bool or "selective" or "offloaded"
        Save only each layer's input; one layer at a time is computed again. "selective" also saves
        what fused attention and every second matrix give, as torchtitan's ``op`` does. "offloaded":
        the layers' inputs wait in the host's memory.
    causal : bool
        Count half of attention's FLOPs: a kernel that knows the mask skips the other half. Papers
        count all when they report MFU.
    frozen : bool
        LoRA: no gradients of the weights, a third of the FLOPs that they cost.
    loss : {"whole", "parts"}
        "parts": never all logits at a time, as ``F.linear_cross_entropy`` with ``options=`` and
        Liger's kernels do.
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
    the MLP: its gate and its other half, the gate's activation, their product. Here RMSNorm saves
    its input alone, as on a GPU; on a CPU it is several operations, which save more.

    Under autocast ("mixed") PyTorch keeps what is passed from layer to layer in float32, and on
    a GPU computes softmax in it: a score of attention's table then takes 7 bytes, not 5. The two
    norms of a layer save it, ``4 s h`` bytes more. FSDP's ``MixedPrecisionPolicy`` casts it too:
    for FSDP take "bf16" here. Autocast also casts the output of a norm again for each of Llama's
    five matrices that read it.

    `activation_bytes` holds 12 bytes for each logit, where the backward pass begins: what
    ``F.cross_entropy`` saves in float32, and its gradient, twice. `least_bytes` holds a logit and
    its gradient once, in the activations' precision: a compiled loss makes the rest as it reads
    them. With checkpointing, all that is gone when the last layer is computed again; the larger of
    the two counts. What a layer's own backward pass and the two gradients of tied embeddings need
    for a moment is less, with a vocabulary twice and a batch of positions as large as the hidden
    size. In parts, PyTorch holds about as many logits at a time as the layer before has outputs,
    and the latter's gradient: at most 12 bytes for each of these outputs.

    Selective checkpointing counts a layer's matrices in the order in which they are used: it saves
    what the first, the third, and so on give (queries, values, the gate, the MLP's output), and
    computes the others again, with all that is no product. Of experts it saves nothing.

    With experts, each of the `chosen` saves its input, its output, that output weighted, and what
    an MLP saves. Which expert gets a token does not matter, if none is dropped and no place is left
    empty.

    FLOPs, forwards and backwards: 6 for each parameter and position, and attention's own,
    ``12 layers hidden sequence``. Of experts, those that a token meets. Looking up a row of a table
    of its own takes none. With checkpointing, a third more: the output's matrix, too, though it is
    not computed again. With selective checkpointing, 2 for each parameter that is used again.

    Examples
    --------
    >>> gpt2 = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50257}
    >>> transformer(**gpt2).parameters
    124439808.0
    """
    _check(precision=(precision, PRECISIONS), block=(block, BLOCKS), loss=(loss, LOSSES))
    _check(checkpointing=(checkpointing, CHECKPOINTING))
    if not 1 <= chosen <= experts or (experts > 1 and block == "gpt"):
        raise ValueError(f"chosen={chosen} of experts={experts}: at most all, and gated MLPs.")
    size = PRECISIONS[precision].activation
    stream = PRECISIONS[precision].parameter  # what is passed from layer to layer
    gpt, cast = block == "gpt", stream > size
    h, s, m = hidden, sequence, mlp or 4 * hidden
    wide = heads * head_size if head_size else h
    kv = wide * (kv_heads or heads) / heads
    table = vocabulary * h
    vectors = wide + 2 * kv + m + 6 * h if gpt else 2 * h  # biases, norms
    if block == "qwen3":
        vectors += 2 * wide / heads
    router, mlps = (h * experts if experts > 1 else 0), experts * (2 if gpt else 3) * h * m
    one = 2 * h * (wide + kv) + mlps + router + vectors
    root = (table + s * h + 2 * h) if gpt else (table + h)
    lookup = 0 if tied else table
    parameters = layers * one + root + lookup
    share = chosen / experts
    active = parameters - layers * mlps * (1 - share)

    scores = stream + size + 1 if gpt else size + (stream if cast else 0)
    keys = kv if fused_attention else wide  # else they are repeated for each head
    layer = size * (2 * wide + 2 * keys + (2 if gpt else 4) * m * chosen) + 2 * stream * h
    # Outputs of norms; dropout. Each expert has its own input; its output is weighted, and added.
    norms = 2 * size + 2 if gpt else (5 if cast else 2) * size
    if experts > 1:
        norms = ((4 if cast else 2) + (3 if cast else 2) * chosen) * size + chosen * stream
    layer += norms * h
    if block == "qwen3":
        layer += stream * (wide + kv)
    layer = layer * s + (0 if fused_attention else scores * heads * s * s)
    ends = (size + stream + gpt) * s * h  # last norm; dropout
    logits = s * (vocabulary if loss == "whole" else min(vocabulary, h))
    selective, mlp_once = checkpointing == "selective", experts == 1
    second = kv + (wide if fused_attention else 0) + wide + mlp_once * (m if gpt else m + h)
    saved = selective * size * second * s
    if checkpointing:
        most, least = (max(layer - saved, each * logits) for each in (12, 2 * size))
        inputs = 0 if checkpointing == "offloaded" else stream * s * h
        kept = layers * (inputs + saved) + ends
    else:
        most, least, kept = 12 * logits, 2 * size * logits, layers * layer + ends

    again = active - lookup if checkpointing else 0  # parameters that compute twice
    if selective:
        in_mlp = (0 if gpt else h * m) if mlp_once else router + mlps * share
        again = layers * (h * (kv + wide) + in_mlp)
    tables_again = checkpointing and not (selective and fused_attention)
    pairs = (6 if causal else 12) * (4 / 3 if tables_again else 1)
    products = (4 if frozen else 6) * (active - lookup) + 2 * again
    flops = products * s + pairs * layers * wide * s * s
    adapters = layers * (4 * h + 2 * (wide + kv))
    whole = adapters + layers * experts * (2 if gpt else 3) * (h + m)
    found = parameters, one, root + lookup, kept + most, flops, lookup
    more = 2 * layers * kv, whole, adapters, active, layers * mlps if experts > 1 else 0, share
    largest = max(table, h * m, h * wide)
    return Transformer(*map(float, (*found, *more, kept + least, largest)))


def on_the_gpu(allocated: float) -> tuple[float, float]:
    """Bytes that ``nvidia-smi`` shows at least and at most where tensors take `allocated`.

    It counts the CUDA context, and all that the caching allocator has reserved. The ranges are
    those that others have measured: benchmarks/measured_by_others.csv.

    Examples
    --------
    >>> [round(each / 2**30, 1) for each in on_the_gpu(10 * 2**30)]
    [10.5, 16.0]
    """
    least, most = (reserved * allocated for reserved in RESERVED)
    return least + CONTEXT[0], most + CONTEXT[1]


def all_reduce_seconds(nbytes: float, world_size: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce: latency in seconds a message, bandwidth in bytes a second.

    Examples
    --------
    >>> all_reduce_seconds(2e9, world_size=4, latency=0, bandwidth=2e9)
    1.5
    """
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
    network: tuple[float, float] = (0.0, float("inf")),
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
        once; an all-reduce is one of each, so FSDP sends 1.5 times as much (S. Rajbhandari et al.,
        https://arxiv.org/abs/1910.02054, section 7.2). If its weights are sent in fewer bytes than
        its gradients, give the mean of the three: 8/3 a parameter for 2, 2 and 4.
    latency, bandwidth : float
        See `all_reduce_seconds`. Of the link between the GPUs of a machine.
    scaling : {"weak", "strong"}
        Weak scaling keeps the batch of each rank, strong scaling that of all ranks together.
    rung : {"ddp", "fsdp", "hsdp"}
    machines : int
    network : (float, float)
        Latency, and the bandwidth of a machine's cards together. A ring through several machines
        is as slow as its slowest link. HSDP's stays in a machine; then all GPUs of a machine share
        the network to add up their shards of `gradients`.
    gradients : float, optional
        Their bytes, for HSDP; `nbytes` by default.
    accumulation : int
        Batches before a step. DDP sends once, if all but the last are in ``no_sync``. FSDP and
        HSDP gather for each, and as they are also reduce.

    Examples
    --------
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9), 2)
    5.91
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9, accumulation=4), 2)
    7.35
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9, scaling="strong"), 2)
    2.09
    """
    _check(scaling=(scaling, ("weak", "strong")), rung=(rung, ("ddp", "fsdp", "hsdp")))
    share = computing if scaling == "weak" else computing / world_size
    hybrid = rung == "hsdp" and machines > 1
    if machines > 1 and not hybrid:
        latency, bandwidth = max(latency, network[0]), min(bandwidth, network[1])
    ring = world_size // machines if hybrid else world_size
    exchange = all_reduce_seconds(nbytes, ring, latency, bandwidth)
    exchange *= 1 if rung == "ddp" else 1.5
    if hybrid:
        summed = nbytes if gradients is None else gradients
        exchange += all_reduce_seconds(summed, machines, *network)
    batches = accumulation if rung == "ddp" else 1
    step = (batches - 1) * share + step_seconds(share, exchange, overlap)
    return world_size * batches * share / step


def step_seconds(computing: float, exchange: float, overlap: float = 0.0) -> float:
    """Seconds of a step that computes and exchanges; a share `overlap` of computing hides the rest.

    Examples
    --------
    >>> step_seconds(1.0, 0.75, overlap=0.5)
    1.25
    """
    return computing + max(0.0, exchange - overlap * computing)


class Serving(NamedTuple):
    """Bytes of the weights and of a request's KV cache; requests that fit; tokens a second."""

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
) -> Serving:
    """How many requests one GPU answers at a time, and how fast at most.

    Parameters
    ----------
    tokens : float
        Of a request and its answer together, all in the cache.
    memory, bandwidth : float
        Bytes, of which a tenth stays free, and bytes a second.
    bits, cache_bytes : float
        Of a weight in the layers, and of a number in the cache. Embedding tables keep 16 bits,
        as bitsandbytes, GPTQ and AWQ leave them; the scales of the others are left out.

    Notes
    -----
    For each new token a GPU reads all weights, but of an input table one row, and the caches of
    all requests; of experts, those that one of the requests' tokens meets. The time of computing,
    and of everything else, comes on top.

    Examples
    --------
    >>> sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336}
    >>> sizes |= {"sequence": 8192, "vocabulary": 128256, "block": "llama", "tied": False}
    >>> found = serving(transformer(**sizes), tokens=8192, memory=80e9, bandwidth=2039e9)
    >>> found.requests, round(found.one), round(found.all)
    (52, 127, 1497)
    """
    weights = (model.parameters - model.root) * bits / 8 + 2 * model.root
    cache = model.cached * cache_bytes * tokens
    requests = max(0, int((0.9 * memory - weights) // cache))

    def rate(n: int) -> float:
        unread = model.experts * (1 - model.share) ** n  # as if each token chose at random
        read = weights - 2 * model.lookup - unread * bits / 8
        return n * bandwidth / (read + n * cache) if requests else 0.0

    return Serving(weights, cache, requests, rate(1), rate(requests))


def _check(**chosen) -> None:
    for option, (value, known) in chosen.items():
        if value not in known:
            raise ValueError(f"{option}={value!r}: one of {', '.join(map(repr, known))}.")
