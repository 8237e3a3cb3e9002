"""The one training loop of the book; a rung changes what is around it, never the loop."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from tqdm import tqdm

from torchclinic.modules import evaluation_mode, unwrapped
from torchclinic.tables import Table, in_bytes
from torchladder import checkpoint
from torchladder.data import ImageData, dataloader
from torchladder.devices import try_gpu, why_no_cuda
from torchladder.measuring import peak_memory, reset_peak_memory

RUNGS = ("cpu", "gpu", "dp", "ddp")
PRECISIONS = {"fp32": None, "fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_POSITION = ("epoch", "batch", "step", "seconds")  # where a run is, in its checkpoints


@dataclass(frozen=True)
class Metrics:
    """Mean loss and accuracy (0 to 1) over `count` images; those of label -100 do not count."""

    loss: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave; seconds are those of training alone, memory is in bytes."""

    epoch: int
    loss: float
    accuracy: float
    test_loss: float
    test_accuracy: float
    seconds: float
    images_per_second: float
    peak_memory: int | None


class History(list[Epoch]):
    """A list of `Epoch` that prints as a table; ``history[-1].test_accuracy`` is the result."""

    def _table(self) -> Table:
        columns = {
            "epoch": [e.epoch for e in self],
            "loss": [f"{e.loss:.3f}" for e in self],
            "accuracy": [f"{e.accuracy:.1%}" for e in self],
            "test loss": [f"{e.test_loss:.3f}" for e in self],
            "test accuracy": [f"{e.test_accuracy:.1%}" for e in self],
            "seconds": [f"{e.seconds:.2f}" for e in self],
            "images/s": [f"{e.images_per_second:,.0f}" for e in self],
            "peak memory": [in_bytes(e.peak_memory) for e in self],
        }
        return Table(list(columns), zip(*columns.values(), strict=True))

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def train(
    model: nn.Module,
    data: ImageData | Sequence[Dataset],
    *,
    epochs: int = 5,
    batch_size: int = 64,
    lr: float = 0.05,
    rung: str = "cpu",
    precision: str = "fp32",
    seed: int = 0,
    workers: int = 0,
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    on_step: Callable[[TrainState], object] | None = None,
) -> History:
    """Train `model` on `data` in place, evaluating it after every epoch.

    SGD with momentum 0.9 and weight decay 5e-4; the learning rate falls linearly from `lr` to
    0 over the run. Order and dropout follow `seed`: on the CPU, the same seed, model and number
    of threads give the same parameters, bit for bit. The history is the same on every rank but
    for seconds and memory. After each epoch of rung ``'ddp'`` every rank takes over rank 0's
    buffers, such as the statistics of batch norm: what is evaluated, saved and left is one model.

    Parameters
    ----------
    model : nn.Module
        Gives logits of shape ``(batch, classes)``; is moved to the rung's device, and trained
        as compiled and in the memory format that it comes in.
    data : ImageData or (train_set, test_set)
        The pair: map-style data sets of (input, class number), such as two `TensorDataset`.
    batch_size : int
        Images a step; on rung ``'ddp'``, *of each rank*.
    rung : {'cpu', 'gpu', 'dp', 'ddp'}
        ``'dp'`` splits each batch over all GPUs, and is rung ``'cpu'`` where there is none.
        ``'ddp'`` is called by every rank of a process group, with the same arguments: under
        torchrun, or through `torchladder.launching.launch`.
    precision : {'fp32', 'fp16-mixed', 'bf16-mixed'}
        The mixed ones are autocast; with fp16 the gradients are scaled. Where they overflow, the
        scaler skips the step, and the schedule waits: it then ends that many steps above 0.
    workers : int
        Processes that load the data ahead.
    checkpoint_dir, checkpoint_every : path, int, optional
        Save there after every epoch (the best by test accuracy is ``best.pt``), and every so
        many steps; go on from the newest whole checkpoint that is there already: on the CPU, on
        one rank or two as before, and without draws in `workers`, bit for bit. (On more ranks
        DDP's first step adds gradients in another order.) A folder is for one run at a time.
        Of the model, the shapes and the kinds of its layers are compared: their settings,
        such as a dropout's probability, are yours to keep.
    on_step : callable, optional
        Called with the `TrainState` after every step, on every rank.

    Raises
    ------
    ValueError, OSError
        For a setting that cannot work or a checkpoint of another run, before anything is trained.
    FloatingPointError
        If an epoch's loss, or what would be saved, is not finite. Files stay as they were.
    """
    device = get_device(rung)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if rung == "ddp" else (0, 1)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{model} is no model: give one such as MLP(784).")
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: give 1 or more.")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}.")
    # parallel_apply hands on to its threads that autocast is on, but not its dtype.
    if rung == "dp" and precision == "bf16-mixed":
        raise ValueError("bf16-mixed: DataParallel would compute in fp16; choose 'fp16-mixed'.")
    if checkpoint_every is not None and (checkpoint_every < 1 or checkpoint_dir is None):
        what = "name a checkpoint_dir, and at least 1 step"
        raise ValueError(f"checkpoint_every={checkpoint_every}: {what}.")
    torch.manual_seed(seed + rank)  # or dropout would drop the same on every rank
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "workers": workers}
    options |= {"rank": rank, "world_size": world_size, "pin_memory": device.type == "cuda"}
    batches = dataloader(data, "train", **options)
    test_batches = dataloader(data, "test", **options)
    settings = {"data": _described(data), "model": _layers(model), "epochs": epochs, "lr": lr}
    settings |= {"seed": seed, "precision": precision}
    settings |= {"batch_size x world_size": batch_size * world_size}
    wrapped = parallelize(model.to(device), rung)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    state = TrainState(model, wrapped, optimizer, schedule, precision, rank, world_size, settings)
    state.folder = checkpoint_dir
    with ExitStack() as lock:
        if checkpoint_dir is not None:
            Path(checkpoint_dir).mkdir(parents=True, exist_ok=True)
            no_dist = world_size == 1
            lock.enter_context(checkpoint.only_run_in(checkpoint_dir, no_dist=no_dist))
        state.resume()
        _train_epochs(state, batches, test_batches, checkpoint_every, on_step)
    return state.history


