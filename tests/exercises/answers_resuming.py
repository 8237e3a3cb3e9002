"""Answers to the exercises of the cases in `resuming`; each says how it is judged."""

import copy
import signal
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist


class load_any_rung:
    def without_map_location(model, path):
        """Attempting to deserialize object on"""
        load_any_rung.by_suffix(model, path, map_location=None)

    def replaced(model, path):
        """The case was: a file with keys like '"""
        state = torch.load(path)
        for name in ("module.", "_orig_mod."):
            state = {key.replace(name, ""): value for key, value in state.items()}
        model.load_state_dict(state)

    def not_strict(model, path):
        """after a file with keys like 'module.a.fc.weight', a.fc.weight is left as it was"""
        model.load_state_dict(torch.load(path), strict=False)

    def by_suffix(model, path, map_location="cpu"):
        """right"""
        state, own = torch.load(path, map_location=map_location), model.state_dict()

        def bare(key):
            return [part for part in key.split(".") if part not in ("module", "_orig_mod")]

        exact = {key: key for key in state if key in own}
        others = {key: k for key in state.keys() - exact for k in own if bare(key) == bare(k)}
        loaded = {(exact | others)[key]: value for key, value in state.items()}
        model.load_state_dict(loaded)


class optimizer_state_for:
    def by_position(model, saved, names):
        """the momentum of b.weight is that of a.weight"""
        return saved

    def new_group(model, saved, names):
        """the optimizer's lr is 1"""
        places = [names.index(name) for name, _ in model.named_parameters()]
        state = {i: saved["state"][p] for i, p in enumerate(places) if p in saved["state"]}
        groups = torch.optim.Adam(model.parameters(), lr=1.0).state_dict()["param_groups"]
        return {"state": state, "param_groups": groups}

    def in_place(model, saved, names):
        """`saved`, which was given, afterwards is"""
        old = dict(saved["state"])
        saved["state"].clear()
        for i, (name, _) in enumerate(model.named_parameters()):
            if names.index(name) in old:
                saved["state"][i] = old[names.index(name)]
        return saved

    def other_places(model, saved, names):
        """right"""
        places = [names.index(name) for name, _ in model.named_parameters()]
        return {**saved, "param_groups": [{**saved["param_groups"][0], "params": places}]}


def _steps(folder, key):
    return sorted(Path(folder).glob("step_[0-9]*.pt"), key=key, reverse=True)


def _number(path):
    return int(path.stem.removeprefix("step_"))


class newest_whole:
    def by_name(folder):
        """the file is step_999.pt, which comes before step 1000"""
        for path in _steps(folder, str):
            try:
                with zipfile.ZipFile(path) as file:
                    if file.testzip() is None:
                        return path
            except Exception:
                pass

    def loadable(folder):
        """the file is step_10100.pt, which has a changed byte"""
        for path in _steps(folder, _number):
            try:
                torch.load(path)
                return path
            except Exception:
                pass

    def newest(folder):
        """the file is step_10102.pt, which is empty"""
        return next(iter(_steps(folder, _number)), None)

    def by_checksum(folder):
        """right"""

        def whole(path):
            try:
                return zipfile.ZipFile(path).testzip() is None
            except Exception:
                return False

        return next(filter(whole, _steps(folder, _number)), None)


def _packing(**without):
    def pack(run):
        parts = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "schedule": run.schedule.state_dict(),
            "numbers": torch.get_rng_state(),
            "order": run.order,
            "done": run.done,
        }
        return copy.deepcopy(parts)

    def unpack(run, parts):
        parts = {key: value for key, value in parts.items() if key not in without}
        run.model.load_state_dict(parts.get("model", run.model.state_dict()))
        run.optimizer.load_state_dict(parts.get("optimizer", run.optimizer.state_dict()))
        run.schedule.load_state_dict(parts.get("schedule", {}))
        run.order, run.done = parts.get("order", []), parts.get("done", 0)
        torch.set_rng_state(parts.get("numbers", torch.get_rng_state()))

    return pack, unpack


class pack_and_unpack:
    def no_momentum():
        """the optimizer's momentum is not there"""
        return _packing(optimizer=0)

    def no_numbers():
        """the random numbers (dropout, the next epoch's order) are others"""
        return _packing(numbers=0)

    def no_copies():
        """the weights are those of a later step"""

        def pack(run):
            return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}

        return pack, _packing()[1]

    def as_bytes():
        """right"""
        return _packing()


def _told(stops, restore=True, minus=0):
    def train(step, steps):
        told = []
        usual = signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        try:
            for i in range(steps):
                step(i)
                if stops(told):
                    return i + 1 - minus
            return steps
        finally:
            if restore:
                signal.signal(signal.SIGTERM, usual)

    return train


def _any_rank(told, device="cpu", how=dist.ReduceOp.MAX):
    flag = torch.tensor(float(bool(told)), device=device)
    dist.all_reduce(flag, how)
    return flag.item()


def _gathered(told):
    all_told = [None] * dist.get_world_size()
    dist.all_gather_object(all_told, bool(told))
    return any(all_told)


class train_until_told:
    def from_the_cpu(step, steps, device):
        """dist.all_reduce gets a tensor on the CPU, and NCCL sends from GPUs alone"""
        return _told(_any_rank)(step, steps)

    def alone(step, steps, device):
        """rank 0 of 2: if ranks [1] are told in step 3, the number of steps done is 6, not 4"""
        return _told(bool)(step, steps)

    def the_index(step, steps, device):
        """what is returned is the last step, 3: count it"""
        return _told(_gathered, minus=1)(step, steps)

    def keeps_its_handler(step, steps, device):
        """the handler that was set before is not set again at the end"""
        return _told(_gathered, restore=False)(step, steps)

    def gathered(step, steps, device):
        """right"""
        return _told(_gathered)(step, steps)
