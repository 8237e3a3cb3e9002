"""The one training loop of the book; a rung changes what is around it, never the loop."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
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
from torch.utils.data import DataLoader
from tqdm import tqdm

from torchladder import resuming
from torchladder.data import DeviceBatches, ImageData, loader
from torchladder.devices import gpu_count, named_device, try_gpu, why_no_cuda
from torchladder.measuring import peak_memory, reset_peak_memory
from torchladder.models import evaluation_mode
from torchladder.tables import Table, in_bytes

RUNGS = ("cpu", "gpu", "dp", "ddp")
SPLITS = ("train", "test")
AMP_DTYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Metrics:
    """Mean loss and accuracy (0 to 1) over `count` images."""

    loss: float
    accuracy: float
    count: int

    def __repr__(self) -> str:
        return f"loss {self.loss:.3f}, accuracy {self.accuracy:.1%} of {self.count:,} images"


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
    data: ImageData,
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
    channels_last: bool = False,
    compile: bool = False,
    ddp_options: dict | None = None,
    progress: bool = True,
    checkpoint_dir: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike = "auto",
) -> History:
    """Train `model` on `data` in place, evaluating it after every epoch.

    SGD with momentum 0.9 and weight decay 5e-4; the learning rate falls linearly from `lr` to
    0 over the run. The order of the images and dropout follow `seed`: on the CPU, the same seed,
    model and number of threads give the same parameters, bit for bit.

    Parameters
    ----------
    model, data : nn.Module, ImageData
        The model gives logits of shape ``(batch, classes)``; it is moved to the rung's device.
    epochs, batch_size, lr, seed : int, int, float, int
        On rung ``'ddp'``, `batch_size` images a step *of each rank*.
    rung : {'cpu', 'gpu', 'dp', 'ddp'}
        ``'dp'`` splits each batch over all GPUs, and is rung ``'cpu'`` where there is none.
        ``'ddp'`` is called by every rank of a process group, with the same arguments: under
        torchrun, or through `torchladder.launching.launch`.
    device : str or torch.device, optional
        Which GPU on rung ``'gpu'``; default the first. The upper rungs choose their own.
    amp : {None, 'fp16', 'bf16'}
        Automatic mixed precision; with fp16 the gradients are scaled.
    workers, on_device : int, bool
        Load data in so many processes, or keep the whole set on the device.
    channels_last, compile, ddp_options : bool, bool, dict
        The memory layout that convolutions on recent GPUs are fastest with; ``model.compile()``;
        what `DistributedDataParallel` is given, such as ``find_unused_parameters``.
    progress : bool
        A bar on stderr if it takes over two seconds, on rank 0 only.
    checkpoint_dir, checkpoint_every : path, int, optional
        Save there after every epoch (the best by test accuracy is ``best.pt``), and every so
        many steps.
    resume : {'auto', 'never'} or path
        ``'auto'``: go on from the newest whole checkpoint in `checkpoint_dir`, if there is one.

    Returns
    -------
    History
        The same on every rank but for seconds and memory.

    Raises
    ------
    ValueError, OSError
        For a setting that cannot work or a checkpoint of another run, before anything is trained.
    """
    device = device_of(rung, device)
    _check_settings(data, epochs, batch_size, lr, rung, seed, amp, workers, on_device)
    rank, ranks = _check_checkpoints(checkpoint_dir, checkpoint_every, resume, rung)
    torch.manual_seed(seed + rank)  # or dropout would drop the same on every rank
    split = {"batch_size": batch_size, "seed": seed, "rank": rank, "world_size": ranks}
    batches = _batches(data, device, on_device, workers, split)
    wrapped = _prepared(model, rung, device, channels_last, compile, ddp_options or {})
    settings = {
        **{"data": str(data), "epochs": epochs, "lr": lr, "seed": seed, "amp": amp},
        "batch_size x ranks": batch_size * ranks,
    }
    run = _new_run(model, wrapped, settings, steps=epochs * len(batches["train"]), ranks=ranks)
    if checkpoint_dir is not None:
        _go_on(run, checkpoint_dir if resume in ("auto", "never") else resume, rank)
    _train_epochs(run, batches, checkpoint_dir, checkpoint_every, progress and rank == 0)
    return run.history


@dataclass
class Run:
    """What learns in a training run, and how far it is."""

    model: nn.Module
    wrapped: nn.Module  # `model` as its rung trains it
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    totals: Tensor  # three sums over the unfinished epoch: loss, correct answers, images
    settings: dict[str, Any]  # what must be the same when the run is resumed
    ranks: int
    history: History = field(default_factory=History)
    epoch: int = 0  # epochs done
    batch: int = 0  # batches done of the unfinished epoch
    step: int = 0  # steps done in all epochs
    seconds: float = 0.0  # training seconds spent in the unfinished epoch, saving excluded

    @property
    def parts(self) -> dict[str, Any]:
        """By their names in a checkpoint."""
        others = {name: getattr(self, name) for name in ("optimizer", "schedule", "scaler")}
        return {"model": self.wrapped, **others}

    def end_epoch(self, trained: Metrics, tested: Metrics) -> None:
        """Add the epoch to the history, and be at the beginning of the next one."""
        rate, memory = trained.count / self.seconds, peak_memory(self.totals.device)
        results = (trained.loss, trained.accuracy, tested.loss, tested.accuracy)
        self.history.append(Epoch(self.epoch + 1, *results, self.seconds, rate, memory))
        self.epoch, self.batch, self.seconds = self.epoch + 1, 0, 0.0
        self.totals.zero_()


def _train_epochs(
    run: Run,
    batches: dict[str, DataLoader | DeviceBatches],
    folder: str | os.PathLike | None,
    every: int | None,
    show_bar: bool,
) -> None:
    """Train and evaluate from where `run` is to its last epoch, and save to `folder`."""
    epochs, amp, across_ranks = run.settings["epochs"], run.settings["amp"], run.ranks > 1
    step = partial(_train_step, run.wrapped, run.optimizer, run.schedule, run.scaler)
    sums, precision = run.totals.unbind(), _autocast(run.totals.device, amp)
    train_batches, steps = batches["train"], len(batches["train"])
    options = {"unit": "batch", "delay": 2} if show_bar else {"disable": True}
    with tqdm(desc="training", total=epochs * steps, initial=run.step, **options) as bar:
        for epoch in range(run.epoch, epochs):
            done = run.batch * train_batches.batch_size  # of this epoch, before a break
            train_batches.sampler.set_epoch(epoch, start=done)
            reset_peak_memory(run.totals.device)
            start = perf_counter()
            run.wrapped.train()
            for images, labels in train_batches:
                step(images, labels, precision, sums)
                bar.update()
                run.batch, run.step = run.batch + 1, run.step + 1
                if every and run.step % every == 0 and run.batch < steps:
                    run.seconds += perf_counter() - start
                    _save(run, folder)
                    start = perf_counter()
            trained = metrics_of(run.totals, across_ranks=across_ranks)
            run.seconds += perf_counter() - start
            tested = evaluate(run.model, batches["test"], amp=amp, across_ranks=across_ranks)
            best = tested.accuracy > max((e.test_accuracy for e in run.history), default=-1)
            run.end_epoch(trained, tested)
            if folder is not None:
                _save(run, folder, best=best)
            bar.set_postfix(test=f"{tested.accuracy:.1%}", refresh=False)


def _train_step(model, optimizer, schedule, scaler, images, labels, precision, sums) -> None:
    """Learn from one batch, and add it to the `sums`, as `add_batch` does."""
    images, labels = to_device(images, sums[0].device), to_device(labels, sums[0].device)
    with precision:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if schedule is not None:
        schedule.step()
    # Summed on the device: .item() here would make the CPU wait for the GPU at every step.
    add_batch(sums, logits, labels, loss)


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    amp: str | None = None,
    across_ranks: bool = False,
) -> Metrics:
    """One pass over `batches`, a step of `optimizer` (and `schedule`) a batch.

    The metrics are those of the model as it was at each step, averaged by image; of all ranks'
    images if `across_ranks`, in which case every rank has to call this.
    """
    totals = torch.zeros(3, device=device_of_model(model))
    scaler = scaler or torch.amp.GradScaler(totals.device.type, enabled=False)
    sums, precision = totals.unbind(), _autocast(totals.device, amp)
    model.train()
    for images, labels in batches:
        _train_step(model, optimizer, schedule, scaler, images, labels, precision, sums)
    return metrics_of(totals, across_ranks=across_ranks)


def evaluate(
    model: nn.Module, batches: Batches, *, amp: str | None = None, across_ranks: bool = False
) -> Metrics:
    """Loss and accuracy of `model` over `batches`, on the model's device.

    Runs in evaluation mode without gradients; every module's mode is then as it was. With
    `across_ranks`, over the batches of all ranks, and every rank has to call it.

    Raises
    ------
    ValueError
        If there is no batch.
    """
    device = device_of_model(model)
    totals = torch.zeros(3, device=device)
    sums, precision = totals.unbind(), _autocast(device, amp)
    with evaluation_mode(model), torch.inference_mode():
        for images, labels in batches:
            images, labels = to_device(images, device), to_device(labels, device)
            with precision:
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
            add_batch(sums, logits, labels, loss)
    return metrics_of(totals, across_ranks=across_ranks)


def add_batch(sums: Sequence[Tensor], logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    """Add a batch's summed loss, correct answers and images to the three `sums`.

    ``loss`` is a mean, and the last batch is often smaller: a mean of means would be wrong.
    """
    sums[0].add_(loss.detach(), alpha=len(labels))
    sums[1].add_((logits.detach().argmax(1) == labels).sum())
    sums[2].add_(len(labels))


def metrics_of(totals: Tensor, *, across_ranks: bool = False) -> Metrics:
    """`Metrics` from sums of loss, correct answers and images; this waits for the device.

    Ranks add their sums and counts before dividing: a mean of the ranks' means would be wrong
    where they hold unequally many images.
    """
    if across_ranks:
        dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    if not count:
        raise ValueError("No batches: there is nothing to train on or evaluate.")
    return Metrics(loss / count, correct / count, int(count))


def _autocast(device: torch.device, amp: str | None) -> torch.autocast:
    return torch.autocast(device.type, AMP_DTYPES[amp], enabled=amp is not None)


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
        For an unknown rung, a rung this machine lacks, rung ``'ddp'`` without a process group, or
        a device that is not of the rung.
    """
    if rung not in RUNGS:
        raise ValueError(f"No rung {rung!r}: choose one of {', '.join(RUNGS)}.")
    if rung in ("dp", "ddp") and device is not None:
        raise ValueError(f"Rung {rung!r} chooses its devices itself: leave device={device!r} out.")
    if rung == "gpu" and device is None:
        if not gpu_count():
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