@dataclass
class TrainState:
    """What learns in a training run, and how far it is; what ``train(..., on_step=)`` is given.

    `loss` stays on the device: reading it with ``.item()`` waits for it, so not at every step.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> samples = TensorDataset(torch.eye(8), torch.arange(8) % 2)
    >>> def log(state):
    ...     if state.step % 2 == 0 and state.rank == 0:
    ...         print(f"step {state.step}: loss {state.loss.item():.3f}")
    >>> model = nn.Linear(8, 2)
    >>> _ = train(model, (samples, samples), epochs=1, batch_size=2, on_step=log)
    ... # doctest: +ELLIPSIS
    step 2: loss ...
    step 4: loss ...
    """

    model: nn.Module
    wrapped: nn.Module  # `model` as its rung trains it
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    precision: str = "fp32"
    rank: int = 0
    world_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # must be the same when it goes on
    folder: str | os.PathLike | None = None  # of its checkpoints
    history: History = field(default_factory=History)
    epoch: int = 0  # epochs done
    batch: int = 0  # batches done of the unfinished epoch
    step: int = 0  # steps done in all epochs
    loss: Tensor | None = None  # mean over the last batch (of this rank), without a graph
    seconds: float = 0.0  # training seconds spent in the unfinished epoch, saving excluded

    def __post_init__(self) -> None:
        self.device = _device_of(self.model)
        self.autocast = _autocast(self.device, self.precision)
        # Without scaling, gradients below 6e-8 become 0 in float16 (bfloat16 has float32's range).
        fp16 = self.precision == "fp16-mixed"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=fp16)
        self.sums = _new_sums(self.device)  # of the unfinished epoch

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Learn from one batch, and add it to the totals."""
        images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
        with self.autocast:
            logits = self.wrapped(images)
            loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()  # without fp16 always 1, which no device is asked for
        self.scaler.update()
        skipped = self.scaler.get_scale() < scale  # the gradients were not finite
        if self.schedule is not None and not skipped:
            self.schedule.step()
        # Summed on the device: .item() here would make the CPU wait for the GPU at every step.
        self.loss = loss.detach()
        _add_batch(self.sums, logits, labels, self.loss)
        self.batch, self.step = self.batch + 1, self.step + 1

    def end_epoch(self, trained: Metrics, tested: Metrics) -> None:
        """Add the epoch to the history, and be at the beginning of the next one."""
        self.epoch += 1
        results = (trained.loss, trained.accuracy, tested.loss, tested.accuracy)
        rate, memory = trained.count / self.seconds, peak_memory(self.device)
        self.history.append(Epoch(self.epoch, *results, self.seconds, rate, memory))
        self.batch, self.seconds, self.sums = 0, 0.0, _new_sums(self.device)

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint, which `resume` takes up; every rank calls this."""
        if self.folder is None:
            return
        checkpoint.save(
            self.folder,
            self._parts(),
            run=self.settings,
            of_each_rank={"totals": [float(total) for total in self.sums]},
            best=best,
            no_dist=self.world_size == 1,
            history=[vars(epoch) for epoch in self.history],
            **{name: getattr(self, name) for name in _POSITION},
        )

    def resume(self) -> None:
        """Be where the newest checkpoint was saved, if there is one."""
        options = {"run": self.settings, "no_dist": self.world_size == 1}
        if not self.folder or not (saved := checkpoint.load(self.folder, self._parts(), **options)):
            return
        for name in _POSITION:
            setattr(self, name, saved[name])
        self.history.extend(Epoch(**epoch) for epoch in saved["history"])
        # A row for each rank there was; in the end, the sums of all ranks are added.
        for row in saved["totals"][self.rank :: self.world_size]:
            self.sums = [total + number for total, number in zip(self.sums, row, strict=True)]

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.wrapped, "optimizer": self.optimizer}
        return parts | {"schedule": self.schedule, "scaler": self.scaler}


