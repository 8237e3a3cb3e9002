"""The hidden cases of the exercises on files: chapters 01 and 02."""

import copy

import torch
from torch import nn

from torchexercises import Wrong, case, exercise, expect, expect_alone, raises, unchanged


@exercise("01", 5, hint="row.untyped_storage().nbytes() says what a file of the row holds.")
def keep_rows(keep_rows) -> None:
    keep_rows = unchanged(keep_rows, "outputs rows")
    for dtype, rows in ((torch.float64, [3, 0]), (torch.bfloat16, [5]), (torch.int64, [1, 4, 2])):
        outputs = torch.arange(60.0).reshape(6, 10).to(dtype)
        if dtype.is_floating_point:
            outputs = outputs.requires_grad_().relu()  # what a layer returns has a graph
        kept = keep_rows(outputs, rows)
        if not isinstance(kept, list) or len(kept) != len(rows):
            raise Wrong(f"for {len(rows)} rows, what is returned is {kept!r:.40}")
        for i, row in zip(rows, kept, strict=True):
            expect(f"what is kept of row {i}", row, outputs.detach()[i])
        expect_alone(f"what is kept of the rows {rows}", *kept)


@exercise("02", 10, hint="Compare each entry's name and shape with model.state_dict().")
def load_body(load_body) -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net = nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)})
    before, load_body = copy.deepcopy(net.state_dict()), unchanged(load_body, "_ state")
    other_shapes = {"head.weight": torch.ones(4, 2), "head.bias": torch.ones(3)}
    other_shapes["body.0.bias"] = torch.ones(1)  # a copy_ would spread it
    shorter = {"body.0.bias": None, "other": torch.ones(2)}
    for what, changed, left, dtype in (
        ("all entries fit, in another dtype", {}, [], torch.float64),
        ("an entry is missing", shorter, ["body.0.bias"], None),
        ("entries have other shapes", other_shapes, [*other_shapes], torch.bfloat16),
    ):
        model = copy.deepcopy(net)
        full = {key: torch.full_like(value, 7, dtype=dtype) for key, value in before.items()}
        state = {key: v for key, v in reversed((full | changed).items()) if v is not None}
        mistakes = {
            "is not sorted": left,
            "lacks entries whose shape is another": [key for key in left if key not in state],
            "is what only the state has": sorted(state.keys() - before.keys()),
        }
        with case(what):
            found = load_body(model, state)
        for key, value in model.state_dict().items():
            right = before[key] if key in left else torch.full_like(before[key], 7)
            label = f"where {what}, {key}, afterwards,"
            expect(label, value, right, {"is left as it was": before[key]})
        expect(f"where {what}, what is returned", found, sorted(left), mistakes)
        for value in model.state_dict().values():
            value.zero_()
        if any(not state[key].any() for key in state):
            raise Wrong("entries of `state` change when the model is trained: they are shared")
    others = {f"net.{key}": value for key, value in before.items()}
    for state in (others, {}, {key: torch.ones(9, 9) for key in before}):
        with raises(f"where no entry fits, of {len(state)}", ValueError):
            load_body(net, state)


@exercise("02", 15, hint="What does state_dict() share with the model? Is NaN < 1?")
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
        ([3.0, nan, 2.0, nan, nan, 1.0], 2, 3, 5), ([5.0, 4.0, 4.0, 4.0, 1.0], 2, 2, 4),
        ([2.0, 1.0, 3.0], 5, 2, 3), ([-3.0, -4.0, -1.0, -2.0, -5.0], 2, 2, 4),
    ):  # fmt: skip
        taken.clear()
        model = nn.Sequential(nn.BatchNorm1d(2))
        run, weight = f"of the losses {losses} with patience {patience}", model[0].weight
        found = keep_best(model, train(model, losses), patience)
        if model[0].weight is not weight:
            raise Wrong("the model's parameters are new ones, which its optimizer does not know")
        expect(f"{run}, the number that it takes", len(taken), enough)
        expect(f"{run}, what is returned", found, losses[best - 1], {"is the last": taken[-1]})
        for key, value in model.state_dict().items():
            right, last = (torch.full_like(value, step) for step in (best, len(taken)))
            what = f"{run}, {key} of the best weights"
            expect(what, value, right, {"is that of the last step": last})
