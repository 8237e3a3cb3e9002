"""The cheat sheet: its lines are those of the programs and the clinic; it prints on one page."""

import io
import re
import shlex
from pathlib import Path

import pypdf
import pytest
from test_browser import THEME, THEMES

from torchclinic import cli, errors
from torchladder.launching import launch

ROOT = Path(__file__).resolve().parents[2]
OPENED = "book/cheat_sheet.html"
PAGE = (ROOT / "book" / "cheat_sheet.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
RUNG = re.compile(r"`(\d_\w+\.py)`.*?```python\n(.*?)```", re.S)
ROW = re.compile(r"^\| \[(?P<message>.+)\]\((?P<link>\S+)\) \| (?P<fix>.+) \|$", re.M)
SMALLEST = 7  # points


# --- what the sheet says ---


def lines(code):
    return [line.split("  #")[0].strip() for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize(("name", "code"), RUNG.findall(SECTIONS["The rungs"]))
def test_every_line_of_a_rung_is_in_its_program(name, code):
    program = lines((ROOT / "rungs" / name).read_text(encoding="utf-8"))
    assert [line for line in lines(code) if line not in program] == []


def test_the_sheet_has_a_program_of_every_rung():
    programs = [name for name, _ in RUNG.findall(SECTIONS["The rungs"])]
    assert [name[0] for name in programs] == list("12345")


def save_and_load(code, folder):
    """Run by a rank, since FSDP needs a group."""
    import os
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    os.chdir(folder)
    torch.manual_seed(0)
    model, sharded, other = (torch.nn.Linear(4, 2) for _ in range(3))
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    first = sharded.weight.full_tensor().clone()
    names = {
        "torch": torch,
        "os": os,
        "tempfile": tempfile,
        "model": model,
        "sharded": sharded,
        **vars(state_dict),
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names |= {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.LinearLR(optimizer)}
    names |= {"scaler": torch.amp.GradScaler("cpu", enabled=False), "epoch": 1, "batch": 2}
    plain, prefixes, whole, resume = code
    exec(plain, names)
    names["state"] = torch.compile(torch.nn.DataParallel(model)).state_dict()
    exec(prefixes, names)
    other.load_state_dict(names["state"])
    get, load = whole.split("whole = StateDictOptions(full_state_dict=True)\n")
    exec(get, names)
    names["state"] = {name: part.clone() for name, part in names["state"].items()}
    gathered = names["state"]["weight"].clone()
    torch.nn.init.zeros_(sharded.weight)
    exec(f"whole = StateDictOptions(full_state_dict=True)\n{load}", names)
    with open("run.tmp", "w") as own:
        own.write("my notes")
    exec(resume, names)
    return {
        "files": sorted(os.listdir()),
        "all that a run is": sorted(torch.load("run.pt")),
        "without prefixes": torch.equal(other.weight, model.weight),
        "FSDP gives the whole": torch.equal(gathered, first),
        "FSDP takes the whole": torch.equal(sharded.weight.full_tensor(), first),
    }


@pytest.mark.slow
def test_the_code_that_saves_and_loads_does_so(tmp_path):
    code = re.findall(r"```python\n(.*?)```", SECTIONS["Save and load"], re.S)
    assert len(code) == 4
    [found] = launch(save_and_load, code, str(tmp_path), world_size=1, backend="gloo")
    assert found == {
        "files": ["model.pt", "run.pt", "run.tmp"],  # the user's own is left alone
        "all that a run is": [
            "batch", "epoch", "gpu_rng", "model", "optimizer", "rng", "scaler", "schedule",
        ],
        "without prefixes": True,
        "FSDP gives the whole": True,
        "FSDP takes the whole": True,
    }  # fmt: skip


@pytest.mark.slow
def test_the_code_for_a_notebook_starts_two_processes():
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS["Launch"], re.S)
    *first, last = code.strip().splitlines()
    names = {"train": lambda: __import__("os").environ["WORLD_SIZE"]}
    exec("\n".join(first), names)
    assert eval(last.split("  #")[0], names) == ["2", "2"]


def test_the_commands_have_options_that_the_programs_know(monkeypatch):
    from torch.distributed.run import parse_args

    commands = [shlex.split(line) for line in re.findall(r"^\$ (.+)$", SECTIONS["Launch"], re.M)]
    torchrun = [parse_args(words) for name, *words in commands if name == "torchrun"]
    assert [options.training_script for options in torchrun] == ["train.py"] * 2
    assert [options.nnodes for options in torchrun] == ["1:1", "2"]
    ours = [words for name, *words in commands if name == "torchladder"]
    called = []
    for words in ours:
        monkeypatch.setattr(cli, f"_{words[0]}", lambda arguments: called.append(arguments) or 0)
        with pytest.raises(SystemExit, match="0"):
            cli.main(words)
    assert len(called) == len(ours) == 3


def test_the_ten_errors_are_entries_of_the_clinic_with_their_fix():
    rows = list(ROW.finditer(SECTIONS["Ten errors"]))
    assert len(rows) == 10
    for row in rows:
        notebook, name = row["link"].split("#")
        error = errors.catalogue()[name]
        assert notebook == f"../notebooks/errors_{error.part}.ipynb"
        assert row["fix"] == errors.first_sentence(error.fix)
        assert row["message"].replace("`", "") in error.message.replace("`", ""), name


# --- how it looks ---


def printed(page, **how):
    return pypdf.PdfReader(io.BytesIO(page.pdf(**how)))


def sizes(sheet):
    """In points, of all text: Chromium shrinks a page whose content is too wide."""
    found = set()

    def visit(text, page, line, font, size):
        if text.strip():
            found.add(round(size * abs(line[3] * page[3]), 1))

    sheet.extract_text(visitor_text=visit)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("how", [{"prefer_css_page_size": True}, {"format": "A4"}])
def test_the_sheet_prints_on_one_legible_page_of_black_on_white(opened, theme, how):
    opened.emulate_media(color_scheme=theme)
    assert opened.evaluate(THEME, theme) == theme
    [sheet] = printed(opened, **how).pages
    assert sorted(round(float(side) / 72 * 25.4) for side in sheet.mediabox[2:]) == [210, 297]
    text = " ".join(sheet.extract_text().split())
    for word in ("Cheat sheet", *SECTIONS, "5_fsdp.py", "leave in it what is done with the result"):
        assert word in text
    assert "Skip to main content" not in text
    assert min(sizes(sheet)) >= SMALLEST
    opened.emulate_media(media="print")
    colours = opened.evaluate(
        """() => [...new Set([...document.querySelectorAll("#cheat-sheet, #cheat-sheet *")]
            .map(element => getComputedStyle(element).color))]"""
    )
    ground = opened.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    opened.emulate_media(media="null")
    assert (colours, ground) == (["rgb(0, 0, 0)"], "rgb(255, 255, 255)")


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_sheet_is_as_wide_as_the_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 900})
    cut = opened.evaluate(
        """() => [document.documentElement, ...document.querySelectorAll("#cheat-sheet pre, td")]
            .filter(element => element.scrollWidth > element.clientWidth + 1)
            .map(element => element.outerHTML.slice(0, 80))"""
    )
    opened.set_viewport_size({"width": 1280, "height": 900})
    assert cut == []
    assert opened.errors == []
