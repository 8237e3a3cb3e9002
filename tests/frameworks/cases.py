"""What a framework's checkpoint is and what must come of it; modules beside this make them.

``python tests/frameworks/cases.py FOLDER [PROGRAM...]`` makes the files to be looked at.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
X = torch.linspace(-1, 1, 16).reshape(2, 8)  # for Net
IDS = torch.arange(8)[None]  # for language models


@dataclass
class Case:
    """A file or folder, the model it is of, and what the model that was saved says."""

    path: Path
    fresh: Callable[[], nn.Module]  # the same model with other numbers
    want: torch.Tensor
    own: Callable[[], nn.Module]  # as the program's own loader gives it
    x: torch.Tensor = field(default_factory=lambda: X)
    options: dict[str, Any] = field(default_factory=dict)  # for load_into and fix
    way: str = ""  # what a refusal has to name; it ends where `own` ends. "": it must load
    atol: float = 1e-4  # more where the program rounds what goes in
    names: str = ""  # what inspect has to name
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: logits(model, x)


MAKERS: dict[str, Callable[[Path], Case]] = {}
MODULES = "hugging_face", "quantized", "trainers", "ranks", "other_formats"


def made_by(title: str, **options):
    """Register a function that writes a checkpoint into a folder of its own: PROGRAM/CASE."""

    def register(maker):
        MAKERS[title] = partial(maker, **options)
        return maker

    return register


class Net(nn.Module):
    """A model with no framework at all."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def net(seed=1):
    torch.manual_seed(seed)
    model = Net()
    nn.init.normal_(model.norm.running_mean)
    return model.eval()


@torch.no_grad()
def logits(model, x):
    out = model.eval()(x)
    out = getattr(out, "logits", getattr(out, "sample", out))
    while not isinstance(out, torch.Tensor):
        out = out[0]
    return out


if __name__ == "__main__":
    sys.modules["cases"] = sys.modules["__main__"]
    to, *chosen = sys.argv[1:]
    for module in MODULES:
        importlib.import_module(module)
    order = [title for word in chosen or [""] for title in MAKERS if title.startswith(word)]
    for title, maker in [(title, MAKERS[title]) for title in order]:
        program = title.split("/")[0]
        place = Path(to, title)
        place.mkdir(parents=True, exist_ok=True)
        try:
            case = maker(place)
            own = case.run(case.own(), case.x)
            gap = float((own - case.want).abs().max())
            torch.save({"x": case.x, "logits": case.want}, f"{place}.truth.pt")
            rest = case.path.relative_to(to), case.options, case.way or "loads", f"gap {gap:.1e}"
            print(f"{program} {version(program)}", *rest, sep=" | ", flush=True)
        except Exception as error:
            print(title, "FAILED", type(error).__name__, str(error)[-1500:], flush=True)
            if "-v" in os.environ.get("CASES", ""):
                raise
