"""A trained model on every device there is: one replica and one thread for each."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import length_hint
from threading import Lock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from torchclinic.modules import unwrapped
from torchladder.data import ImageSet
from torchladder.devices import named_device, try_all_gpus
from torchladder.training import to_device


def predict(
    model: nn.Module,
    data: Tensor | Dataset | Iterable,
    *,
    devices: str | torch.device | Sequence[str | torch.device] | None = None,
    batch_size: int = 64,
) -> Tensor:
    """The outputs of `model` for all of `data`, in its order, as one tensor on the CPU.

    Each device has a replica in evaluation mode, and takes the next batch when it is free.
    `model` itself keeps its device and its mode, and other threads may use it meanwhile.

    Parameters
    ----------
    model : nn.Module
        Gives a tensor with a row for each input. DP, DDP and ``torch.compile`` are taken off.
    data : Tensor, Dataset or iterable of batches
        A batch, or an item of the data set, is a tensor, or a list or tuple that begins with
        it: (images, labels). Batches, such as a DataLoader's, are used as they come.
    devices : device, name, or a sequence of these, optional
        Default: every GPU, else the CPU. A device that is named twice has two threads.
    batch_size : int
        Inputs a batch, if `data` is a tensor or a data set.

    Raises
    ------
    ValueError
        If a device is not there, or there is nothing to predict.
    RuntimeError
        If the model cannot be copied to a device, or a batch fails. The message names the device,
        and the batch, counted from 0; the cause is the original error. The other devices finish
        the batch they have, and stop.

    Examples
    --------
    >>> predict(nn.Flatten(), torch.arange(4.0).view(2, 2, 1), devices=["cpu", "cpu"], batch_size=1)
    tensor([[0., 1.],
            [2., 3.]])
    """
    places = _places(devices)
    batches = _batches(data, batch_size)
    replicas = [_replica(unwrapped(model), place) for place in places]
    precisions = [_autocast_as_here(place) for place in places]
    total = length_hint(batches, 0) or None
    with (
        tqdm(desc="predicting", total=total, unit="batch", delay=2) as bar,
        ThreadPoolExecutor(len(places)) as pool,
    ):
        work = _Work(batches, bar)
        try:
            list(pool.map(work.run, replicas, places, precisions))  # raises what a thread raised
        finally:
            work.stopped = True  # after Ctrl-C: leaving the pool waits for its threads
    if not work.outputs:
        raise ValueError("data holds no batches: there is nothing to predict.")
    return torch.cat([output for _, output in sorted(work.outputs.items())])


class _Work:
    """Batches that threads take in turn, and the outputs by the batch's number."""

    def __init__(self, batches: Iterable, bar: tqdm) -> None:
        self.batches, self.bar, self.lock = iter(batches), bar, Lock()
        self.outputs: dict[int, Tensor] = {}
        self.taken, self.stopped = 0, False

    def run(self, replica: nn.Module, device: torch.device, precision: torch.autocast) -> None:
        """Predict batch after batch, until none is left or one has failed on any device."""
        # All three are settings of a thread: a new one does not have those of its caller.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with current, torch.inference_mode(), precision:
            while True:
                with self.lock:  # a generator lets in one thread at a time
                    if self.stopped:
                        return
                    number = self.taken
                    self.taken += 1
                    try:
                        batch = next(self.batches)
                    except StopIteration:
                        return
                    except Exception as error:
                        raise self.failure(f"Batch {number} could not be read", error) from error
                try:
                    self.outputs[number] = _output(replica, batch, device)
                except Exception as error:
                    raise self.failure(f"Batch {number} failed on {device}", error) from error
                self.bar.update()

    def failure(self, what: str, error: Exception) -> RuntimeError:
        self.stopped = True
        hint = "Lower batch_size. " if isinstance(error, torch.OutOfMemoryError) else ""
        return RuntimeError(f"{what}: {hint}{type(error).__name__}: {error}")


def _output(replica: nn.Module, batch: object, device: torch.device) -> Tensor:
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(f"a batch is a tensor, or begins with one; got {type(inputs).__name__}.")
    output = replica(to_device(inputs, device))
    if not isinstance(output, Tensor):
        raise TypeError(f"the model must give one tensor; got {type(output).__name__}.")
    if output.dim() == 0 or len(output) != len(inputs):
        shape = tuple(output.shape)
        raise ValueError(
            f"the model must give a row for each of {len(inputs)} inputs; got {shape}."
        )
    # A copy on the CPU too: the model may write its next outputs into the same memory, and a view
    # would keep all of the tensor that it is a part of.
    return output.to("cpu", copy=True)


def _replica(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `model` on `device` that shares the weights that are there already.

    Modules and buffers are its own, so whatever `forward` keeps in ``self``, other threads keep
    it elsewhere.
    """
    try:
        # deepcopy takes what it finds in `memo` for the copy that it would make.
        memo = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        graphs = list(_kept_with_a_graph(model))  # deepcopy refuses them
        memo |= {id(tensor): tensor.detach().clone() for tensor in graphs}
        return copy.deepcopy(model, memo).to(device).eval()
    except Exception as error:
        what = f"The model cannot be copied to {device}"
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def _kept_with_a_graph(model: nn.Module) -> Iterable[Tensor]:
    """What `forward` has left in a module in training: the last attention, for example."""
    for module in model.modules():
        for value in (*vars(module).values(), *module.buffers(recurse=False)):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value


def _autocast_as_here(device: torch.device) -> torch.autocast:
    kind = device.type
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def _places(devices: object) -> list[torch.device]:
    if devices is None:
        return try_all_gpus()
    names = [devices] if isinstance(devices, str | torch.device) else list(devices)
    if not names:
        raise ValueError("devices is empty: name at least one, such as 'cpu'.")
    places = [named_device(name) for name in names]
    # In a new thread, "cuda" is GPU 0, whatever the caller's current device is.
    here = torch.cuda.current_device() if torch.device("cuda") in places else None
    return [torch.device("cuda", here) if p == torch.device("cuda") else p for p in places]


def _batches(data: object, batch_size: int) -> Iterable:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a batch holds at least one input.")
    if isinstance(data, Tensor):
        return data.split(batch_size) if len(data) else ()
    if isinstance(data, Dataset):
        # An `ImageSet` has made the batch: nothing to collate.
        return DataLoader(
            data, batch_size, collate_fn=tuple if isinstance(data, ImageSet) else None
        )
    return data
