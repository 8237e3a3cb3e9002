"""Answers to the exercises of the cases in `resuming`; each says how it is judged."""

import copy
import io
import os
import shutil
import signal
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist

from torchclinic.writing import atomic_file


class load_any_rung:
    def replaced(model, path):
        """a file whose keys are like 'module.a.fc.weight' is refused"""
        state = torch.load(path)
        names = ("module.", "_orig_mod.")
        for name in names:
            state = {key.replace(name, ""): value for key, value in state.items()}
        model.load_state_dict(state)

    def not_strict(model, path):
        """if keys are like 'module.a.fc.weight', a.fc.weight is left as it was"""
        model.load_state_dict(torch.load(path), strict=False)

    def one_prefix(model, path):
        """a file whose keys are like '_orig_mod.module.a.fc.weight' is refused"""
        state = torch.load(path)
        model.load_state_dict({key.removeprefix("module."): v for key, v in state.items()})

    def by_position(model, path):
        """in another order, is refused"""
        own = model.state_dict()
        model.load_state_dict(dict(zip(own, torch.load(path).values(), strict=False)), strict=False)

    def swallowed(model, path):
        """nothing is raised where a key is missing"""
        state = {}
        for key, value in torch.load(path).items():
            parts = key.split(".")
            own = model.state_dict()
            while ".".join(parts) not in own and {"module", "_orig_mod"} & set(parts):
                parts.remove("_orig_mod" if "_orig_mod" in parts else "module")
            state[".".join(parts)] = value
        model.load_state_dict(state, strict=False)

    def by_suffix(model, path):
        """right"""
        state, own = torch.load(path), model.state_dict()

        def bare(key):
            return [part for part in key.split(".") if part not in ("module", "_orig_mod")]

        exact = {key: key for key in state if key in own}
        others = {key: k for key in state.keys() - exact for k in own if bare(key) == bare(k)}
        loaded = {(exact | others)[key]: value for key, value in state.items()}
        model.load_state_dict(loaded)


class optimizer_state_for:
    def buffers_too(model, saved, names):
        """the momentum of c.weight is"""
        places = [*model.state_dict()]
        state = {places.index(names[i]): of_one for i, of_one in saved["state"].items()}
        return {"state": state, "param_groups": saved["param_groups"]}

    def by_position(model, saved, names):
        """the momentum of b.weight is that of a.weight"""
        return saved

    def keys_and_places(model, saved, names):
        """the momentum of"""
        places = [names.index(name) for name, _ in model.named_parameters()]
        state = {i: saved["state"][p] for i, p in enumerate(places) if p in saved["state"]}
        groups = [saved["param_groups"][0] | {"params": places}]
        return {"state": state, "param_groups": groups}

    def new_group(model, saved, names):
        """the optimizer's lr is 1"""
        places = [names.index(name) for name, _ in model.named_parameters()]
        state = {i: saved["state"][p] for i, p in enumerate(places) if p in saved["state"]}
        groups = torch.optim.Adam(model.parameters(), lr=1.0).state_dict()["param_groups"]
        return {"state": state, "param_groups": groups}

    def in_place(model, saved, names):
        """the saved state or the names that you were given are changed"""
        old = dict(saved["state"])
        saved["state"].clear()
        for i, (name, _) in enumerate(model.named_parameters()):
            if names.index(name) in old:
                saved["state"][i] = old[names.index(name)]
        return saved

    def known_only(model, saved, names):
        """nothing is raised for a parameter that the saved names lack"""
        own = [name for name, _ in model.named_parameters()]
        places = [names.index(name) if name in names else 99 for name in own]
        groups = [saved["param_groups"][0] | {"params": places}]
        return {"state": saved["state"], "param_groups": groups}

    def inverse(model, saved, names):
        """the momentum of b.weight is None"""
        own = [name for name, _ in model.named_parameters()]
        places = {own.index(name): i for i, name in enumerate(names) if own.index(name) < 6}
        return {**saved, "state": {i: saved["state"][place] for place, i in places.items()}}

    def other_places(model, saved, names):
        """right"""
        places = [names.index(name) for name, _ in model.named_parameters()]
        return {**saved, "param_groups": [{**saved["param_groups"][0], "params": places}]}


