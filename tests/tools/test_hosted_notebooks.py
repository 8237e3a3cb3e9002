"""The notebooks for Kaggle and Colab are complete in themselves.

`tools/hosted_stand_in.py` runs them from end to end, which takes a quarter of an hour.
"""

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import hosted_notebooks
import hosted_session
import nbformat
import pytest
import torch
from bs4 import BeautifulSoup

import torchladder
from torchladder import data

ROOT = Path(__file__).resolve().parents[2]

NAMES = [path.stem for path in hosted_notebooks.NOTEBOOKS]
SITE_PACKAGES = str(Path(torch.__file__).parent.parent)

every_chapter = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kaggle")
    hosted_notebooks.write_kernels(folder)
    return folder


@pytest.fixture(scope="module")
def notebooks(folder):
    return {name: nbformat.read(folder / name / f"{name}.ipynb", as_version=4) for name in NAMES}


def first_cell(notebooks, name="01_tensors_on_disk"):
    return notebooks[name].cells[0].source


def arguments(source):
    """What the first cell's last line calls `set_up` with."""
    return eval(source.splitlines()[-1], {"set_up": dict})


def fresh(code, folder, *, path=SITE_PACKAGES, home=None):
    """Run `code` by a Python to which torchladder is not installed.

    Without `site`, no .pth file is read; an editable torchladder is known by such a file.
    """
    (folder / "program.py").write_text(code)
    keep = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHLADDER", "KAGGLE", "COLAB"))
    }
    keep |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": str(home or folder)}
    # Where the package is unpacked; the fork server's socket there must not have a long name.
    with tempfile.TemporaryDirectory() as temporary:
        return subprocess.run(
            [sys.executable, "-S", "program.py"],
            cwd=folder, env=keep | {"TMPDIR": temporary},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip


# --- the notebooks ------------------------------------------------------------------------------


@every_chapter
def test_a_notebook_is_valid_small_and_without_outputs(folder, notebooks, name):
    notebook = notebooks[name]
    nbformat.validate(notebook)
    assert (folder / name / f"{name}.ipynb").stat().st_size < 400_000  # Kaggle: 1 MB
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata.kaggle.accelerator == "nvidiaTeslaT4"
    assert (notebook.metadata.accelerator, notebook.metadata.colab.gpuType) == ("GPU", "T4")
    assert notebook.cells[0].cell_type == "code"


@every_chapter
def test_every_cell_of_the_chapter_but_those_hidden_from_readers_is_there(notebooks, name):
    chapter = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    kept = [c for c in chapter.cells if "remove-cell" not in c.metadata.get("tags", [])]
    ours = notebooks[name].cells[1:]
    assert [c.id for c in ours] == [c.id for c in kept]
    code = [(a.source, b.source) for a, b in zip(ours, kept, strict=True) if b.cell_type == "code"]
    assert code[0][0].endswith("\n" + code[0][1])
    assert all(ours == theirs for ours, theirs in code[1:])


@every_chapter
def test_no_cell_after_the_first_needs_the_repository(notebooks, name):
    for cell in notebooks[name].cells[1:]:
        kept = r"(https?:|data:)\S+|`[\w./]+` in the repository"
        # A chapter looks for the programs here first, where the first cell lays them.
        text = re.sub(kept + r'|(?<=is_dir\(\) else )\(?Path\("../rungs"\)', "", cell.source)
        if name.startswith("errors_") and cell.cell_type == "markdown":  # quotes what PyTorch says
            text = re.sub(r"^```.*?^```$|(`+)[^`].*?\1", "", text, flags=re.M | re.S)
        found = re.search(r"\.\./|\b(src|notebooks|book|tests|benchmarks|bundled)/", text)
        assert not found, cell.source


@every_chapter
def test_nothing_is_left_that_only_the_site_can_render(notebooks, name):
    roles = r"\{(ref|doc|term|numref|math|eq|cite|download|any|class)\w*\}`"
    for cell in notebooks[name].cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"^(:::|```\{|\(.+\)=$|%)", cell.source, re.M), cell.source
            prose = re.sub(r"^```.*?^```$|``?[^`\n]+`", "", cell.source, flags=re.M | re.S)
            assert not re.search(roles, cell.source), cell.source
            assert not re.search(r"\]\((?!https?://)", prose), cell.source


@every_chapter
def test_programs_that_a_chapter_names_are_carried(notebooks, name):
    named = set()
    for cell in notebooks[name].cells[1:]:
        named |= set(re.findall(r"rungs/([\w.]*\w)", cell.source))
    made = {"fashion_mnist_small.npz"}
    assert named <= {path.name for path in (ROOT / "rungs").iterdir()} | made
    given = arguments(first_cell(notebooks, name))
    assert given.get("rungs", False) == bool(named)
    assert not named & made or given["needs_data"]