def _train_epochs(
    state: TrainState,
    train_batches: DataLoader,
    test_batches: DataLoader,
    every: int | None,
    on_step: Callable[[TrainState], object] | None,
) -> None:
    """Train, evaluate and save from where `state` is to its last epoch."""
    epochs, steps = state.settings["epochs"], len(train_batches)
    across_ranks = state.world_size > 1
    options = {"precision": state.precision, "across_ranks": across_ranks}
    shown: dict[str, Any] = {"unit": "batch", "delay": 2} if state.rank == 0 else {"disable": True}
    loader: Any = train_batches  # of `dataloader`: it has a batch size, and begins where it is told
    with tqdm(desc="training", total=epochs * steps, initial=state.step, **shown) as bar:
        for epoch in range(state.epoch, epochs):
            done = state.batch * loader.batch_size  # of this epoch, before a break
            loader.sampler.set_epoch(epoch, start=done)
            reset_peak_memory(state.device)
            start = perf_counter()
            state.wrapped.train()
            for images, labels in train_batches:
                state.train_step(images, labels)
                bar.update()
                if on_step is not None:
                    on_step(state)
                if every and state.step % every == 0 and state.batch < steps:
                    state.seconds += perf_counter() - start
                    _check_finite(state, _metrics_of(state.sums, across_ranks))
                    state.save()
                    start = perf_counter()
            trained = _metrics_of(state.sums, across_ranks)
            state.seconds += perf_counter() - start
            if across_ranks:
                _share_buffers(state.model)
            tested = evaluate(state.model, test_batches, **options)
            _check_finite(state, trained, tested)
            best = tested.accuracy > max((e.test_accuracy for e in state.history), default=-1)
            state.end_epoch(trained, tested)
            state.save(best=best)
            bar.set_postfix(test=f"{tested.accuracy:.1%}", refresh=False)


def _share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, which are those that a checkpoint holds.

    DDP does so when the next forward pass in training mode begins: after an epoch, each rank has
    the running statistics of its own last batch, and would evaluate a model of its own.
    """
    for buffer in model.buffers():
        of_rank_0 = buffer.contiguous()  # else gloo sends the memory's bytes in their own order
        dist.broadcast(of_rank_0, 0)
        buffer.copy_(of_rank_0)


def _check_finite(state: TrainState, *metrics: Metrics) -> None:
    """Stop all ranks alike before a checkpoint with NaN takes a good one's place."""
    weights = torch.stack([p.detach().isfinite().all() for p in state.model.parameters()]).all()
    losses = [m.loss for m in metrics]
    if not (weights and all(map(math.isfinite, losses))):
        raise FloatingPointError(
            f"Diverged in epoch {state.epoch + 1}, step {state.step:,}: loss "
            f"{' and test loss '.join(map(str, losses))}, weights "
            f"{'finite' if weights else 'nan or inf'}; not saved, and earlier checkpoints are as "
            f"they were. Try a lower learning rate than lr={state.settings['lr']:g}."
        )