class save_safely:
    def left_behind(thing, path):
        """where the last step fails, the folder is ['a_folder', 'a_folder.tmp', 'last.pt']"""
        try:
            with open(f"{path}.tmp", "wb") as file:
                torch.save(thing, file)
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(f"{path}.tmp")
            raise
        os.replace(f"{path}.tmp", path)

    def not_flushed(thing, path):
        """os.fsync comes before all bytes have left Python"""
        beside = f"{path}.tmp"
        try:
            torch.save(thing, data := io.BytesIO())
            with open(beside, "wb", buffering=2**20) as file:
                file.write(data.getvalue())
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise

    def plain(thing, path):
        """the old file is overwritten where it lies: half-written, it is lost"""
        torch.save(thing, path)

    def not_on_the_disk(thing, path):
        """the new file takes the old one's place before it is on the disk"""
        temporary = f"{path}.tmp"
        torch.save(thing, temporary)
        os.replace(temporary, path)

    def elsewhere(thing, path):
        """the temporary file lies in another folder, perhaps on another disk"""
        with tempfile.NamedTemporaryFile(delete=False) as file:
            torch.save(thing, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.move(file.name, path)

    def left_over(thing, path):
        """the folder after an error"""
        with open(f"{path}.tmp", "wb") as file:
            torch.save(thing, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)

    def silent(thing, path):
        """an error while saving does not reach the caller"""
        try:
            with atomic_file(path) as temporary:
                torch.save(thing, temporary)
        except Exception:
            print("not saved")

    def a_backup(thing, path):
        """the old file is lost or damaged after a process was killed while it saved"""
        if os.path.exists(path):
            os.rename(path, f"{path}.old")
        with open(path, "wb") as file:
            torch.save(thing, file)
            os.fsync(file.fileno())
        os.rename(path, f"{path}.new")
        os.rename(f"{path}.new", path)

    def unlinked(thing, path):
        """the old file is gone already when the new one gets its name"""
        with atomic_file(f"{path}.new") as temporary:
            torch.save(thing, temporary)
        Path(path).unlink(missing_ok=True)
        os.rename(f"{path}.new", path)

    def by_keywords(thing, path):
        """right"""
        temporary = os.fsencode(f"{path}.new")
        try:
            with open(temporary, "wb") as file:
                torch.save(thing, file)
                os.fsync(fd=file.fileno())
            os.replace(src=temporary, dst=path)
        finally:
            Path(f"{path}.new").unlink(missing_ok=True)

    def atomic(thing, path):
        """right"""
        with atomic_file(path) as temporary:
            torch.save(thing, temporary)


def _steps(folder, key):
    return sorted(Path(folder).glob("step_[0-9]*.pt"), key=key, reverse=True)


def _number(path):
    return int(path.stem.removeprefix("step_"))


def _newest(folder, key=_number):
    def whole(path):
        try:
            return zipfile.ZipFile(path).testzip() is None
        except Exception:
            return False

    return max(filter(whole, _steps(folder, str)), key=key, default=None)


class newest_whole:
    def by_name(folder):
        """the file is step_9.pt, which comes before step 10"""
        for path in _steps(folder, str):
            try:
                with zipfile.ZipFile(path) as file:
                    if file.testzip() is None:
                        return path
            except Exception:
                pass

    def one_kind_of_error(folder):
        """UnicodeDecodeError"""
        for path in _steps(folder, _number):
            if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip() is None:
                return path

    def other_names(folder):
        """ValueError"""
        return max(
            Path(folder).glob("step_*.pt"), key=lambda path: int(path.stem[5:]), default=None
        )

    def loadable(folder):
        """the file is step_100.pt, which has a changed byte"""
        for path in _steps(folder, _number):
            try:
                torch.load(path)
                return path
            except Exception:
                pass

    def newest(folder):
        """the file is step_103.pt, whose list of contents is damaged"""
        return next(iter(_steps(folder, _number)), None)

    def not_empty(folder):
        """the file is step_101.pt, which is cut off"""
        for path in _steps(folder, _number)[1:]:
            if path.stat().st_size:
                return path

    def raises(folder):
        """IndexError"""
        return _steps(folder, _number)[0]

    def by_time(folder):
        """the file is step_8.pt, which was written last"""
        return _newest(folder, lambda path: path.stat().st_mtime)

    def name(folder):
        """'step_10.pt' is no path to a file"""
        return getattr(_newest(folder), "name", None)

    def tidies_up(folder):
        """the list of files that are new or gone is ['step_100.pt', 'step_101.pt'"""
        found = _newest(folder)
        for path in _steps(folder, _number):
            if found is not None and _number(path) > _number(found):
                path.unlink()
        return found

    def by_checksum(folder):
        """right"""
        return _newest(folder)


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
        """the optimizer has no momentum"""
        return _packing(optimizer=0)

    def no_numbers():
        """the random numbers (dropout, the next epoch's order) are others"""
        return _packing(numbers=0)

    def no_schedule():
        """the schedule's count begins again"""
        return _packing(schedule=0)

    def no_order():
        """the order of this epoch is empty"""
        return _packing(order=0)

    def from_the_start():
        """how many steps are done is 0, not 5"""
        return _packing(done=0)

    def no_copies():
        """the weights are those of a later step"""

        def pack(run):
            return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}

        return pack, _packing()[1]

    def the_run():
        """torch.load refuses what is packed: it needs"""
        return copy.deepcopy, lambda run, packed: vars(run).update(vars(packed))

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


def _any_rank(told):
    flag = torch.tensor(float(bool(told)))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag.item() > 0


class train_until_told:
    def ignores(step, steps):
        """was told to stop in step 3, and all steps were done"""
        for i in range(steps):
            step(i)
        return steps

    def alone(step, steps):
        """rank 0 of 2: rank 1 was told to stop in step 3, and all steps were done"""
        return _told(bool)(step, steps)

    def rank_0_decides(step, steps):
        """was told to stop in step 3, and all steps were done"""

        def heard(told):
            flag = torch.tensor(float(bool(told)))
            dist.broadcast(flag, 0)
            return flag.item() > 0

        return _told(heard)(step, steps)

    def every_rank_must_hear(step, steps):
        """was told to stop in step 3, and all steps were done"""

        def heard(told):
            flag = torch.tensor(float(bool(told)))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            return flag.item() > 0

        return _told(heard)(step, steps)

    def the_index(step, steps):
        """what is returned is the last step, 3: count it"""
        return _told(_any_rank, minus=1)(step, steps)

    def keeps_its_handler(step, steps):
        """the handler that was set before is not set again at the end"""
        return _told(_any_rank, restore=False)(step, steps)

    def sets_the_default(step, steps):
        """the handler that was set before is not set again at the end"""
        done = _told(_any_rank)(step, steps)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return done

    def exits(step, steps):
        """SystemExit"""
        signal.signal(signal.SIGTERM, lambda *_: exit(1))
        for i in range(steps):
            step(i)

    def gathered(step, steps):
        """right"""

        def heard(told):
            all_told = [None] * dist.get_world_size()
            dist.all_gather_object(all_told, bool(told))
            return any(all_told)

        return _told(heard)(step, steps)
