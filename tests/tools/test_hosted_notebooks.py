"""The notebooks for Kaggle and Colab are complete in themselves.

`make test-hosted` runs them from end to end, which takes a quarter of an hour.
"""

import base64
import io
import os
import re
import tarfile
import tempfile
from pathlib import Path

import nbformat
import pytest
import torch
from bs4 import BeautifulSoup
from running import ROOT, ran

from tools import hosted_notebooks

NAMES = [path.stem for path in hosted_notebooks.NOTEBOOKS]
SITE_PACKAGES = str(Path(torch.__file__).parent.parent)
plain = hosted_notebooks.plain_markdown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kaggle")
    hosted_notebooks.write_notebooks(folder)
    return folder


@pytest.fixture(scope="module")
def notebooks(folder):
    return {name: nbformat.read(folder / f"{name}.ipynb", as_version=4) for name in NAMES}


def first_cell(notebooks, name="01_tensors_on_disk"):
    return notebooks[name].cells[0].source


def arguments(source):
    """What the first cell's last line calls `set_up` with."""
    return eval(source.splitlines()[-1], {"set_up": dict})


# --- the notebooks ------------------------------------------------------------------------------


def test_a_notebook_is_valid_small_and_has_every_cell_that_readers_see(folder, notebooks):
    for name, notebook in notebooks.items():
        nbformat.validate(notebook)
        assert (folder / f"{name}.ipynb").stat().st_size < 950_000  # Kaggle takes 1 MB
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        chapter = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        assert [c.id for c in notebook.cells[1:]] == [c.id for c in chapter.cells]
        theirs = [cell.source for cell in chapter.cells if cell.cell_type == "code"]
        assert [cell.source for cell in code[1:]] == theirs
        # IPython 7, Colab's, waits for an error token at the !, which Python 3.12 no longer gives.
        assert not re.findall(r"^\s*[\w.]+ *= *!.*", "\n".join(theirs), re.M)


def test_no_cell_needs_the_repository_or_what_only_the_site_can_render(notebooks):
    roles = r"\{(ref|doc|term|numref|math|eq|cite|download|any|class)\w*\}`|^(:::|\(.+\)=$|%)"
    away = (
        r'(https?:|data:)\S+|`[\w./]+` in the repository|(?<=is_dir\(\) else )\(?Path\("../rungs"\)'
        r"|book/runs/two_hosts\.json"  # carried
    )
    for name, notebook in notebooks.items():
        for cell in notebook.cells[1:]:
            text = prose = re.sub(away, "", cell.source)
            if cell.cell_type == "markdown":
                prose = re.sub(r"^```.*?^```|(`+)[^`].*?\1", "", cell.source, flags=re.M | re.S)
                assert not re.search(roles, cell.source, re.M), cell.source
                assert not re.search(r"\]\((?!https?://)", prose), cell.source
                prose = re.sub(away, "", prose)
            if name.startswith("errors_"):  # quotes what PyTorch says
                text = prose
            found = re.search(r"\.\./|\b(src|notebooks|book|tests|benchmarks|bundled)/", text)
            assert not found, cell.source


def test_programs_that_a_chapter_names_are_carried(notebooks):
    for name, notebook in notebooks.items():
        text = "\n".join(cell.source for cell in notebook.cells[1:])
        named = set(re.findall(r"rungs/([\w.]*\w)", text))
        made = {"fashion_mnist_small.npz"}
        assert named <= {path.name for path in (ROOT / "rungs").iterdir()} | made
        given = arguments(first_cell(notebooks, name))
        assert given.get("rungs", False) >= bool(named)
        assert not named & made or given["needs_data"]


def test_links_lead_to_the_public_site_if_there_is_one_and_pictures_travel(monkeypatch, tmp_path):
    text = "[a **b**](../book/glossary.md#c-d), [e](04_x.ipynb), [f](#g), [h](https://i.org/j.md)"
    here = ROOT / "notebooks" / "01_y.ipynb"
    assert plain(text, here) == "a **b**, e, f, [h](https://i.org/j.md)"
    site = "https://x.org/book"
    monkeypatch.setattr(hosted_notebooks, "public_site", lambda: site)
    assert plain(text, here) == (
        f"[a **b**]({site}/book/glossary.html#c-d), [e]({site}/notebooks/04_x.html), "
        f"[f]({site}/notebooks/01_y.html#g), [h](https://i.org/j.md)"
    )
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text>é</text></svg>'
    (tmp_path / "x.svg").write_text(svg, encoding="utf-8")
    text = 'a\n\n![A "b" [c] < d.](x.svg)\n\ne'
    before, image, after = plain(text, tmp_path / "y.ipynb").split("\n\n")
    image = BeautifulSoup(image, "html.parser").img
    assert (before, image["alt"], after) == ("a", 'A "b" [c] < d.', "e")
    kind, data = image["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data).decode() == svg


# --- the first cell -----------------------------------------------------------------------------


def test_what_is_carried_are_the_packages_the_programs_and_the_licence(notebooks, tmp_path):
    given = arguments(first_cell(notebooks))
    with tarfile.open(fileobj=io.BytesIO(base64.b85decode(given["carried"]))) as archive:
        archive.extractall(tmp_path)
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.*")}
    assert {"torchladder/launching.py", "torchclinic/catalogue/files.toml"} <= set(files)
    assert {"hosted_session.py", "rungs/1_cpu.py", "rungs/4_ddp.py"} <= set(files)
    assert (tmp_path / "LICENSE").read_text().startswith("MIT")
    assert not [name for name in files if name.endswith((".npz", ".pyc"))]
    folders = dict.fromkeys(["torchladder", "torchclinic", "torchexercises"], "src")
    folders["hosted_session.py"] = "tools"
    for name, path in files.items():
        original = ROOT / folders.get(name.split("/")[0], "") / name
        assert path.read_bytes() == original.read_bytes()


@pytest.mark.slow
def test_both_packages_are_found_by_the_notebook_its_children_and_the_ranks(notebooks, tmp_path):
    """By a Python that has neither: it reads no .pth file, which tells of an editable package."""
    cell = first_cell(notebooks, "13_which_rung")  # needs no data
    code = f"""
import importlib.util, os, subprocess, sys
if __name__ == "__main__":
    assert not importlib.util.find_spec("torchladder")
{cell}
import torchladder
where = os.path.dirname(torchladder.__file__)
child = "import torchladder, os; print(os.path.dirname(torchladder.__file__))"
print("child", subprocess.check_output([sys.executable, "-c", child], text=True).strip() == where)
def rank():
    import torchclinic.errors, torchladder.models
    return os.path.dirname(torchladder.models.__file__)
from torchladder.launching import launch
print("ranks", launch(rank) == [where, where])
print("kept", os.environ["PYTHONPATH"].endswith({SITE_PACKAGES!r}))
"""
    (tmp_path / "program.py").write_text(code)
    env = {"PYTHONPATH": SITE_PACKAGES, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    # Where the packages are unpacked; the fork server's socket there must not have a long name.
    with tempfile.TemporaryDirectory() as temporary:
        env |= {"TMPDIR": temporary, "PATH": os.environ["PATH"]}
        printed = ran("python", "-S", "program.py", cwd=tmp_path, env=env)
    assert f"torch {torch.__version__}" in printed
    assert printed.splitlines()[-3:] == ["child True", "ranks True", "kept True"]