def _check_settings(data, epochs, batch_size, lr, rung, seed, amp, workers, on_device) -> None:
    """Raise a ValueError for a setting of `train` that cannot work."""
    images, cores = len(data.train_images), os.cpu_count()
    for wrong, message in [
        (epochs < 1, f"epochs={epochs}: train for at least one."),
        (batch_size < 1, f"batch_size={batch_size}: a batch holds at least one image."),
        (batch_size > images, f"batch_size={batch_size}: there are {images:,} training images."),
        (not 0 < lr < math.inf, f"lr={lr}: the learning rate is above 0 and finite."),
        (not -(2**63) <= seed < 2**63, f"seed={seed}: choose a whole number of up to 18 digits."),
        (workers < 0, f"workers={workers}: give 0 (load in this process) or more."),
        (workers > 16 * cores, f"workers={workers}: far too many for {cores} cores; try {cores}."),
        (on_device and workers, f"workers={workers}: nothing to load when on_device=True."),
        (amp not in AMP_DTYPES, f"amp={amp!r}: choose None, 'fp16' or 'bf16'."),
    ]:
        if wrong:
            raise ValueError(message)
    if rung == "dp" and amp == "bf16":
        # parallel_apply hands on to its threads that autocast is on, but not its dtype.
        raise ValueError("amp='bf16': DataParallel would compute in fp16 instead; choose 'fp16'.")


