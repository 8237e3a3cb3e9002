"""Will it fit, and will more GPUs be faster? The formulas of the book's two calculators.

Plain arithmetic: bytes, seconds, FLOPs, and numbers of parameters go in and come out as floats.
What is counted is what PyTorch allocates for the tensors of a training step: parameters,
gradients, optimizer state, saved activations, the gradient of a transformer's logits, Adam's
temporary copy, and what a rung adds to exchange gradients.

Not counted: the CUDA context with the libraries' own buffers, cuDNN's and cuBLAS's workspaces,
other temporary tensors inside an operation, and memory that the caching allocator has reserved but
cannot use (fragmentation). `on_the_gpu` says what others have measured of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RUNGS = ("cpu", "gpu", "dp", "ddp", "fsdp")
STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers that the optimizer keeps a parameter


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
        Casts are left out: checkpointing drops them when the forward pass ends.
        """
        fixed = self.parameters + self.optimizer + self.communication
        return fixed + max(self.activations, self.gradients)


def memory_per_gpu(
    parameters: float,
    *,
    rung: str = "gpu",
    gpus: int = 1,
    precision: str = "fp32",
    optimizer: str = "sgd",
    activation_bytes: float = 0.0,
    batch: float = 1,
    largest_block: float | None = None,
    root: float = 0.0,
    first: bool = True,
) -> Memory:
    """Bytes that training needs on one GPU.

    Parameters
    ----------
    parameters : float
        How many numbers the model learns.
    rung : {"cpu", "gpu", "dp", "ddp", "fsdp"}
    precision : {"fp32", "bf16-mixed", "fp16-mixed", "bf16", "bf16-master"}
        See `PRECISIONS`. For FSDP, "mixed" is its ``MixedPrecisionPolicy``, not autocast.
    optimizer : {"sgd", "momentum", "adam"}
    activation_bytes : float
        What one sample needs in this precision where the backward pass begins: mostly what is
        saved for it.
    batch : float
        Samples on each GPU.
    largest_block : float, optional
        FSDP: parameters of the largest part that is gathered at a time. Default: all of them,
        as if `fully_shard` were called once, on the whole model.
    root : float
        FSDP: parameters that belong to no block, such as embeddings.
    first : bool
        DP: the first GPU or one of the others.

    Notes
    -----
    `communication`. DDP: its buckets, a second set of gradients, unless it has
    ``gradient_as_bucket_view=True``. DP: every step copies the parameters to the other GPUs. In
    the backward pass each copy has gradients, the first GPU's too; their sum there is the second
    set. FSDP: two blocks are there at a time, the one that computes and the one that is fetched or
    reduced meanwhile, each with parameters and gradients, the latter as they are reduced (for
    "mixed" in float32, PyTorch's default since 2.15). The root's are there all the time: by default
    `fully_shard` keeps them gathered from the forward pass to the end of the backward pass.

    On a GPU, Adam updates all parameters at once (``foreach``) and needs as much as they take for
    a moment: `step`, under FSDP as much as its shards. With ``fused=True`` it does not. For
    "bf16-master", a fused optimizer is assumed.

    Examples
    --------
    >>> memory = memory_per_gpu(1e9, optimizer="adam")
    >>> memory.at_least, memory.total  # 4 + 4 + 2 * 4 bytes a parameter, and 4 in optimizer.step()
    (16000000000.0, 20000000000.0)
    >>> memory_per_gpu(1e9, optimizer="adam", rung="fsdp", gpus=4, largest_block=1e7).total
    5160000000.0
    """
    _check(rung=(rung, RUNGS), precision=(precision, PRECISIONS), optimizer=(optimizer, STATES))
    if gpus < 1 or (rung in ("cpu", "gpu") and gpus != 1):
        raise ValueError(f"gpus={gpus} on rung {rung!r}: one on cpu and gpu, at least one above.")
    size = PRECISIONS[precision]
    shards = gpus if rung == "fsdp" else 1
    replica = rung == "dp" and gpus > 1 and not first  # it has no optimizer and sums nothing
    states = 0 if replica else STATES[optimizer] * size.state + size.master
    cast = size.cast < size.parameter and rung != "fsdp"  # FSDP gathers what is cast
    copy = optimizer == "adam" and not (replica or size.master or rung == "cpu")
    gathered = 0.0 if replica else _gathered(rung, gpus, parameters, largest_block, root, size)
    return Memory(
        parameters=size.parameter * parameters / shards,
        gradients=size.gradient * parameters / shards,
        optimizer=states * parameters / shards,
        activations=batch * activation_bytes,
        casts=float(size.cast * parameters) if cast else 0.0,
        communication=gathered,
        step=size.parameter * parameters / shards if copy else 0.0,
    )


def _gathered(
    rung: str, gpus: int, parameters: float, block: float | None, root: float, size: Precision
) -> float:
    """Bytes that a rung adds to exchange gradients: see the notes of `memory_per_gpu`."""
    if rung == "fsdp":
        two = parameters if block is None else 2 * block
        return (root + min(two, parameters - root)) * (size.cast + size.gradient)
    second_set = rung == "ddp" or (rung == "dp" and gpus > 1)
    return float(size.gradient * parameters) if second_set else 0.0


