"""The one training loop of the book; a rung changes what is around it, never the loop."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from torchclinic.modules import evaluation_mode
from torchclinic.tables import Table, in_bytes
from torchladder import resuming
from torchladder.data import DeviceBatches, ImageData, dataset_of, describe, loader
from torchladder.devices import named_device, try_gpu, why_no_cuda
from torchladder.measuring import peak_memory, reset_peak_memory

RUNGS = ("cpu", "gpu", "dp", "ddp")
POSITION = ("epoch", "batch", "step", "seconds")  # where a run is, in its checkpoints
AMP_DTYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Metrics:
    """Mean loss and accuracy (0 to 1) over `count` images."""

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
    device: str | torch.device | None = None,
    seed: int = 0,
    amp: str | None = None,
    workers: int = 0,
    on_device: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
    ddp_options: dict | None = None,
    progress: bool = True,
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike = "auto",
    on_step: Callable[[Run], object] | None = None,
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
    device : str or torch.device, optional
        Which GPU on rung ``'gpu'``; default the first. The upper rungs choose their own.
    amp : {None, 'fp16', 'bf16'}
        Automatic mixed precision; with fp16 the gradients are scaled. Where they overflow, the
        scaler skips the step, and the schedule waits: it then ends that many steps above 0.
    workers, on_device : int, bool
        Load data in so many processes, or keep the whole `ImageData` on the device.
    augment : callable, optional
        What changes the ``uint8`` training images of an `ImageData`, such as `flip_and_crop`.
    ddp_options : dict, optional
        What `DistributedDataParallel` is given, such as ``find_unused_parameters``.
    checkpoint_dir, checkpoint_every : path, int, optional
        Save there after every epoch (the best by test accuracy is ``best.pt``), and every so
        many steps. A folder is for one run at a time.
    resume : {'auto', 'never'} or path
        ``'auto'``: go on from the newest whole checkpoint in `checkpoint_dir`, if there is one.
    on_step : callable, optional
        Called with the `Run` after every step, on every rank; see `Run` for an example.

    Raises
    ------
    ValueError, OSError
        For a setting that cannot work or a checkpoint of another run, before anything is trained.
    FloatingPointError
        If an epoch's loss, or what would be saved, is not finite. Files stay as they were.
    """
    device = device_of(rung, device)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if rung == "ddp" else (0, 1)
    _check_settings(data, epochs, batch_size, lr, rung, seed, amp, workers, on_device)
    _check_checkpoints(checkpoint_dir, checkpoint_every, resume)
    torch.manual_seed(seed + rank)  # or dropout would drop the same on every rank
    deal = {"batch_size": batch_size, "seed": seed, "rank": rank, "world_size": ranks}
    deal["augment"] = augment
    batches = _batches(data, device, workers, on_device, deal)
    model.to(device)
    wrapped = wrap(model, rung, device, **(ddp_options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    steps = epochs * len(batches[0])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    settings = {"data": describe(data), "epochs": epochs, "lr": lr, "seed": seed, "amp": amp}
    settings["batch_size x ranks"] = batch_size * ranks
    settings["augment"] = augment and re.sub(" at 0x[0-9a-f]+", "", repr(augment))
    run = Run(model, wrapped, optimizer, schedule, amp, rank, ranks, settings, checkpoint_dir)
    run.workers = workers
    if checkpoint_dir is not None:
        run.resume(checkpoint_dir if resume in ("auto", "never") else resume)
    _train_epochs(run, *batches, checkpoint_every, on_step, progress and rank == 0)
    return run.history


@dataclass
class Run:
    """What learns in a training run, and how far it is; what ``train(..., on_step=)`` is given.

    `loss` stays on the device: reading it with ``.item()`` waits for it, so not at every step.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> samples = TensorDataset(torch.eye(8), torch.arange(8) % 2)
    >>> def log(run):
    ...     if run.step % 2 == 0 and run.rank == 0:
    ...         print(f"step {run.step}: loss {run.loss.item():.3f}")
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
    amp: str | None = None
    rank: int = 0
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # must be the same when it goes on
    folder: str | os.PathLike | None = None  # of its checkpoints
    history: History = field(default_factory=History)
    epoch: int = 0  # epochs done
    batch: int = 0  # batches done of the unfinished epoch
    step: int = 0  # steps done in all epochs
    loss: Tensor | None = None  # mean over the last batch (of this rank), without a graph
    seconds: float = 0.0  # training seconds spent in the unfinished epoch, saving excluded
    workers: int = 0  # processes that load, and augment, its images

    def __post_init__(self) -> None:
        self.device = device_of_model(self.model)
        self.autocast = _autocast(self.device, self.amp)
        # Without scaling, gradients below 6e-8 become 0 in float16 (bfloat16 has float32's range).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp == "fp16")
        self.sums = _new_sums(self.device)  # of the unfinished epoch

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """Learn from one batch, and add it to the totals."""
        images, labels = to_device(images, self.device), to_device(labels, self.device)
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
        add_batch(self.sums, logits, labels, self.loss)
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
        resuming.save_checkpoint(
            self.folder,
            self._parts(),
            run=self.settings,
            of_each_rank={"totals": [float(total) for total in self.sums]},
            best=best,
            no_dist=self.ranks == 1,
            history=[vars(epoch) for epoch in self.history],
            workers=self.workers,
            **{name: getattr(self, name) for name in POSITION},
        )

    def resume(self, source: str | os.PathLike) -> None:
        """Be where the newest checkpoint in `source` was saved, if there is one."""
        no_dist = self.ranks == 1
        saved = resuming.resume(source, self._parts(), run=self.settings, no_dist=no_dist)
        if saved is None:
            return
        if self.rank == 0 and self.settings.get("augment") and (self.workers or saved["workers"]):
            numbers = "so the numbers are not those of an unbroken run"
            print(f"augment in workers draws other numbers, {numbers}", file=sys.stderr, flush=True)
        for name in POSITION:
            setattr(self, name, saved[name])
        self.history.extend(Epoch(**epoch) for epoch in saved["history"])
        # A row for each rank there was; in the end, the sums of all ranks are added.
        for own in saved["totals"][self.rank :: self.ranks]:
            self.sums = [total + number for total, number in zip(self.sums, own, strict=True)]

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.wrapped, "optimizer": self.optimizer}
        return parts | {"schedule": self.schedule, "scaler": self.scaler}


def _train_epochs(
    run: Run,
    train_batches: DataLoader | DeviceBatches,
    test_batches: DataLoader | DeviceBatches,
    every: int | None,
    on_step: Callable[[Run], object] | None,
    show_bar: bool,
) -> None:
    """Train, evaluate and save from where `run` is to its last epoch."""
    epochs, steps, across_ranks = run.settings["epochs"], len(train_batches), run.ranks > 1
    options = {"unit": "batch", "delay": 2} if show_bar else {"disable": True}
    with tqdm(desc="training", total=epochs * steps, initial=run.step, **options) as bar:
        for epoch in range(run.epoch, epochs):
            done = run.batch * train_batches.batch_size  # of this epoch, before a break
            train_batches.sampler.set_epoch(epoch, start=done)
            reset_peak_memory(run.device)
            start = perf_counter()
            run.wrapped.train()
            for images, labels in train_batches:
                run.train_step(images, labels)
                bar.update()
                if on_step is not None:
                    on_step(run)
                if every and run.step % every == 0 and run.batch < steps:
                    run.seconds += perf_counter() - start
                    _check_finite(run, metrics_of(run.sums, across_ranks=across_ranks))
                    run.save()
                    start = perf_counter()
            trained = metrics_of(run.sums, across_ranks=across_ranks)
            run.seconds += perf_counter() - start
            if across_ranks:
                _share_buffers(run.model)
            tested = evaluate(run.model, test_batches, amp=run.amp, across_ranks=across_ranks)
            _check_finite(run, trained, tested)
            best = tested.accuracy > max((e.test_accuracy for e in run.history), default=-1)
            run.end_epoch(trained, tested)
            run.save(best=best)
            bar.set_postfix(test=f"{tested.accuracy:.1%}", refresh=False)


def _share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, which are those that a checkpoint holds.

    DDP does so when the next forward pass in training mode begins: after an epoch, each rank has
    the running statistics of its own last batch, and would evaluate a model of its own.
    """
    for buffer in model.buffers():
        of_rank_0 = buffer.contiguous()
        dist.broadcast(of_rank_0, 0)
        buffer.copy_(of_rank_0)


def _check_finite(run: Run, *metrics: Metrics) -> None:
    """Stop all ranks alike before a checkpoint with NaN takes a good one's place."""
    weights = torch.stack([p.detach().isfinite().all() for p in run.model.parameters()]).all()
    losses = [m.loss for m in metrics]
    if not (weights and all(map(math.isfinite, losses))):
        raise FloatingPointError(
            f"Diverged in epoch {run.epoch + 1}, step {run.step:,}: loss "
            f"{' and test loss '.join(map(str, losses))}, weights "
            f"{'finite' if weights else 'nan or inf'}; not saved, and earlier checkpoints are as "
            f"they were. Try a lower learning rate than lr={run.settings['lr']:g}."
        )


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Metrics:
    """One pass over `batches`, a step of `optimizer` (and `schedule`) a batch.

    The metrics are those of the model as it was at each step, averaged by image.
    """
    run = Run(model, model, optimizer, schedule)
    model.train()
    for images, labels in batches:
        run.train_step(images, labels)
    return metrics_of(run.sums)


def evaluate(
    model: nn.Module, batches: Batches, *, amp: str | None = None, across_ranks: bool = False
) -> Metrics:
    """Loss and accuracy of `model` over `batches`, on the model's device.

    Runs in evaluation mode without gradients; every module's mode is then as it was. With
    `across_ranks`, over the batches of all ranks, and every rank has to call it.
    """
    device = device_of_model(model)
    sums, precision = _new_sums(device), _autocast(device, amp)
    with evaluation_mode(model), torch.inference_mode():
        for images, labels in batches:
            images, labels = to_device(images, device), to_device(labels, device)
            with precision:
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
            add_batch(sums, logits, labels, loss)
    return metrics_of(sums, across_ranks=across_ranks)


def _new_sums(device: torch.device) -> list:
    """Sums of loss and of correct answers, on the device, and a count of images: all zero."""
    return [*torch.zeros(2, device=device).unbind(), 0]


def add_batch(sums: list, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    """Add a batch's summed loss, correct answers and images to the three `sums`.

    ``loss`` is a mean, without a graph. The last batch is often smaller: a mean of means would be
    wrong.
    """
    sums[0].add_(loss, alpha=len(labels))
    sums[1].add_((logits.argmax(1) == labels).sum())
    sums[2] += len(labels)


def metrics_of(sums: list, *, across_ranks: bool = False) -> Metrics:
    """`Metrics` from sums of loss, correct answers and images; this waits for the device.

    Ranks add their sums before dividing: they may hold unequally many images.
    """
    totals = torch.tensor([float(total) for total in sums], device=sums[0].device)
    if across_ranks:
        dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if not count:
        raise ValueError("No batches: there is nothing to train on or evaluate.")
    return Metrics(loss / count, correct / count, int(count))


def _autocast(device: torch.device, amp: str | None) -> AbstractContextManager:
    """A context for the forward pass; one that is switched off would take 4 us of a step."""
    return torch.autocast(device.type, AMP_DTYPES[amp]) if amp else nullcontext()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy to `device` that the CPU does not wait for, if `tensor` is in pinned memory."""
    return tensor.to(device, non_blocking=True)


def device_of_model(model: nn.Module) -> torch.device:
    """Where the model's first parameter is; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def device_of(rung: str, device: str | torch.device | None = None) -> torch.device:
    """The device that `rung` trains on, in this process.

    Raises
    ------
    ValueError
        If there is no such rung here, or the device is not of the rung.
    """
    if rung not in RUNGS:
        raise ValueError(f"No rung {rung!r}: choose one of {', '.join(RUNGS)}.")
    if rung in ("dp", "ddp") and device is not None:
        raise ValueError(f"Rung {rung!r} chooses its devices itself: leave device={device!r} out.")
    if rung == "gpu" and device is None:
        if try_gpu().type == "cpu":
            raise ValueError(f"No GPU for rung 'gpu': {why_no_cuda()} Rung 'cpu' runs everywhere.")
        return try_gpu()
    if rung == "dp":
        return try_gpu()
    if rung == "ddp":
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "Rung 'ddp' needs a process group: start the program with torchrun and call "
                "init_process_group, or call train through torchladder.launching.launch."
            )
        cuda = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    chosen = named_device(device or "cpu")
    if (chosen.type == "cpu") != (rung == "cpu"):
        raise ValueError(f"Device '{chosen}' is not on rung {rung!r}; leave one of them out.")
    return chosen


def wrap(model: nn.Module, rung: str, device: torch.device, **ddp_options: object) -> nn.Module:
    """`model` as its rung trains it; the model itself keeps the parameters, under clean names."""
    if rung == "dp":
        return nn.DataParallel(model)
    if rung == "ddp":
        ids = [device] if device.type == "cuda" else None
        # The all-reduce works on the gradients themselves, not on a copy of them.
        options = {"gradient_as_bucket_view": True} | ddp_options
        return DistributedDataParallel(model, device_ids=ids, **options)
    return model


# --- what comes before the loop -----------------------------------------------------------------


def _batches(data, device: torch.device, workers: int, on_device: bool, deal: dict) -> tuple:
    """Those to train on and those to test with, dealt out to ranks and batches by `deal`."""
    if on_device:
        batches = partial(DeviceBatches, data, device=device, **deal)
    else:
        batches = partial(loader, data, workers=workers, pin_memory=device.type == "cuda", **deal)
    return batches("train"), batches("test")


def _check_settings(data, epochs, batch_size, lr, rung, seed, amp, workers, on_device) -> None:
    """Raise a ValueError for a setting of `train` that cannot work."""
    images, _ = (len(dataset_of(data, split)) for split in ("train", "test"))
    cores = os.cpu_count()
    for wrong, message in [
        (epochs < 1, f"epochs={epochs}: train for at least one."),
        (batch_size > images, f"batch_size={batch_size}: there are {images:,} training images."),
        (not 0 < lr < math.inf, f"lr={lr}: the learning rate is above 0 and finite."),
        (not -(2**63) <= seed < 2**63, f"seed={seed}: choose a whole number of up to 18 digits."),
        (workers > 16 * cores, f"workers={workers}: far too many for {cores} cores; try {cores}."),
        (
            on_device and not isinstance(data, ImageData),
            "on_device=True: only an ImageData is kept there; a pair of data sets cannot be.",
        ),
        (on_device and workers, f"workers={workers}: nothing to load when on_device=True."),
        (amp not in AMP_DTYPES, f"amp={amp!r}: choose None, 'fp16' or 'bf16'."),
        # parallel_apply hands on to its threads that autocast is on, but not its dtype.
        (
            rung == "dp" and amp == "bf16",
            "amp='bf16': DataParallel would compute in fp16 instead; choose 'fp16'.",
        ),
    ]:
        if wrong:
            raise ValueError(message)


def _check_checkpoints(
    folder: str | os.PathLike | None, every: int | None, start: str | os.PathLike
) -> None:
    """Make `folder`, and see that it can be used."""
    named = start not in ("auto", "never")
    if named and not Path(start).is_file():
        raise FileNotFoundError(f"resume={str(start)!r}: choose 'auto', 'never' or a file.")
    if every is not None and every < 1:
        raise ValueError(f"checkpoint_every={every}: save every so many steps, at least 1.")
    if folder is None:
        if named or every is not None:
            raise ValueError("checkpoint_dir=None: name the folder of the checkpoints.")
        return
    if not os.fspath(folder):
        raise ValueError("checkpoint_dir='': name a folder.")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise NotADirectoryError(f"checkpoint_dir={str(folder)!r} is a file: name a folder.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written: name another folder.")
    if start == "never" and (files := resuming.checkpoints_in(folder)):
        raise ValueError(
            f"{folder} holds {files[-1].name} of an earlier run: name an empty folder for a "
            "new run, or go on with resume='auto'."
        )