def _check_checkpoints(
    folder: str | os.PathLike | None, every: int | None, start: str | os.PathLike, rung: str
) -> tuple[int, int]:
    """Make `folder` and see that it can be used; this process's rank and the number of ranks."""

    def check() -> None:
        named = start not in ("auto", "never")
        if named and not Path(start).is_file():
            raise FileNotFoundError(f"resume={str(start)!r}: choose 'auto', 'never' or a file.")
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every={every}: save every so many steps, at least 1.")
        if folder is None:
            if named or every is not None:
                raise ValueError("checkpoint_dir=None: name the folder of the checkpoints.")
            return
        if Path(folder).is_file():
            raise NotADirectoryError(f"checkpoint_dir={str(folder)!r} is a file: name a folder.")
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written: name another folder.")
        if start == "never" and (files := resuming.checkpoints_in(folder)):
            raise ValueError(
                f"{folder} holds {files[-1].name} of an earlier run: name an empty folder for a "
                "new run, or go on with resume='auto'."
            )

    rank, ranks = resuming.meet("train", no_dist=rung != "ddp")
    resuming.on_first_rank(check, rank, ranks)
    return rank, ranks


def _batches(data, device, on_device, workers, options) -> dict[str, DataLoader | DeviceBatches]:
    if on_device:
        return {split: DeviceBatches(data, split, device=device, **options) for split in SPLITS}
    more = {"workers": workers, "pin_memory": device.type == "cuda"}
    return {split: loader(data, split, **options, **more) for split in SPLITS}


