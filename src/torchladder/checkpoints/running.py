"""When `train` saves, and where it goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchladder.checkpoints.resuming import resume
from torchladder.checkpoints.saving import (
    checkpoints_in,
    on_first_rank,
    ranks_of,
    save_checkpoint,
)


class Run:
    """Where `train` is (``epoch``, ``batch``, ``step``: done so far), and its checkpoints.

    With ``folder=None`` there are none. `totals` are the epoch's running sums, filled by the loop;
    `start` and `every` are `train`'s ``resume`` and ``checkpoint_every``; `settings` are options of
    `save_checkpoint`. ``history`` holds the epochs done; ``seconds`` is what the next epoch took
    before a break, less what saving took.
    """

    def __init__(
        self,
        folder: str | os.PathLike | None,
        parts: Mapping[str, Any],
        totals: Tensor,
        *,
        start: str | os.PathLike,
        every: int | None,
        **settings: Any,
    ) -> None:
        self.folder, self.parts, self.totals, self.every = folder, parts, totals, every
        self.settings, self.history, self.seconds = settings, [], 0.0
        self.epoch = self.batch = self.step = 0
        if folder is None:
            if start not in ("auto", "never") or every is not None:
                raise ValueError("checkpoint_dir=None: name the folder of the checkpoints.")
            return
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every={every}: save every so many steps, at least 1.")
        on_first_rank(lambda: _make_ready(Path(folder), start), parts)
        saved = resume(folder if start in ("auto", "never") else start, parts, **settings)
        if saved:
            for name in ("epoch", "batch", "step", "history", "seconds"):
                setattr(self, name, saved[name])
            rank, ranks = ranks_of(parts)
            sums = torch.tensor(saved["totals"])
            # All ranks' sums are added in the end: on another number of ranks, one takes them all.
            sums = sums if len(sums) == ranks else sums.sum(0, keepdim=True)
            if rank < len(sums):
                totals.copy_(sums[rank])

    def watch(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches, with a checkpoint between two of them whenever one is due."""
        return batches if self.folder is None else self._watched(batches)

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        begun = perf_counter()
        for batch in batches:
            yield batch
            # The loop is back for another batch: the step of this one is done, all of it.
            self.batch, self.step = self.batch + 1, self.step + 1
            due = self.every and self.step % self.every == 0
            if due and self.batch < len(batches):  # after the last batch comes the test
                before = perf_counter()
                self._save(seconds=self.seconds + before - begun)
                self.seconds -= perf_counter() - before

    def end_epoch(self, results: Any) -> None:
        """Save after an epoch; as ``best.pt``, too, if no earlier test accuracy was as good."""
        self.epoch, self.batch, self.seconds = self.epoch + 1, 0, 0.0
        self.totals.zero_()
        if self.folder is not None:
            before = [earlier["test_accuracy"] for earlier in self.history]
            self.history.append(vars(results))
            self._save(seconds=0.0, best=results.test_accuracy > max(before, default=-1.0))

    def _save(self, **more: Any) -> None:
        state = {name: getattr(self, name) for name in ("epoch", "batch", "step", "history")}
        own = {"totals": self.totals.tolist()}
        save_checkpoint(self.folder, self.parts, of_each_rank=own, **state, **self.settings, **more)


def _make_ready(folder: Path, start: str | os.PathLike) -> None:
    """Find out before the training whether the folder can be used."""
    if start not in ("auto", "never") and not Path(start).is_file():
        raise FileNotFoundError(f"resume={str(start)!r}: choose 'auto', 'never' or a file.")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written: name another folder for checkpoints.")
    if start == "never" and (files := checkpoints_in(folder)):
        raise ValueError(
            f"{folder} holds {files[-1].name} of an earlier run: name an empty folder for a new "
            "run, or go on with resume='auto'."
        )
