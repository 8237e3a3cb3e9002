"""The hidden cases of the exercises on files: chapters 01 and 02."""

import copy
import hashlib
import io
import itertools
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from torchexercises import Wrong, exercise, expect


@exercise("01", minutes=5, hint="row.untyped_storage().nbytes() says what a file of the row holds.")
def keep_rows(keep_rows) -> None:
    for dtype, rows in (
        (torch.float64, [3, 0]), (torch.bfloat16, [5]), (torch.int64, [1, 4, 2]),
        (torch.bool, [0, 0]),
    ):  # fmt: skip
        outputs = torch.arange(60.0).reshape(6, 10).to(dtype)
        if dtype is torch.int64:
            outputs = outputs.view(10, 6).T  # its rows are not contiguous
        outputs.requires_grad_(dtype.is_floating_point)
        before = outputs.detach().clone()
        kept = keep_rows(outputs, rows)
        if not isinstance(kept, list) or len(kept) != len(rows):
            raise Wrong(f"for {len(rows)} rows, what is returned is {kept!r:.40}")
        for i, row in zip(rows, kept, strict=True):
            expect(f"what is kept of row {i}", row, before[i])
        storages = {s.data_ptr(): s.nbytes() for s in (row.untyped_storage() for row in kept)}
        held, needed = sum(storages.values()), sum(row.nbytes for row in kept)
        if held > needed:
            said = f"a file of {len(rows)} rows holds {held} bytes of numbers, not {needed}"
            raise Wrong(said + ": they are views of `outputs`" * (outputs.data_ptr() in storages))
        expect("`outputs`, afterwards,", outputs.detach(), before)


@exercise("01", minutes=10, hint="Ask isinstance() of each kind, np.generic before float.")
def plain(plain) -> None:
    curve = np.linspace(0, 1, 3)
    pairs = [
        (Path("a/b"), "a/b"), (np.float32(0.5), 0.5), (np.float64(2), 2.0), (np.int64(4), 4),
        (np.bool_(True), True), (range(2, 6, 2), [2, 4]), (curve, torch.from_numpy(curve)),
        (np.array([1, 2], np.int16), torch.tensor([1, 2], dtype=torch.int16)), ("cat", "cat"),
        (torch.ones(2), torch.ones(2)), (None, None), (True, True), (0.25, 0.25),
        (np.array(3.0), torch.tensor(3.0, dtype=torch.float64)), (range(0), []), (b"cat", b"cat"),
        (np.complex64(2j), 2j), ([], []), ((), ()), ({}, {}), (7, 7),
    ]  # fmt: skip
    places = [("", lambda x: x), (" in a dict", lambda x: {"a": x})]
    places += [(" in a dict in a list", lambda x: [{"a": x}]), (" in a tuple", lambda x: (1, x))]
    places += [(" in a list of lists of a dict", lambda x: {3: [[x, x], x]})]
    for (value, right), (place, put) in itertools.product(pairs, places):
        given, what, file = put(value), f"a {type(value).__name__}{place}", io.BytesIO()
        before = repr(given)
        found = plain(given)
        if repr(given) != before:
            raise Wrong(f"{what}: the record that you were given is changed")
        try:
            torch.save(found, file)
        except (TypeError, AttributeError) as error:
            raise Wrong(f"{what} cannot be saved: {error}") from None
        if needs := get_unsafe_globals_in_checkpoint(io.BytesIO(file.getvalue())):
            raise Wrong(f"{what} is refused: the file needs {needs[0]}")
        if repr(found) != repr(put(right)):
            raise Wrong(f"{what} becomes {found!r}, not {put(right)!r}")


@exercise("01", minutes=10, hint="The checksum is of the file's bytes: compare, then load.")
def save_checked(save_checked, load_checked) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, beside = Path(folder, "run.pt"), Path(folder, "run.pt.sha256")
        for thing in ({"a": torch.zeros(2)}, {"b": torch.arange(9000)}):  # one over the other
            save_checked(thing, str(path))
            right = hashlib.sha256(path.read_bytes()).hexdigest()
            written = beside.read_bytes().lower().split() if beside.exists() else []
            if right.encode() not in written:
                raise Wrong("no file `path + '.sha256'` holds the file's SHA-256 in hex")
            expect("what is loaded", load_checked(str(path)), thing)
        save_checked([1], str(Path(folder, "other.pt")))
        expect("what is loaded, once another file is saved,", load_checked(str(path)), thing)
        data = path.read_bytes()
        damaged = {
            f"byte {i:,} of {len(data):,} has changed": (
                data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
            )
            for i in (40_000, 0, len(data) - 1)
        }
        damaged |= {"a byte was added": data + b"!", "the last byte is gone": data[:-1]}
        for what, now in damaged.items():
            path.write_bytes(now)
            try:
                load_checked(str(path))
            except ValueError as error:
                if "run.pt" in str(error):
                    continue
                raise Wrong(f"the error does not name the file: {error}") from None
            raise Wrong(f"nothing is raised where {what}")