class Transformer(NamedTuple):
    """`activation_bytes` and `flops` are those of one sequence; `root` belongs to no block."""

    parameters: float
    largest_block: float
    root: float
    activation_bytes: float
    flops: float


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    precision: str = "fp32",
    fused_attention: bool = True,
    checkpointing: bool = False,
    causal: bool = False,
) -> Transformer:
    """Parameters, saved activations and FLOPs of a GPT: MLP four times as wide, tied embeddings.

    Parameters
    ----------
    fused_attention : bool
        Attention that does not save the table of every position against every other
        (``F.scaled_dot_product_attention``'s fused kernels).
    checkpointing : bool
        Save only each layer's input; one layer at a time is computed again.
    causal : bool
        Count half of attention's FLOPs: a kernel that knows the mask skips the other half. Papers
        count all when they report MFU.

    Notes
    -----
    V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022
    (https://arxiv.org/abs/2205.05198): a layer saves ``s h (34 + 5 a s / h)`` bytes in 16 bits, of
    which ``2 s h + a s^2`` are masks of dropout, one byte each; without dropout there is less.
    Under autocast ("mixed") PyTorch keeps what is passed from layer to layer in float32, and on
    a GPU computes softmax in it: a score of attention's table then takes 7 bytes, not 5. The two
    norms of a layer save it, ``4 s h`` bytes more. FSDP's ``MixedPrecisionPolicy`` casts it too:
    for FSDP take "bf16" here.

    `activation_bytes` holds 12 bytes for each logit, where the backward pass begins: what
    ``F.cross_entropy`` saves in float32, and its gradient, twice. With checkpointing, all that is
    gone when the last layer is computed again; the larger of the two counts. What a layer's own
    backward pass and the two gradients of tied embeddings need for a moment is less, with a
    vocabulary twice and a batch of positions as large as the hidden size.

    FLOPs, forwards and backwards: 6 for each parameter and position, and attention's own,
    ``12 layers hidden sequence``. With checkpointing, a third more.

    Examples
    --------
    >>> gpt2 = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50257}
    >>> transformer(**gpt2).parameters
    124439808.0
    """
    _check(precision=(precision, PRECISIONS))
    size = PRECISIONS[precision].activation
    stream = PRECISIONS[precision].parameter  # what is passed from layer to layer
    h, s = hidden, sequence
    block, root = 12 * h * h + 13 * h, (vocabulary + s) * h + 2 * h
    parameters = layers * block + root
    table = 0 if fused_attention else (stream + size + 1) * heads * s * s
    layer = (14 * size + 2 * stream + 2) * s * h + table
    ends, logits = (size + stream + 1) * s * h, 12 * s * vocabulary  # dropout, last norm; loss
    if checkpointing:
        activations = layers * stream * s * h + ends + max(layer, logits)
    else:
        activations = layers * layer + ends + logits
    flops = 6 * parameters * s + (6 if causal else 12) * layers * h * s * s
    flops *= 4 / 3 if checkpointing else 1
    return Transformer(*map(float, (parameters, block, root, activations, flops)))


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
) -> float:
    """Throughput of `world_size` GPUs divided by that of one.

    Parameters
    ----------
    computing : float
        Seconds that one GPU computes in a step; `overlap` is the share that can hide communication.
    nbytes : float
        Of gradients. FSDP gathers the parameters twice and reduces and scatters the gradients
        once; an all-reduce is one of each, so FSDP sends 1.5 times as much (S. Rajbhandari et al.,
        https://arxiv.org/abs/1910.02054, section 7.2). If its weights are sent in fewer bytes than
        its gradients, give the mean of the three: 8/3 a parameter for 2, 2 and 4.
    latency, bandwidth : float
        See `all_reduce_seconds`.
    scaling : {"weak", "strong"}
        Weak scaling keeps the batch of each rank, strong scaling that of all ranks together.
    rung : {"ddp", "fsdp"}

    Examples
    --------
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9), 2)  # the table of chapter 14
    5.91
    >>> round(speed_up(0.1, 100e6, 8, 20e-6, 5e9, scaling="strong"), 2)
    2.09
    """
    _check(scaling=(scaling, ("weak", "strong")), rung=(rung, ("ddp", "fsdp")))
    own = computing if scaling == "weak" else computing / world_size
    exchange = all_reduce_seconds(nbytes, world_size, latency, bandwidth)
    exchange *= 1.5 if rung == "fsdp" else 1
    return world_size * own / step_seconds(own, exchange, overlap)


def step_seconds(computing: float, exchange: float, overlap: float = 0.0) -> float:
    """Seconds of a step that computes and exchanges; a share `overlap` of computing hides the rest.

    Examples
    --------
    >>> step_seconds(1.0, 0.75, overlap=0.5)
    1.25
    """
    return computing + max(0.0, exchange - overlap * computing)


def _check(**chosen) -> None:
    for option, (value, known) in chosen.items():
        if value not in known:
            raise ValueError(f"{option}={value!r}: one of {', '.join(map(repr, known))}.")
