"""The hidden cases of the exercises on files: chapters 01 and 02."""

import copy
from contextlib import suppress

import torch
from torch import nn

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