@exercise("02", minutes=10, hint="Compare each entry's name and shape with model.state_dict().")
def load_body(load_body) -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net = nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)})
    own = copy.deepcopy(net.state_dict())
    turned = {"head.weight": torch.ones(4, 2), "head.bias": torch.ones(3)}
    turned["body.0.bias"] = torch.ones(1)  # a copy_ would spread it
    shorter = {"body.0.bias": None, "other.weight": torch.ones(2)}
    for changed, left, dtype in (
        ({}, [], torch.float64),
        (shorter, ["body.0.bias"], None),  # the model's own dtypes
        (turned, [*turned], torch.bfloat16),
    ):
        model = copy.deepcopy(net)
        full = {key: torch.full_like(value, 7, dtype=dtype) for key, value in own.items()}
        state = {key: v for key, v in reversed((full | changed).items()) if v is not None}
        only_there = sorted(state.keys() - own.keys())
        mistakes = {
            "is not sorted": left,
            "lacks entries whose shape is another": [key for key in left if key not in state],
            "is what only the state has": only_there,
            "also has what only the state has": sorted([*left, *only_there]),
        }
        keys = [*state]
        found = load_body(model, state)
        expect("the list of keys of `state`, afterwards,", [*state], keys)
        for key, value in model.state_dict().items():
            right = own[key] if key in left else torch.full_like(own[key], 7)
            expect(f"{key}, afterwards,", value, right, {"is left as it was": own[key]})
        expect("what is returned", found, sorted(left), mistakes)
        for value in model.state_dict().values():
            value.zero_()
        for key, value in (full | changed).items():
            if value is not None and not (state[key] == (7 if key not in changed else 1)).all():
                raise Wrong(f"{key} of `state` changes when the model is trained: it is shared")
    others = {f"net.{key}": value for key, value in own.items()}
    for state in (others, {}, {key: torch.ones(9, 9) for key in own}):
        with suppress(ValueError):
            load_body(net, state)
            raise Wrong("nothing is raised where no entry fits")


@exercise("02", minutes=15, hint="A key begins with a name if it is name + '.' + the rest.")
def renamed(renamed) -> None:
    layers = {"0.w": "hidden.w", "1.b": "output.b", "10.w": "10.w", "a.0.w": "a.0.w", "0": "hidden"}
    wrapped = {"module.odd.w": "odd.w", "module.a.module.b": "a.module.b", "modules.c": "modules.c"}
    nested = {"a.b.w": "first.w", "a.bc.w": "z.bc.w", "a.b.a.w": "first.a.w", "b.a.w": "b.a.w"}
    for names, right in (
        ({"0": "hidden", "1": "output"}, layers),
        ({"module": ""}, wrapped),
        ({"0": "1", "1": "2", "2": "0"}, {"0.w": "1.w", "1.w": "2.w", "2.w": "0.w"}),
        ({"a": "z", "a.b": "first"}, nested),
        ({"a": "b", "b": "c"}, {"b.w": "c.w", "a.w": "b.w"}),
        ({"a.b": "", "a": "z"}, {"a.b.w": "w", "a.c": "z.c", "x.a.b": "x.a.b"}),
        ({"a": "z", "a.w": "y.v"}, {"a.w": "y.v", "a.w2": "z.w2", "ab": "ab"}),
        ({"a.b": "z"}, {"axb.w": "axb.w", "a.b": "z"}),
    ):
        state = {key: torch.tensor(float(i)) for i, key in enumerate(right)}
        before, given = dict(state), dict(names)
        found = renamed(state, given) or {}
        if given != names:
            raise Wrong("the names that you were given are changed")
        if state != before:
            raise Wrong("the state that you were given is changed")
        now = {value.item(): key for key, value in found.items()}
        for i, (old, new) in enumerate(right.items()):
            what = f"with {names}, the new name of {old!r}"
            expect(what, now.get(float(i), "lost"), new, {"is missing: its tensor is lost": "lost"})
    for names in ({"a": "b"}, {"a": "c", "b": "c"}, {"b": "a"}):
        with suppress(ValueError):
            renamed({"a.w": torch.zeros(1), "b.w": torch.ones(1)}, names)
            raise Wrong("nothing is raised where two keys get one name: a tensor is lost")


@exercise("02", minutes=15, hint="What does state_dict() share with the model? Is NaN < 1?")
def keep_best(keep_best) -> None:
    nan, taken = float("nan"), []

    def train(model, losses):
        for loss in losses:
            taken.append(loss)
            for tensor in model.state_dict().values():
                tensor.fill_(len(taken))
            yield loss

    for losses, patience, best, enough in (
        ([5.0, 3.0, 4.0, 2.0, 6.0, 7.0, 8.0, 1.0], 3, 4, 7),
        ([3.0, nan, 2.0, nan, nan, 1.0], 2, 3, 5),
        ([5.0, 4.0, 4.0, 4.0, 1.0], 2, 2, 4),
        ([2.0, 1.0], 5, 2, 2),
        ([2.0, 1.0, 3.0], 5, 2, 3),
        ([-3.0, -4.0, -1.0, -2.0, -5.0], 2, 2, 4),
        ([1e12, 2e12, 3e12], 1, 1, 2),
    ):
        taken.clear()
        model = nn.Sequential(nn.BatchNorm1d(2))
        run = f"of the losses {losses} with patience {patience}"
        weight = model[0].weight
        found = keep_best(model, train(model, losses), patience)
        if model[0].weight is not weight:
            raise Wrong("the model's parameters are new ones, which its optimizer does not know")
        expect(f"{run}, the number that it takes", len(taken), enough)
        expect(f"{run}, what is returned", found, losses[best - 1], {"is the last": taken[-1]})
        for key, value in model.state_dict().items():
            mistakes = {"is that of the last step": torch.full_like(value, len(taken))}
            right = torch.full_like(value, best)
            expect(f"{run}, {key} of the best weights", value, right, mistakes)