def train_epoch(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Metrics:
    """One pass over `batches`, a step of `optimizer` (and `schedule`) a batch.

    The metrics are those of the model as it was at each step, averaged by image.
    """
    state = TrainState(model, model, optimizer, schedule)
    model.train()
    for images, labels in batches:
        state.train_step(images, labels)
    return _metrics_of(state.sums)


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: str = "fp32",
    across_ranks: bool = False,
) -> Metrics:
    """Loss and accuracy of `model` over `batches`, on the model's device.

    Runs in evaluation mode without gradients; every module's mode is then as it was. With
    `across_ranks`, over the batches of all ranks, and every rank has to call it.
    """
    device = _device_of(model)
    sums, autocast = _new_sums(device), _autocast(device, precision)
    with evaluation_mode(model), torch.inference_mode():
        for images, labels in batches:
            images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
            with autocast:
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
            _add_batch(sums, logits, labels, loss)
    return _metrics_of(sums, across_ranks)


def _new_sums(device: torch.device) -> list:
    """Sums of loss, of correct answers and of images, on the device: all zero."""
    exact = torch.float32 if device.type == "mps" else torch.float64  # a Mac's GPU has no more
    return [*torch.zeros(3, dtype=exact, device=device).unbind()]


def _add_batch(sums: list, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    """Add a batch's summed loss, correct answers and images to the three `sums`.

    ``loss`` is a mean, without a graph. The last batch is often smaller: a mean of means would be
    wrong.
    """
    if labels.dim() != 1:
        raise ValueError(f"Labels of shape {tuple(labels.shape)}: give one class number per image.")
    counted = (labels != -100).sum()  # as cross_entropy does
    sums[0].add_(torch.where(counted > 0, loss * counted, 0))  # the mean of none is NaN
    sums[1].add_((logits.argmax(1) == labels).sum())
    sums[2].add_(counted)


def _metrics_of(sums: list, across_ranks: bool = False) -> Metrics:
    """`Metrics` from sums of loss, correct answers and images; this waits for the device.

    Ranks add their sums before dividing: they may hold unequally many images.
    """
    totals = torch.stack(sums)
    if across_ranks:
        dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    return Metrics(loss / count, correct / count, int(count))


def _autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """A context for the forward pass; one that is switched off would take 4 us of a step."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def get_device(rung: str) -> torch.device:
    """The device that `rung` trains on, in this process.

    Raises
    ------
    ValueError
        If there is no such rung, or not here.
    """
    if rung not in RUNGS:
        raise ValueError(f"No rung {rung!r}: choose one of {', '.join(RUNGS)}.")
    if rung == "gpu" and try_gpu().type == "cpu":
        raise ValueError(f"No GPU for rung 'gpu': {why_no_cuda()} Rung 'cpu' runs everywhere.")
    if rung == "ddp" and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "Rung 'ddp' needs a process group: start the program with torchrun and call "
            "init_process_group, or call train through torchladder.launching.launch."
        )
    if rung == "ddp" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return try_gpu() if rung in ("gpu", "dp") else torch.device("cpu")


def parallelize(model: nn.Module, rung: str) -> nn.Module:
    """`model` as its rung trains it; the model itself keeps the parameters, under clean names."""
    if rung == "dp":
        return nn.DataParallel(model)
    if rung == "ddp":
        device = _device_of(model)
        ids = [device] if device.type == "cuda" else None
        # The all-reduce works on the gradients themselves, not on a copy of them.
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return model


# --- what comes before the loop -----------------------------------------------------------------


def _described(data: ImageData | Sequence[Dataset]) -> str:
    """One line that tells these data from others, the same in every process.

    Of data that are in no tensors, only their kind and number: to read them may take long, or
    change them at random.
    """
    text = str(data)
    if not isinstance(data, ImageData):
        # pyrefly: ignore[bad-argument-type] - a map-style one has a length
        text = " and ".join(f"{type(d).__name__} of {len(d):,}" for d in data)
    numbers = 0
    for tensor in _tensors_of(data):
        flat = tensor.detach().flatten()
        some = flat[:: 1 + len(flat) // 1_000_000].cpu().contiguous()
        numbers = zlib.crc32(some.view(torch.uint8).numpy().data, numbers)
    return f"{text}, checksum {numbers:08x}" if numbers else text


def _tensors_of(data: Any) -> list[Tensor]:
    if isinstance(data, ImageData):
        return [*data.split("train"), *data.split("test")]
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    if isinstance(data, Subset):
        return [torch.tensor(data.indices), *_tensors_of(data.dataset)]
    pair = data if isinstance(data, tuple | list) else ()
    return [tensor for part in pair for tensor in _tensors_of(part)]


def _layers(model: nn.Module) -> str:
    """What tells the model from one of the same shapes: the kinds of its layers."""
    first, *others = [type(module).__name__ for module in unwrapped(model).modules()]
    return f"{first} of {', '.join(sorted({*others}))}" if others else first
