"""Answers to the exercises of the cases in `on_disk`; each says how it is judged."""

import copy
import hashlib
import io
import re
import tempfile
from pathlib import Path

import numpy as np
import torch


class keep_rows:
    def plus_nothing(outputs, rows):
        """what is kept of row 0 is int64"""
        return [outputs.detach()[i] + 0 for i in rows]

    def views(outputs, rows):
        """a file of 2 rows holds 480 bytes of numbers, not 160: they are views of `outputs`"""
        return [outputs[i] for i in rows]

    def contiguous(outputs, rows):
        """not 160: they are views of `outputs`"""
        return [outputs[i].contiguous() for i in rows]

    def detached(outputs, rows):
        """not 160: they are views of `outputs`"""
        return [outputs[i][:].detach() for i in rows]

    def deep_copies(outputs, rows):
        """a file of 2 rows holds 960 bytes of numbers, not 160"""
        return [copy.deepcopy(outputs.detach()[i]) for i in rows]

    def one_clone(outputs, rows):
        """a file of 2 rows holds 480 bytes of numbers, not 160"""
        outputs = outputs.clone()
        return [outputs[i] for i in rows]

    def a_tensor(outputs, rows):
        """for 2 rows, what is returned is tensor("""
        return outputs[rows]

    def by_numpy(outputs, rows):
        """Can't call numpy() on Tensor that requires grad"""
        return [torch.from_numpy(outputs[i].numpy().copy()) for i in rows]

    def by_numpy_detached(outputs, rows):
        """Got unsupported ScalarType BFloat16"""
        return [torch.from_numpy(outputs[i].detach().numpy().copy()) for i in rows]

    def by_lists(outputs, rows):
        """what is kept of row 3 is float32 [10] on cpu 30 31 32 33 34"""
        return [torch.tensor(outputs[i].tolist()) for i in rows]

    def selected(outputs, rows):
        """right"""
        return list(outputs.detach().index_select(0, torch.tensor(rows)))

    def through_a_file(outputs, rows):
        """right"""
        file = io.BytesIO()
        torch.save([torch.empty_like(outputs[i]).copy_(outputs[i]).detach() for i in rows], file)
        file.seek(0)
        return torch.load(file)


