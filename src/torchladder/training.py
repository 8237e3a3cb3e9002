"""The one training loop of the book; a rung changes what is around it, never the loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from torchladder.checkpoints.running import Run
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
    model : nn.Module
        Gives logits of shape ``(batch, classes)``. It is moved to the rung's device.
    data : ImageData
        From `torchladder.data.load`.
    epochs : int
    batch_size : int
        Images a step; on rung ``'ddp'``, images a step *of each rank*.
    lr : float
        The learning rate of the first step.
    rung : {'cpu', 'gpu', 'dp', 'ddp'}
        ``'dp'`` splits each batch over all GPUs, and is rung ``'cpu'`` where there is none.
        ``'ddp'`` is called by every rank of a process group, with the same arguments: under
        torchrun, or through `torchladder.launching.launch`.
    device : str or torch.device, optional
        Which GPU on rung ``'gpu'``; default the first. The upper rungs choose their own.
    seed : int
        Also seeds PyTorch's global generators.
    amp : {None, 'fp16', 'bf16'}
        Automatic mixed precision; with fp16 the gradients are scaled.
    workers : int
        Processes that load data beside this one.
    on_device : bool
        Keep the whole set on the device rather than copying batches to it.
    channels_last : bool
        Memory layout that convolutions on recent GPUs are fastest with.
    compile : bool
        ``model.compile()``; the first steps then take long.
    ddp_options : dict, optional
        Passed to `DistributedDataParallel`, ``find_unused_parameters`` and the like.
    progress : bool
        A bar on stderr if the run takes over two seconds (never under ``TQDM_DISABLE=1``), on
        rank 0 only.
    checkpoint_dir : path, optional
        Save there after every epoch; the best by test accuracy is ``best.pt``.
    checkpoint_every : int, optional
        Save every so many steps, too.
    resume : {'auto', 'never'} or path
        ``'auto'``: go on from the newest whole checkpoint in `checkpoint_dir`, if there is one.
        On the CPU the end is then, bit for bit, that of a run without a break; only random
        transforms drawn in `workers` begin anew.

    Returns
    -------
    History
        The same on every rank but for seconds and memory: metrics are summed over the ranks.

    Raises
    ------
    ValueError
        For an unknown rung, device or precision, fewer than one epoch, or an empty set, or if the
        checkpoint is of another run.
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: train for at least one.")
    if lr <= 0:
        raise ValueError(f"lr={lr}: the learning rate is above 0.")
    if amp not in AMP_DTYPES:
        raise ValueError(f"amp={amp!r}: choose None, 'fp16' or 'bf16'.")
    if rung == "dp" and amp == "bf16":
        # parallel_apply hands on to its threads that autocast is on, but not its dtype.
        raise ValueError("amp='bf16': DataParallel would compute in fp16 instead; choose 'fp16'.")
    device = device_of(rung, device)
    if on_device and workers:
        raise ValueError(f"workers={workers}: nothing to load when on_device=True keeps the data.")

    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if rung == "ddp" else {}
    torch.manual_seed(seed + ranks.get("rank", 0))  # or dropout would drop the same on every rank
    options = {"batch_size": batch_size, "seed": seed, **ranks}
    if on_device:
        batches = {s: DeviceBatches(data, s, device=device, **options) for s in SPLITS}
    else:
        options |= {"workers": workers, "pin_memory": device.type == "cuda"}
        batches = {s: loader(data, s, **options) for s in SPLITS}
    model.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    if compile:
        model.compile()
    wrapped = wrap(model, rung, device, **(ddp_options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    steps = epochs * len(batches["train"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    # Without scaling, gradients below 6e-8 become 0 in float16 (bfloat16 has float32's range).
    scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    across_ranks = rung == "ddp"
    run = Run(
        checkpoint_dir,
        {"model": wrapped, "optimizer": optimizer, "schedule": schedule, "scaler": scaler},
        totals=torch.zeros(3, device=device),
        start=resume,
        every=checkpoint_every,
        run={
            **{"data": str(data), "epochs": epochs, "lr": lr, "seed": seed, "amp": amp},
            "batch_size x ranks": batch_size * ranks.get("world_size", 1),
        },
    )
    history = History(Epoch(**epoch) for epoch in run.history)
    hidden = {} if progress and not ranks.get("rank") else {"disable": True}
    bar_options = {"total": steps, "initial": run.step, "unit": "batch", "delay": 2, **hidden}
    with tqdm(desc="training", **bar_options) as bar:
        for epoch in range(run.epoch, epochs):
            batches["train"].sampler.set_epoch(epoch, start=run.batch * batch_size)
            reset_peak_memory(device)
            start = perf_counter()
            trained = train_epoch(
                wrapped,
                run.watch(batches["train"]),
                optimizer,
                schedule,
                scaler=scaler,
                amp=amp,
                bar=bar,
                across_ranks=across_ranks,
                totals=run.totals,
            )
            seconds = perf_counter() - start + run.seconds
            tested = evaluate(model, batches["test"], amp=amp, across_ranks=across_ranks)
            history.append(
                Epoch(
                    epoch + 1,
                    trained.loss,
                    trained.accuracy,
                    tested.loss,
                    tested.accuracy,
                    seconds,
                    trained.count / seconds,
                    peak_memory(device),
                )
            )
            run.end_epoch(history[-1])
            bar.set_postfix(test=f"{tested.accuracy:.1%}", refresh=False)
    return history


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    amp: str | None = None,
    bar: tqdm | None = None,
    across_ranks: bool = False,
    totals: Tensor | None = None,
) -> Metrics:
    """One pass over `batches`, a step of `optimizer` (and `schedule`) a batch.

    The metrics are those of the model as it was at each step, averaged by image; of all ranks'
    images if `across_ranks`, in which case every rank has to call this. They are added to
    `totals`, if given: sums over the batches of the epoch that were before these.
    """
    device = device_of_model(model)
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    totals = torch.zeros(3, device=device) if totals is None else totals
    sums = totals.unbind()
    precision = torch.autocast(device.type, AMP_DTYPES[amp], enabled=amp is not None)
    model.train()
    for images, labels in batches:
        images, labels = to_device(images, device), to_device(labels, device)
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
        if bar is not None:
            bar.update()
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
    sums = totals.unbind()
    precision = torch.autocast(device.type, AMP_DTYPES[amp], enabled=amp is not None)
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
