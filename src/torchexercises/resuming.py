"""The hidden cases of the exercises on checkpoints and resuming: chapters 14 and 15."""

import copy
import io
import itertools
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from torchexercises import Wrong, exercise, expect, on_ranks


def _net(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


@exercise(
    "14", minutes=15, hint="Compare with the model's own keys: they lack the wrappers' names."
)
def load_any_rung(load_any_rung) -> None:
    plain = nn.ModuleDict({"a": _net("fc", "head")})
    own_child = nn.ModuleDict({"module": nn.ModuleDict({"a": _net("fc")})})
    with_buffers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with_buffers.get_buffer("1.running_mean").fill_(3)
    files = [  # a net, what its keys begin with, and what they begin with in the file
        (plain, "", "module."), (plain, "", "_orig_mod.module."), (plain, "a.", "a._orig_mod."),
        (own_child, "", ""), (own_child, "", "module."), (_net("module", "fc"), "", ""),
        (plain, "", "module._orig_mod."), (plain, "a.", "module.a._orig_mod."),
        (own_child, "module.", "module._orig_mod."), (own_child, "", "_orig_mod."),
        (own_child, "module.", "module.module._orig_mod."), (with_buffers, "", "module."),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for turned, (net, old, new) in itertools.product((False, True), files):
            state = {new + k.removeprefix(old): value for k, value in net.state_dict().items()}
            like = f"keys are like {next(iter(state))!r}" + ", in another order," * turned
            torch.save(dict(reversed(state.items())) if turned else state, f"{folder}/file.pt")
            model = copy.deepcopy(net)
            _ = [value.zero_() for value in model.state_dict().values()]
            weight = next(model.parameters())
            try:
                load_any_rung(model, f"{folder}/file.pt")
            except RuntimeError as error:
                raise Wrong(f"a file whose {like} is refused") from error
            for key, value in net.state_dict().items():
                mistakes = {"is left as it was": torch.zeros_like(value)}
                expect(f"if {like}, {key}", model.state_dict()[key], value, mistakes)
            if next(model.parameters()) is not weight:
                raise Wrong("the model's parameters are new ones, which its optimizer lacks")
        odd = [("missing", _net("fc")), ("left over", _net("fc", "b", "c"))]
        for (what, net), prefix in itertools.product(odd, ("", "module.")):
            state = {prefix + key: value for key, value in net.state_dict().items()}
            torch.save(state, f"{folder}/odd.pt")
            try:
                load_any_rung(_net("fc", "b"), f"{folder}/odd.pt")
            except (RuntimeError, KeyError, ValueError):
                continue
            raise Wrong(f"nothing is raised where a key is {what}")


@exercise(
    "14", minutes=15, hint="load_state_dict() goes by position: parameter i gets state[params[i]]."
)
def optimizer_state_for(optimizer_state_for) -> None:
    old, new = _net("a", "b", "c", "unused"), _net("b")
    old["norm"], new["norm"] = nn.BatchNorm1d(2), nn.BatchNorm1d(2)  # buffers have no state
    new.update(dict(_net("c", "unused", "a").named_children()))
    optimizer = torch.optim.Adam(old.parameters(), lr=0.125, betas=(0.5, 0.9))
    for i, (name, parameter) in enumerate(old.named_parameters()):
        parameter.grad = None if "unused" in name else torch.full_like(parameter, i + 1.0)
    optimizer.step()
    saved, names = optimizer.state_dict(), [name for name, _ in old.named_parameters()]
    before = repr((saved, names))
    loaded = torch.optim.Adam(new.parameters(), lr=1.0)
    loaded.load_state_dict(optimizer_state_for(new, saved, names))
    if repr((saved, names)) != before:
        raise Wrong("the saved state or the names that you were given are changed")
    for name, option in (("lr", 0.125), ("betas", (0.5, 0.9))):
        expect(f"the optimizer's {name}", loaded.param_groups[0][name], option)
    averages = {n: optimizer.state[p].get("exp_avg") for n, p in old.named_parameters()}
    for name, parameter in new.named_parameters():
        found = loaded.state.get(parameter, {}).get("exp_avg")
        others = {f"is that of {n}": v for n, v in averages.items() if v is not None}
        expect(f"the momentum of {name}", found, averages[name], others)
    some = {name for name, p in new.named_parameters() if loaded.state.get(p)}
    none = {name for name in names if "unused" in name}
    expect("the parameters without a state", {*names} - some, none)
    try:
        optimizer_state_for(_net("a", "new"), saved, names)
    except (KeyError, ValueError):
        return
    raise Wrong("nothing is raised for a parameter that the saved names lack")


class _Bomb:
    """Ends the saving in the middle: with an error, or with the process."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def __reduce__(self):
        if self.kills:
            os._exit(9)
        raise ZeroDivisionError


@exercise("15", minutes=10, hint="Write beside it; os.fsync; os.replace; after an error, tidy up.")
def save_safely(save_safely) -> None:
    synced, moved, fsync = [], [], os.fsync

    def note_sync(fd):
        fsync(fd)
        about = os.stat(fd)
        synced.append(about.st_size * stat.S_ISREG(about.st_mode))

    def note(event, args):
        if event == "os.rename":  # os.replace is one, too
            source, target = (Path(os.fsdecode(path)) for path in args[:2])
            on_disk = [size >= source.stat().st_size for size in synced]
            moved.append((source.resolve().parent, target.exists(), on_disk))

    os.fsync = note_sync
    sys.addaudithook(note)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        for value, given in ((1, str(path)), (2, path)):  # the second time a file is there
            save_safely({"value": torch.tensor(value)}, given)
            expect("what was saved", torch.load(path)["value"], torch.tensor(value))
        if len(moved) < 2:
            raise Wrong("the old file is overwritten where it lies: half-written, it is lost")
        if any(parent != path.resolve().parent for parent, *_ in moved):
            raise Wrong("the temporary file lies in another folder, perhaps on another disk")
        if not moved[0][2]:
            raise Wrong("the new file takes the old one's place before it is on the disk")
        if not any(moved[0][2]):
            raise Wrong("os.fsync comes before all bytes have left Python: flush or close first")
        if not os.fork():
            save_safely({"value": torch.ones(9), "bomb": _Bomb(kills=True)}, path)
        os.wait()
        _still_there(path, "a process was killed while it saved")
        if not moved[-1][1]:
            raise Wrong("the old file is gone already when the new one gets its name")
        [left.unlink() for left in path.parent.iterdir() if left != path]
        try:
            save_safely({"value": torch.ones(9), "bomb": _Bomb(kills=False)}, path)
        except ZeroDivisionError:
            _still_there(path, "saving failed")
            expect("the folder after an error", os.listdir(folder), ["last.pt"])
        else:
            raise Wrong("an error while saving does not reach the caller")
        Path(folder, "a_folder", "inside").mkdir(parents=True)
        try:
            save_safely({"value": torch.ones(9)}, Path(folder, "a_folder"))
        except OSError:
            left = sorted(os.listdir(folder))
            expect("where the last step fails, the folder", left, ["a_folder", "last.pt"])
            return
        raise Wrong("an error of the last step, the rename, does not reach the caller")


def _still_there(path: Path, when: str) -> None:
    try:
        expect("the old file", torch.load(path)["value"], torch.tensor(2))
    except Exception as error:
        raise Wrong(f"the old file is lost or damaged after {when}") from error


@exercise(
    "15", minutes=10, hint="zipfile.ZipFile(path).testzip() names a damaged entry; or it raises."
)
def newest_whole(newest_whole) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expect("for an empty folder, what is returned", newest_whole(folder), None)
        for step in (8, 9, 10, 100, 101, 102, 103):
            torch.save({"weights": torch.full((100,), float(step))}, f"{folder}/step_{step}.pt")
        for other in ("best.pt", "step_last.pt", "step_104.pt.tmp", "old_step_105.pt"):
            torch.save({}, f"{folder}/{other}")
        whole = Path(folder, "step_100.pt")
        data = {s: bytearray(whole.with_name(f"step_{s}.pt").read_bytes()) for s in range(100, 104)}
        data[100][data[100].index(torch.tensor(100.0).numpy().tobytes() * 9)] ^= 1
        data[103][data[103].rindex(b"PK\x01\x02") + 46] ^= 255  # of a name in the zip's directory
        data |= {101: data[101][: len(data[101]) // 2], 102: b""}
        for step, now in data.items():
            whole.with_name(f"step_{step}.pt").write_bytes(now)
        os.utime(f"{folder}/step_8.pt", (2e9, 2e9))  # as if copied later
        files = {*os.listdir(folder)}
        found = newest_whole(folder)
        expect("the list of files that are new or gone", sorted({*os.listdir(folder)} ^ files), [])
        if found and not Path(str(found)).exists():
            raise Wrong(f"{found!r} is no path to a file")
        why = {8: "which was written last", 9: "which comes before step 10"}
        why |= {100: "which has a changed byte", 101: "which is cut off", 102: "which is empty"}
        why[103] = "whose list of contents is damaged"
        taken = {f"is step_{n}.pt, {reason}": f"step_{n}.pt" for n, reason in why.items()}
        expect("the file", found and Path(found).name, "step_10.pt", taken)
        for name in ("step_8.pt", "step_9.pt", "step_10.pt"):
            Path(folder, name).unlink()
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


@exercise(
    "15", minutes=15, hint="What does the next step read? Is it a copy, or does it change later on?"
)
def pack_and_unpack(pack, unpack) -> None:
    run, file = _Run(0), io.BytesIO()
    run.go_on(5)
    packed = pack(run)
    state, order = copy.deepcopy(run.optimizer.state_dict()), list(run.order)
    weights, numbers = copy.deepcopy(run.model.state_dict()), torch.get_rng_state()
    losses = run.go_on(9)
    torch.save(packed, file)  # later, in a thread say
    file.seek(0)
    if needs := get_unsafe_globals_in_checkpoint(file):
        raise Wrong(f"torch.load refuses what is packed: it needs {needs[0].rpartition('.')[2]}")
    file.seek(0)
    again = _Run(1)
    unpack(again, torch.load(file))
    if not all(torch.equal(weights[key], value) for key, value in again.model.state_dict().items()):
        late = torch.equal(run.model.state_dict()["0.weight"], again.model.state_dict()["0.weight"])
        raise Wrong("the weights are " + ("those of a later step" if late else "not those packed"))
    expect("how many steps are done", again.done, 5)
    expect("the order of this epoch", again.order, order, {"is empty": []})
    found = again.optimizer.state_dict()
    if not found["state"]:
        raise Wrong("the optimizer has no momentum")
    for i, saved in state["state"].items():
        if not torch.equal(found["state"][i]["momentum_buffer"], saved["momentum_buffer"]):
            raise Wrong("the optimizer's momentum is not that of the packed run")
    expect("the learning rate", found["param_groups"][0]["lr"], state["param_groups"][0]["lr"])
    expect("the schedule's count", again.schedule.last_epoch, 5, {"begins again": 0})
    if not torch.equal(torch.get_rng_state(), numbers):
        raise Wrong("the random numbers (dropout, the next epoch's order) are others")
    expect("the next losses", again.go_on(9), losses)


@on_ranks(
    "15", minutes=15, hint="The handler only notes it. After each step, all_reduce it with MAX."
)
def train_until_told(train_until_told) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for told, at in ((ranks - 1, 3), (0, 0), (1, 5), (None, 9)):
        done, usual = [], signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def step(i, told=told, at=at, done=done):
            if rank == told and i == at:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(torch.ones(1))
            done.append(i)

        found = train_until_told(step, 6)
        right = min(at + 1, 6)
        if at < 5 and len(done) == 6:
            raise Wrong(f"rank {told} was told to stop in step {at}, and all steps were done")
        expect("how many steps were done", len(done), right)
        expect("what is returned", found, right, {f"is the last step, {at}: count it": at})
        if signal.signal(signal.SIGTERM, usual) is not signal.SIG_IGN:
            raise Wrong("the handler that was set before is not set again at the end")