def nested(value, change):
    if isinstance(value, dict):
        return {key: nested(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(nested(item, change) for item in value)
    return change(value)


class plain:
    def first_level(value):
        """a PosixPath in a dict in a list is refused: the file needs pathlib"""
        items = value.items() if isinstance(value, dict) else [("", value)]
        found = {key: str(v) if isinstance(v, Path) else v for key, v in items}
        return found if isinstance(value, dict) else found[""]

    def exact_types(value):
        """a PosixPath is refused: the file needs pathlib"""
        return nested(value, lambda x: str(x) if type(x) is Path else x)

    def floats_first(value):
        """a float64 is refused: the file needs numpy"""

        def change(x):
            if x is None or isinstance(x, (float, int, str, torch.Tensor)):
                return x
            return x.item() if isinstance(x, np.generic) else str(x)

        return nested(value, change)

    def generators(value):
        """a PosixPath in a tuple cannot be saved: cannot pickle 'generator' object"""
        if isinstance(value, dict):
            return {key: plain.generators(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain.generators(item) for item in value]
        if isinstance(value, tuple):
            return (plain.generators(item) for item in value)
        return str(value) if isinstance(value, Path) else value

    def without_bools(value):
        """a bool is refused: the file needs numpy"""

        def change(x):
            if isinstance(x, np.floating):
                return float(x)
            return int(x) if isinstance(x, np.integer) else str(x) if isinstance(x, Path) else x

        return nested(value, change)

    def all_floats(value):
        """a int64 becomes 4.0, not 4"""

        def change(x):
            return str(x) if isinstance(x, Path) else float(x) if isinstance(x, np.generic) else x

        return nested(value, change)

    def with_tolist(value):
        """a ndarray becomes [0.0, 0.5, 1.0], not tensor"""

        def change(x):
            if isinstance(x, (Path, range)):
                return str(x) if isinstance(x, Path) else list(x)
            return x.tolist() if hasattr(x, "tolist") else x

        return nested(value, change)

    def as_tensors(value):
        """a float32 becomes tensor(0.5000), not 0.5"""

        def change(x):
            if isinstance(x, (np.generic, np.ndarray)):
                return torch.as_tensor(x)
            return str(x) if isinstance(x, Path) else x

        return nested(value, change)

    def default_dtype(value):
        """a ndarray becomes tensor([0.0000, 0.5000, 1.0000]), not tensor"""

        def change(x):
            if isinstance(x, (Path, range)):
                return str(x) if isinstance(x, Path) else list(x)
            x = torch.Tensor(x) if isinstance(x, np.ndarray) else x
            return x.item() if isinstance(x, np.generic) else x

        return nested(value, change)

    def in_place(value):
        """a PosixPath in a dict: the record that you were given is changed"""
        if isinstance(value, dict):
            for key in value:
                value[key] = plain.in_place(value[key])
        return str(value) if isinstance(value, Path) else value

    def tuples_as_lists(value):
        """a PosixPath in a tuple becomes [1, 'a/b'], not (1, 'a/b')"""
        if isinstance(value, tuple):
            return [plain.tuples_as_lists(item) for item in value]
        if isinstance(value, dict):
            return {key: plain.tuples_as_lists(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain.tuples_as_lists(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    def nothing_else(value):
        """a PosixPath in a tuple becomes (None, 'a/b'), not (1, 'a/b')"""
        return nested(value, lambda x: str(x) if isinstance(x, Path) else None)

    def by_table(value):
        """right"""
        change = {dict: lambda d: dict(zip(d, map(plain.by_table, d.values()), strict=True))}
        for kind in (list, tuple):
            change[kind] = lambda items, kind=kind: kind(map(plain.by_table, items))
        change |= {range: list, np.ndarray: torch.tensor, np.generic: lambda x: x.tolist()}
        change |= {Path: lambda path: path.as_posix()}
        kinds = [kind for kind in change if isinstance(value, kind)]
        return change[kinds[0]](value) if kinds else value


def hex_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def save(thing, path):
    torch.save(thing, path)
    Path(path + ".sha256").write_text(hex_of(path))


def load(path):
    if hex_of(path) != Path(path + ".sha256").read_text():
        raise ValueError(f"{path} has changed")
    return torch.load(path)


class save_checked:
    def of_the_thing():
        """no file `path + '.sha256'` holds the file's SHA-256 in hex"""

        def save_checked(thing, path):
            torch.save(thing, path)
            Path(path + ".sha256").write_text(hashlib.sha256(repr(thing).encode()).hexdigest())

        return save_checked, load

    def before_it_is_saved():
        """no file `path + '.sha256'` holds the file's SHA-256 in hex"""

        def save_checked(thing, path):
            Path(path).touch()
            Path(path + ".sha256").write_text(hex_of(path))
            torch.save(thing, path)

        return save_checked, load

    def other_name():
        """no file `path + '.sha256'` holds the file's SHA-256 in hex"""

        def save_checked(thing, path):
            torch.save(thing, path)
            Path(path).with_suffix(".sha256").write_text(hex_of(path))

        return save_checked, load

    def loaded_first():
        """thing = torch.load(path)"""

        def load_checked(path):
            thing = torch.load(path)
            if hex_of(path) != Path(path + ".sha256").read_text():
                raise ValueError(f"{path} has changed")
            return thing

        return save, load_checked

    def no_name():
        """the error does not name the file: wrong checksum"""

        def load_checked(path):
            if hex_of(path) != Path(path + ".sha256").read_text():
                raise ValueError("wrong checksum")
            return torch.load(path)

        return save, load_checked

    def only_printed():
        """nothing is raised where byte 40,000 of"""

        def load_checked(path):
            if hex_of(path) != Path(path + ".sha256").read_text():
                print(f"{path} has changed")
            return torch.load(path)

        return save, load_checked

    def nothing_returned():
        """what is loaded is None"""

        def load_checked(path):
            load(path)

        return save, load_checked

    def asserted():
        """failed with AssertionError:"""

        def load_checked(path):
            assert hex_of(path) == Path(path + ".sha256").read_text(), f"{path} has changed"
            return torch.load(path)

        return save, load_checked

    def as_sha256sum_does():
        """right"""

        def save_checked(thing, path):
            file = io.BytesIO()
            torch.save(thing, file)
            Path(path).write_bytes(file.getvalue())
            digest = hashlib.sha256(file.getvalue()).hexdigest()
            Path(path + ".sha256").write_text(f"{digest}  {Path(path).name}\n")

        def load_checked(path):
            data = Path(path).read_bytes()
            if Path(path + ".sha256").read_text().split()[0] != hashlib.sha256(data).hexdigest():
                raise ValueError(f"{Path(path).name}: not the file that was saved")
            return torch.load(io.BytesIO(data))

        return save_checked, load_checked


class load_body:
    def shared(model, state):
        """of `state` changes when the model is trained: it is shared"""
        own = model.state_dict(keep_vars=True)
        fits = [key for key in own if key in state and state[key].shape == own[key].shape]
        if not fits:
            raise ValueError("nothing fits")
        for key in fits:
            own[key].data = state[key].to(own[key].dtype)
        return sorted({*own} - {*fits})

    @torch.no_grad()
    def spread(model, state):
        """body.0.bias, afterwards, is float32"""
        left = []
        for name, own in model.state_dict().items():
            try:
                own.copy_(state[name])
            except (KeyError, RuntimeError):
                left.append(name)
        return left

    def not_strict(model, state):
        """size mismatch for head.weight"""
        keys = model.load_state_dict(state, strict=False)
        if len(keys.missing_keys) == len(model.state_dict()):
            raise ValueError("no entry fits")
        return sorted(keys.missing_keys)

    def by_position(model, state):
        """body.0.weight, afterwards, is left as it was"""
        own = model.state_dict()
        pairs = zip(own.items(), state.values(), strict=False)
        fitting = {key: new for (key, old), new in pairs if old.shape == new.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - fitting.keys())

    def by_count(model, state):
        """size mismatch for head.weight"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].numel() == v.numel()}
        if not fitting:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def parameters_alone(model, state):
        """body.1.running_mean, afterwards, is left as it was"""
        own = dict(model.named_parameters())
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - fitting.keys())

    def unexpected(model, state):
        """what is returned is what only the state has"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(set(state) - set(own))

    def both_lists(model, state):
        """what is returned also has what only the state has"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted((state.keys() | own.keys()) - fitting.keys())

    def missing_names(model, state):
        """what is returned lacks entries whose shape is another"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        model.load_state_dict(fitting, strict=False)
        return sorted(own.keys() - state.keys())

    def never_raises(model, state):
        """nothing is raised where no entry fits"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def names_the_first(model, state):
        """StopIteration"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError(f"no entry fits; the first of them is {next(iter(state))}")
        return sorted(model.load_state_dict(fitting, strict=False).missing_keys)

    def deleted(model, state):
        """the list of keys of `state`, afterwards, is"""
        own = model.state_dict()
        for key in list(state):
            if key not in own or own[key].shape != state[key].shape:
                del state[key]
        if not state:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(state, strict=False).missing_keys)

    def assigned(model, state):
        """body.0.weight, afterwards, is float64"""
        own = model.state_dict()
        fitting = {k: v for k, v in state.items() if k in own and own[k].shape == v.shape}
        if not fitting:
            raise ValueError("no entry fits")
        return sorted(model.load_state_dict(fitting, strict=False, assign=True).missing_keys)

    def copied(model, state):
        """right"""
        left = []
        for key, own in model.state_dict().items():
            if key in state and state[key].size() == own.size():
                own.copy_(state[key])
            else:
                left.append(key)
        if len(left) == len(model.state_dict()):
            raise ValueError(f"none of {left} fits")
        return sorted(left)


class renamed:
    def as_a_pattern(state, names):
        """the new name of 'axb.w' is 'z.w', not 'axb.w'"""
        found = {}
        for key, value in state.items():
            for old in sorted(names, key=len, reverse=True):
                if fits := re.match(rf"{old}(?=[.]|$)", key):
                    key = (names[old] + key[fits.end() :]).removeprefix(".")
                    break
            if key in found:
                raise ValueError(f"two entries are called {key}")
            found[key] = value
        return found

    def everywhere(state, names):
        """the new name of '10.w' is '1hidden.w', not '10.w'"""
        found = {}
        for key, value in state.items():
            for old, new in names.items():
                key = key.replace(old + ".", new + "." if new else "")
            found[key] = value
        return found

    def without_the_dot(state, names):
        """the new name of '10.w' is 'output0.w', not '10.w'"""
        found = {}
        for key, value in state.items():
            starts = [old for old in sorted(names, key=len) if key.startswith(old)]
            found[names[starts[-1]] + key[len(starts[-1]) :] if starts else key] = value
        return found

    def stripped_letters(state, names):
        """the new name of 'module.odd.w' is"""
        found = {}
        for key, value in state.items():
            for old, new in names.items():
                if key == old or key.startswith(old + "."):
                    key = new + "." + key[len(old) + 1 :] if new else key.lstrip(old + ".")
                    key = key.removesuffix(".")
                    break
            found[key] = value
        return found

    def one_after_another(state, names):
        """with {'0': '1', '1': '2', '2': '0'}, the new name of '0.w' is missing"""
        for old, new in names.items():
            found = {}
            for key, value in state.items():
                if key == old or key.startswith(old + "."):
                    key = (new + key[len(old) :]).removeprefix(".")
                found[key] = value
            state = found
        return found

    def first_that_fits(state, names):
        """the new name of 'a.b.w' is 'z.b.w', not 'first.w'"""
        found = {}
        for key, value in state.items():
            for old, new in names.items():
                if key == old or key.startswith(old + "."):
                    key = (new + key[len(old) :]).removeprefix(".")
                    break
            found[key] = value
        return found

    def first_part(state, names):
        """the new name of 'a.b.w' is 'z.b.w', not 'first.w'"""
        found = {}
        for key, value in state.items():
            first, dot, rest = key.partition(".")
            new = names.get(first, first)
            found[new + dot + rest if new else rest] = value
        return found

    def dot_at_the_front(state, names):
        """the new name of 'module.odd.w' is '.odd.w', not 'odd.w'"""
        found = {}
        for key, value in state.items():
            olds = [old for old in names if key == old or key.startswith(old + ".")]
            old = max(olds, key=len, default=None)
            found[key if old is None else names[old] + key[len(old) :]] = value
        return found

    def popped(state, names):
        """the state that you were given is changed"""
        for key in list(state):
            for old, new in names.items():
                if key == old or key.startswith(old + "."):
                    state[new + key[len(old) :]] = state.pop(key)
                    break
        return state

    def one_lost(state, names):
        """nothing is raised where two keys get one name"""
        found = {}
        for key, value in state.items():
            for old in sorted(names, key=len, reverse=True):
                if f"{key}.".startswith(old + "."):
                    key = (names[old] + key[len(old) :]).removeprefix(".")
                    break
            found[key] = value
        return found

    def part_by_part(state, names):
        """right"""
        found = {}
        for key, value in state.items():
            parts = key.split(".")
            for n in range(len(parts), 0, -1):
                if (old := ".".join(parts[:n])) in names:
                    parts[:n] = [names[old]]
                    break
            if (new := ".".join(filter(None, parts))) in found:
                raise ValueError(f"two entries are called {new}")
            found[new] = value
        return found


class keep_best:
    def aliased(model, losses, patience):
        """of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, model.state_dict()
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def shallow(model, losses, patience):
        """of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, model.state_dict().copy()
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def never_loaded(model, losses, patience):
        """weight of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad = loss, 0
            if bad == patience:
                break
        return best

    def parameters_alone(model, losses, patience):
        """running_mean of the best weights is that of the last step"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, kept = loss, 0, [p.detach().clone() for p in model.parameters()]
            if bad == patience:
                break
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        return best

    def nan_is_better(model, losses, patience):
        """of the losses [3.0, nan, 2.0, nan, nan, 1.0] with patience 2, the number that it takes"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if not loss >= best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def equal_is_better(model, losses, patience):
        """the number that it takes is 5, not 4"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss <= best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def one_too_many(model, losses, patience):
        """the number that it takes is 8, not 7"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad > patience:
                break
        model.load_state_dict(state)
        return best

    def patience_in_all(model, losses, patience):
        """the number that it takes is 6, not 7"""
        best, bad = float("inf"), 0
        for loss in losses:
            if loss < best:
                best, state = loss, copy.deepcopy(model.state_dict())
            else:
                bad += 1  # and never back to 0
            if bad == patience:
                break
        model.load_state_dict(state)
        return best

    def last_loss(model, losses, patience):
        """what is returned is the last"""
        best, bad = float("inf"), 0
        for loss in losses:
            bad += 1
            if loss < best:
                best, bad, state = loss, 0, copy.deepcopy(model.state_dict())
            if bad == patience:
                break
        model.load_state_dict(state)
        return loss

    def all_at_once(model, losses, patience):
        """the number that it takes is 8, not 7"""
        states = [(loss, copy.deepcopy(model.state_dict())) for loss in losses]
        best, state = min(states, key=lambda pair: pair[0])
        model.load_state_dict(state)
        return best

    def in_a_file(model, losses, patience):
        """right"""
        best, since = float("inf"), 0
        with tempfile.TemporaryDirectory() as folder:
            while since < patience and (loss := next(losses, None)) is not None:
                since += 1
                if loss < best:
                    best, since = loss, 0
                    torch.save(model.state_dict(), f"{folder}/best.pt")
            model.load_state_dict(torch.load(f"{folder}/best.pt"))
        return best