def test_admonitions_become_quotations(notebooks):
    text = "\n".join(cell.source for cell in notebooks["09_rung_4_distributed"].cells[1:])
    assert "> **Before you start**\n>\n> **You will be able to:**" in text
    assert "--data rungs/fashion_mnist_small.npz" in text


def test_differences_become_diffs():
    directive = "```{literalinclude} ../rungs/4_ddp.py\n:diff: ../rungs/3_dp.py\n```"
    text = hosted_notebooks.plain_markdown(directive, ROOT / "notebooks" / "09_x.ipynb")
    assert '```diff\n-"""Rung 3' in text
    assert "\n+dist.init_process_group" in text


def test_a_directive_without_a_plain_form_is_refused():
    with pytest.raises(ValueError, match=r"x\.ipynb: no plain form is known of '```{figure} a'"):
        hosted_notebooks.plain_markdown("a\n\n```{figure} a\n```\n", Path("x.ipynb"))


def test_nested_fences_keep_their_options_to_themselves():
    text = "::::{note}\n:class: x\n\nOne `:::` two\n::::\nafter"
    plain = hosted_notebooks.plain_markdown(text, Path("x.ipynb"))
    assert plain == "> **Note**\n>\n> One `:::` two\nafter"


def test_links_lead_to_the_public_site_if_there_is_one(monkeypatch):
    text = "[a **b**](../book/glossary.md#c-d), [e](04_x.ipynb), [f](#g), [h](https://i.org/j.md)"
    here = ROOT / "notebooks" / "01_y.ipynb"
    plain = hosted_notebooks.plain_markdown
    assert plain(text, here) == "a **b**, e, f, [h](https://i.org/j.md)"
    monkeypatch.setattr(hosted_notebooks, "public_site", lambda: "https://x.org/book")
    site = "https://x.org/book"
    assert plain(text, here) == (
        f"[a **b**]({site}/book/glossary.html#c-d), [e]({site}/notebooks/04_x.html), "
        f"[f]({site}/notebooks/01_y.html#g), [h](https://i.org/j.md)"
    )