def _prepared(model, rung, device, channels_last, compile, ddp_options) -> nn.Module:
    model.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    if compile:
        model.compile()
    return wrap(model, rung, device, **ddp_options)


def _new_run(model, wrapped, settings, steps, ranks) -> Run:
    lr, fp16 = settings["lr"], settings["amp"] == "fp16"
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    totals = torch.zeros(3, device=device_of_model(model))
    # Without scaling, gradients below 6e-8 become 0 in float16 (bfloat16 has float32's range).
    scaler = torch.amp.GradScaler(totals.device.type, enabled=fp16)
    return Run(model, wrapped, optimizer, schedule, scaler, totals, settings, ranks)


# --- stopping and going on ----------------------------------------------------------------------


def _save(run: Run, folder: str | os.PathLike, *, best: bool = False) -> None:
    """Write a checkpoint of `run`, which `_go_on` takes up; every rank calls this."""
    position = {name: getattr(run, name) for name in ("epoch", "batch", "step", "seconds")}
    resuming.save_checkpoint(
        folder,
        run.parts,
        run=run.settings,
        of_each_rank={"totals": run.totals.tolist()},
        best=best,
        no_dist=run.ranks == 1,
        history=[vars(epoch) for epoch in run.history],
        **position,
    )


def _go_on(run: Run, source: str | os.PathLike, rank: int) -> None:
    """Put `run` where the newest checkpoint in `source` was saved, if there is one."""
    saved = resuming.resume(source, run.parts, run=run.settings, no_dist=run.ranks == 1)
    if saved is None:
        return
    for name in ("epoch", "batch", "step", "seconds"):
        setattr(run, name, saved[name])
    run.history.extend(Epoch(**epoch) for epoch in saved["history"])
    totals = torch.tensor(saved["totals"])  # a row for each rank
    if len(totals) != run.ranks:  # all ranks' sums are added in the end: rank 0 takes them all
        totals = totals.sum(0, keepdim=True)
    if rank < len(totals):
        run.totals.copy_(totals[rank])
