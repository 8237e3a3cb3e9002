"""The cheat sheet: its lines are those of the programs and the clinic; it prints on one page."""

import io
import re
import shlex

import pypdf
import pytest
from running import ROOT
from test_browser import THEME, THEMES

from torchclinic import cli, errors
from torchladder.launching import launch

OPENED = "book/cheat_sheet.html"
PAGE = (ROOT / "book" / "cheat_sheet.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
RUNG = re.compile(r"`(\d_\w+\.py)`.*?```python\n(.*?)```", re.S)
ROW = re.compile(r"^\| \[(?P<message>.+)\]\((?P<link>\S+)\) \| (?P<fix>.+) \|$", re.M)


def lines(code):
    return [line.split("  #")[0].strip() for line in code.splitlines() if line.strip()]


def test_every_line_of_a_rung_is_in_its_program():
    rungs = RUNG.findall(SECTIONS["The rungs"])
    assert [name[0] for name, _ in rungs] == list("123456")
    for name, code in rungs:
        program = lines((ROOT / "rungs" / name).read_text(encoding="utf-8"))
        assert [line for line in lines(code) if line not in program] == []


def save_and_load(plain, prefixes, whole, resume, folder):
    """Run the sheet's code by a rank, since FSDP needs a group."""
    import os
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    os.chdir(folder)
    model, sharded, other = (torch.nn.Linear(4, 2) for _ in range(3))
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    first = sharded.weight.full_tensor().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = {"torch": torch, "os": os, "tempfile": tempfile, **vars(state_dict), **locals()}
    names |= {"schedule": torch.optim.lr_scheduler.LinearLR(optimizer), "epoch": 1, "batch": 2}
    names |= {"scaler": torch.amp.GradScaler("cpu", enabled=False)}
    exec(plain, names)
    names["state"] = torch.compile(torch.nn.DataParallel(model)).state_dict()
    exec(prefixes, names)
    other.load_state_dict(names["state"])
    assert torch.equal(other.weight, model.weight)
    get, load = whole.split("whole = StateDictOptions(full_state_dict=True)\n")
    exec(get, names)
    names["state"] = {name: part.clone() for name, part in names["state"].items()}
    torch.nn.init.zeros_(sharded.weight)
    exec(f"whole = StateDictOptions(full_state_dict=True)\n{load}", names)
    assert torch.equal(sharded.weight.full_tensor(), first)
    exec(resume, names)
    return sorted(os.listdir()), sorted(torch.load("run.pt"))


@pytest.mark.slow
def test_the_code_that_saves_and_loads_does_so(tmp_path):
    code = re.findall(r"```python\n(.*?)```", SECTIONS["Save and load"], re.S)
    [(files, saved)] = launch(save_and_load, *code, str(tmp_path), world_size=1, backend="gloo")
    assert files == ["model.pt", "run.pt"]
    assert {"model", "optimizer", "schedule", "scaler", "epoch", "batch", "rng"} < set(saved)


def test_the_commands_have_options_that_the_programs_know(monkeypatch):
    from torch.distributed.run import parse_args

    lines = SECTIONS["Launch"].replace("\\\n", "")
    commands = [shlex.split(line) for line in re.findall(r"^\$ (.+)$", lines, re.M)]
    torchrun = [parse_args(words) for name, *words in commands if name == "torchrun"]
    assert [options.nnodes for options in torchrun] == ["1:1", "2"]
    ours = [words for name, *words in commands if name == "torchclinic"]
    assert len(ours) == 3
    for words in ours:
        monkeypatch.setattr(cli, f"_{words[0]}", lambda arguments: 0)
        with pytest.raises(SystemExit, match="0"):
            cli.main(words)


def test_the_ten_errors_are_entries_of_the_clinic_with_their_fix():
    rows = list(ROW.finditer(SECTIONS["Ten errors"]))
    assert len(rows) == 10
    for row in rows:
        notebook, name = row["link"].split("#")
        error = errors.catalogue()[name]
        assert notebook == f"../notebooks/{error.page}.ipynb"
        assert row["fix"] == " ".join(error.in_brief[1].split())
        assert row["message"].replace("`", "") in error.message.replace("`", ""), name


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
def test_the_sheet_prints_on_one_legible_page(opened, theme):
    opened.emulate_media(color_scheme=theme)
    assert opened.evaluate(THEME, theme) == theme
    [sheet] = pypdf.PdfReader(io.BytesIO(opened.pdf(prefer_css_page_size=True))).pages
    sizes = set()

    def visit(text, page, line, font, size):
        if text.strip():  # Chromium shrinks a page whose content is too wide
            sizes.add(round(size * abs(line[3] * page[3]), 1))

    text = " ".join(sheet.extract_text(visitor_text=visit).split())
    for word in ("Cheat sheet", *SECTIONS, "5_fsdp.py", "leave only the printing in the"):
        assert word in text
    assert "Skip to main content" not in text
    assert min(sizes) >= 7  # points