def test_pictures_travel_in_their_cells(tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text>é</text></svg>'
    for folder in ("book/figures", "notebooks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "book/figures/x.svg").write_text(svg, encoding="utf-8")
    text = 'a\n\n![A "b" [c] < d.](../book/figures/x.svg)\n\ne'
    plain = hosted_notebooks.plain_markdown(text, tmp_path / "notebooks/01_y.ipynb")
    before, image, after = plain.split("\n\n")
    assert (before, after) == ("a", "e")
    image = BeautifulSoup(image, "html.parser").img
    assert image["alt"] == 'A "b" [c] < d.'
    kind, data = image["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data).decode() == svg


@every_chapter
def test_every_picture_of_the_chapter_is_there(notebooks, name):
    chapter = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    prose = [cell.source for cell in chapter.cells if cell.cell_type == "markdown"]
    named = re.findall(r"\]\(\.\./(book/figures/\w+\.svg)\)", "\n".join(prose))
    ours = "\n".join(cell.source for cell in notebooks[name].cells[1:])
    carried = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', ours)
    assert [base64.b64decode(data) for data in carried] == [
        (ROOT / path).read_bytes() for path in named
    ]


def test_the_same_chapters_give_the_same_bytes(folder, tmp_path):
    hosted_notebooks.carried_source.cache_clear()
    hosted_notebooks.write_kernels(tmp_path)
    for path in folder.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes()


def test_the_site_offers_the_notebooks_that_are_pushed_one_file_each(folder, tmp_path):
    hosted_notebooks.write_notebooks(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.ipynb" for name in NAMES]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / path.stem / path.name).read_bytes()


@every_chapter
def test_no_cell_captures_a_command_in_a_way_that_colabs_old_ipython_cannot_read(notebooks, name):
    # IPython 7 waits for an error token at the !, which Python 3.12 no longer gives; %sx works.
    code = [cell.source for cell in notebooks[name].cells[1:] if cell.cell_type == "code"]
    assert not re.findall(r"^\s*[\w.]+ *= *!.*", "\n".join(code), re.M)


# --- the first cell -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_package_is_found_by_the_notebook_its_children_and_the_ranks(notebooks, tmp_path):
    name = "11_which_rung"  # needs no data
    own = [cell.source for cell in notebooks[name].cells[1:] if cell.cell_type == "code"]
    others = "\n".join(own[0].splitlines()[:4])
    code = f"""
import importlib.util, os, subprocess, sys
if __name__ == "__main__":
    assert not importlib.util.find_spec("torchladder")
{first_cell(notebooks, name)}
import torchladder
import hosted_session
hosted_session.expect({arguments(first_cell(notebooks, name))["sha256"][:12]!r})
where = os.path.dirname(torchladder.__file__)
child = "import torchladder, os; print(os.path.dirname(torchladder.__file__))"
print("child", subprocess.check_output([sys.executable, "-c", child], text=True).strip() == where)
def rank():
    import torchladder.models
    return os.path.dirname(torchladder.models.__file__)
from torchladder.launching import launch
print("ranks", launch(rank) == [where, where])
print("kept", os.environ["PYTHONPATH"].endswith({SITE_PACKAGES!r}), not os.listdir("working"))
"""
    (tmp_path / "working").mkdir()
    assert "hosted_session.expect(" in others
    done = fresh(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"torch {torch.__version__}" in done.stdout
    assert done.stdout.splitlines()[-3:] == ["child True", "ranks True", "kept True True"]


IN_IPYTHON = """
import sys
from IPython.core.interactiveshell import InteractiveShell
{before}
shell = InteractiveShell.instance()
result = shell.run_cell({cell!r})
print("error:", type(result.error_in_exec).__name__)
"""


@pytest.mark.slow
def test_a_changed_payload_is_refused_in_one_line(notebooks, tmp_path):
    cell = first_cell(notebooks)
    changed = cell[:-1000] + ("A" if cell[-1000] != "A" else "B") + cell[-999:]
    done = fresh(IN_IPYTHON.format(cell=changed, before=""), tmp_path)
    said, error = done.stdout.splitlines()
    assert said.startswith("STOP")
    assert "has changed" in said
    assert error == "error: Stop"


@pytest.mark.slow
def test_another_torchladder_that_was_imported_first_is_named(notebooks, tmp_path):
    (tmp_path / "torchladder.py").write_text("")
    code = IN_IPYTHON.format(cell=first_cell(notebooks), before="import torchladder")
    done = fresh(code, tmp_path)
    assert done.stdout.startswith(f"STOP: {tmp_path}/torchladder.py was imported before. Restart")


def test_what_is_carried_is_the_package_the_programs_and_the_licence(notebooks, tmp_path):
    given = arguments(first_cell(notebooks))
    assert hashlib.sha256(given["carried"].encode()).hexdigest() == given["sha256"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(given["carried"]))) as archive:
        archive.extractall(tmp_path)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.*")}
    assert {"torchladder/launching.py", "hosted_session.py"} <= set(files)
    assert {"rungs/1_cpu.py", "rungs/4_ddp.py"} <= set(files)
    assert (tmp_path / "LICENSE").read_text().startswith("MIT")
    assert not [name for name in files if name.endswith((".npz", ".pyc"))]
    for name, path in files.items():
        folder = {"torchladder": "src", "hosted_session.py": "tools"}.get(name.split("/")[0], "")
        original = ROOT / folder / name
        assert path.read_bytes() == original.read_bytes()


def test_a_first_cell_of_another_version_stops_the_chapter(notebooks, monkeypatch):
    sha256 = arguments(first_cell(notebooks))["sha256"]
    check = next(line for line in notebooks[NAMES[0]].cells[3].source.splitlines() if "exp" in line)
    with pytest.raises(
        hosted_session.SessionError, match=r"from .*torchladder, not from this notebook"
    ):
        exec(check)
    monkeypatch.setattr(torchladder, "carried", "0123456789abcdef", raising=False)
    with pytest.raises(
        hosted_session.SessionError, match="carries version 0123456789ab, and .* for " + sha256[:12]
    ):
        exec(check)
    monkeypatch.setattr(torchladder, "carried", sha256)
    exec(check)


def test_the_data_sets_name_is_the_same_everywhere():
    assert hosted_notebooks.DATA_SET == hosted_session.DATA_SET
    assert hosted_session.DATA_SET in data._two_ways("", hosted_session.DATA_SET)


@pytest.mark.slow
def test_your_kaggle_name_comes_from_the_environment(tmp_path):
    command = [sys.executable, ROOT / "tools" / "hosted_notebooks.py", tmp_path]
    named = os.environ | {"KAGGLE_USERNAME": "ann"}
    done = subprocess.run(command, env=named, capture_output=True, text=True, check=True)
    assert re.fullmatch(rf"{len(NAMES)} notebooks, the largest \d+ kB, are in .*\n", done.stdout)
    described = json.loads((tmp_path / "03_devices" / "kernel-metadata.json").read_text())
    assert described["id"] == "ann/the-device-ladder-03-devices"
