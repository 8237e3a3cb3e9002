"""The hidden cases of the exercises on checkpoints and resuming: chapters 14 and 16."""

import copy
import io
import itertools
import os
import signal
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from torchexercises import Wrong, case, exercise, expect, on_ranks, raises, unchanged
from torchexercises.as_with_nccl import as_with_nccl


def _net(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


def _save_from_gpu(state: dict, path: str) -> None:
    """As if the tensors had been on a GPU that no machine has."""
    with mock.patch("torch.serialization.location_tag", return_value="cuda:99"):
        torch.save(state, path)


@exercise("14", 15, hint="The model's own keys lack the wrappers' names: compare.")
def load_any_rung(load_any_rung) -> None:
    plain = nn.ModuleDict({"a": _net("fc", "head")})
    own_child = nn.ModuleDict({"module": nn.ModuleDict({"a": _net("fc")})})
    with_buffers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with_buffers.get_buffer("1.running_mean").fill_(3)
    files = [  # a net, what its keys begin with, and what they begin with in the file
        (plain, "", "module."), (plain, "", "_orig_mod.module."), (own_child, "", "module."),
        (own_child, "", ""), (plain, "a.", "module.a._orig_mod."), (with_buffers, "", "module."),
        (own_child, "module.", "module.module._orig_mod."), (_net("module", "fc"), "", ""),
    ]  # fmt: skip
    saves = {"": torch.save, ", in another order": torch.save, ", from a GPU": _save_from_gpu}
    with tempfile.TemporaryDirectory() as folder:
        for (kind, save), (net, old, new) in itertools.product(saves.items(), files):
            state = {new + k.removeprefix(old): value for k, value in net.state_dict().items()}
            like = f"a file with keys like {next(iter(state))!r}{kind}"
            save(dict(reversed(state.items())) if "order" in kind else state, f"{folder}/file.pt")
            model = copy.deepcopy(net)
            _ = [value.zero_() for value in model.state_dict().values()]
            weight = next(model.parameters())
            with case(like):
                load_any_rung(model, f"{folder}/file.pt")
            for key, value in net.state_dict().items():
                mistakes = {"is left as it was": torch.zeros_like(value)}
                expect(f"after {like}, {key}", model.state_dict()[key], value, mistakes)
            if next(model.parameters()) is not weight:
                raise Wrong("the model's parameters are new ones, which its optimizer lacks")
        odd = [("missing", _net("fc")), ("left over", _net("fc", "b", "c"))]
        for (what, net), prefix in itertools.product(odd, ("", "module.")):
            state = {prefix + key: value for key, value in net.state_dict().items()}
            torch.save(state, f"{folder}/odd.pt")
            with raises(f"where a key is {what}", RuntimeError, KeyError, ValueError):
                load_any_rung(_net("fc", "b"), f"{folder}/odd.pt")


@exercise("14", 15, hint="It goes by position: parameter i gets state[params[i]], if there is one.")
def optimizer_state_for(optimizer_state_for) -> None:
    old, new = _net("a", "b", "c", "unused"), _net("b")
    old["norm"], new["norm"] = nn.BatchNorm1d(2), nn.BatchNorm1d(2)  # buffers have no state
    new.update(dict(_net("c", "unused", "a").named_children()))
    optimizer = torch.optim.Adam(old.parameters(), lr=0.125)
    for i, (name, parameter) in enumerate(old.named_parameters()):
        parameter.grad = None if "unused" in name else torch.full_like(parameter, i + 1.0)
    optimizer.step()
    saved, names = optimizer.state_dict(), [name for name, _ in old.named_parameters()]
    optimizer_state_for = unchanged(optimizer_state_for, "_ saved names")
    loaded = torch.optim.Adam(new.parameters(), lr=1.0)
    with case("of five modules, one has no state yet and one has buffers"):
        loaded.load_state_dict(optimizer_state_for(new, saved, names))
    expect("the optimizer's lr", loaded.param_groups[0]["lr"], 0.125)
    averages = {n: optimizer.state[p].get("exp_avg") for n, p in old.named_parameters()}
    for name, parameter in new.named_parameters():
        found = loaded.state.get(parameter, {}).get("exp_avg")
        others = {f"is that of {n}": v for n, v in averages.items() if v is not None}
        expect(f"the momentum of {name}", found, averages[name], others)
    with raises("for a parameter that the saved names lack", KeyError, ValueError):
        optimizer_state_for(_net("a", "new"), saved, names)


@exercise("16", 10, hint="ZipFile(path).testzip() names a damaged entry; or it raises.")
def newest_whole(newest_whole) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expect("for an empty folder, what is returned", newest_whole(folder), None)
        damaged = 10100, 10101, 10102
        path = {n: Path(folder, f"step_{n}.pt") for n in (998, 999, 1000, *damaged)}
        for n, file in path.items():
            torch.save({"weights": torch.full((100,), float(n))}, file)
        for other in ("best.pt", "step_last.pt", "step_10104.pt.tmp", "old_step_10105.pt"):
            torch.save({}, f"{folder}/{other}")
        data = {n: bytearray(path[n].read_bytes()) for n in damaged}
        data[10100][data[10100].index(torch.tensor(10100.0).numpy().tobytes() * 9)] ^= 1
        data |= {10101: data[10101][: len(data[10101]) // 2], 10102: b""}
        for n, now in data.items():
            path[n].write_bytes(now)
        os.utime(path[998], (2e9, 2e9))  # as if copied later
        files = {*os.listdir(folder)}
        found = newest_whole(folder)
        expect("the list of files that are new or gone", sorted({*os.listdir(folder)} ^ files), [])
        why = {998: "which was written last", 999: "which comes before step 1000"}
        why |= {
            10100: "which has a changed byte",
            10101: "which is cut off",
            10102: "which is empty",
        }
        taken = {f"is step_{n}.pt, {reason}": f"step_{n}.pt" for n, reason in why.items()}
        expect("the file", found and Path(found).name, "step_1000.pt", taken)
        _ = [path[n].unlink() for n in (998, 999, 1000)]
        expect("where no file is whole, what is returned", newest_whole(folder), None)


class _Run:
    """Model, optimizer, schedule, and the place in a shuffled epoch of 8 batches."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.order, self.done = [], 0

    def go_on(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            if self.done % 8 == 0:
                self.order = torch.randperm(8).tolist()
            x = torch.full((4, 4), self.order[self.done % 8] / 8)
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.done += 1
            losses.append(loss.item())
        return losses


@exercise("16", 15, hint="What does the next step read? Is it a copy?")
def pack_and_unpack(pack, unpack) -> None:
    run, file = _Run(0), io.BytesIO()
    run.go_on(5)
    packed, numbers = pack(run), torch.get_rng_state()
    before = copy.deepcopy(run)
    losses = run.go_on(9)
    torch.save(packed, file)  # later, in a thread say
    file.seek(0)
    if needs := get_unsafe_globals_in_checkpoint(file):
        raise Wrong(f"torch.load refuses what is packed: it needs {needs[0].rpartition('.')[2]}")
    file.seek(0)
    again = _Run(1)
    unpack(again, torch.load(file))
    later = {"are those of a later step": [*run.model.parameters()]}
    expect("the weights", [*again.model.parameters()], [*before.model.parameters()], later)
    expect("how many steps are done", again.done, 5)
    expect("the order of this epoch", again.order, before.order, {"is empty": []})
    found, right = again.optimizer.state_dict(), before.optimizer.state_dict()
    expect("the optimizer's momentum", found["state"], right["state"], {"is not there": {}})
    expect("the learning rate", found["param_groups"][0]["lr"], right["param_groups"][0]["lr"])
    expect("the schedule's count", again.schedule.last_epoch, 5, {"begins again": 0})
    if not torch.equal(torch.get_rng_state(), numbers):
        raise Wrong("the random numbers (dropout, the next epoch's order) are others")
    expect("the next losses", again.go_on(9), losses)


@on_ranks("16", 15, hint="The handler notes it. After each step, all_reduce it with MAX.")
def train_until_told(train_until_told) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cases = [([ranks - 1], 3), ([0], 0), ([*range(ranks)], 2), ([1], 5), ([], 9)]
    for told, at in cases:  # a scheduler tells all ranks
        done, usual = [], signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def step(i, told=told, at=at, done=done):
            if rank in told and i == at:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier()
            done.append(i)

        with as_with_nccl() as device:
            found = train_until_told(step, 6, device)
        right = min(at + 1, 6)
        expect(f"if ranks {told} are told in step {at}, the number of steps done", len(done), right)
        expect("what is returned", found, right, {f"is the last step, {at}: count it": at})
        if signal.signal(signal.SIGTERM, usual) is not signal.SIG_IGN:
            raise Wrong("the handler that was set before is not set again at the end")
    with as_with_nccl() as device:
        expect("of 0 steps, what is returned", train_until_told(lambda i: None, 0, device), 0)
