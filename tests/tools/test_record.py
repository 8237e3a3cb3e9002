"""``tools/record.py`` on a small copy of the repository, and the site of what it leaves."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from running import ROOT, parsed, sphinx

from tools import machine_facts, record

CHAPTERS = {
    "01_fine": ["import os, socket\nprint(os.getcwd(), f'{socket.gethostname()}:29500')"],
    "02_stops": ["print('before')", "raise ValueError('no GPU')", "print('after')"],
}
TESTS = """import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("good", [True, False])
def test_with_a_gpu(good):
    assert good

def test_without():
    raise SystemExit("is not asked for")
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "repository"
    for name in ("notebooks", "tests", "src"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(ROOT / "tools", folder / "tools")
    (folder / "tests/test_gpus.py").write_text(TESTS)
    for name, sources in CHAPTERS.items():
        link = "See [a word](../book/glossary.md#rank) and [PyTorch](https://pytorch.org)."
        cells = [nbformat.v4.new_markdown_cell(f"# A chapter\n\n{link}")]
        cells += [nbformat.v4.new_code_cell(source) for source in sources]
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"run": {}})
        nbformat.write(notebook, folder / f"notebooks/{name}.ipynb")
    return folder


def call(repository, *options):
    command = [sys.executable, "-m", "tools.record", *options]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(repository):
    machine = machine_facts.machine_facts()["machine"]
    done = call(repository, machine, "--only", "02_", "01_", "tests/", "--note", "Beside others.")
    assert done.returncode == 1, done.stderr  # a chapter and a test have failed
    return repository / "book/runs" / machine


def test_a_chapter_without_an_end_is_kept_as_far_as_it_came(tmp_path, monkeypatch):
    now = time.monotonic()
    limits = [record.seconds(now + left) for left in (-1, 20, 9999)]
    assert limits == [1, pytest.approx(20, abs=1), record.LIMIT]
    cells = [nbformat.v4.new_code_cell(text) for text in ("1", "import time; time.sleep(900)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "04_long.ipynb")
    given = iter([600, 1])
    monkeypatch.setattr(record, "seconds", lambda until: next(given))
    outcome = record.run_notebook(tmp_path / "04_long.ipynb", tmp_path / "kept.ipynb", now, str)
    assert outcome["ended"].startswith("CellTimeout")
    first, _ = nbformat.read(tmp_path / "kept.ipynb", as_version=4).cells
    assert first.outputs[0].data["text/plain"] == "1"


@pytest.mark.parametrize(
    ("name", "told", "kept"),
    [
        ("gpu-node-17.lab", "Linux gpu-node-17.lab, gpu-node-17.", "Linux <host>, <host>."),
        ("4f0c1d2e3b5a", "on 4f0c1d2e3b5a: ann@4f0c1d2e3b5a", "on <host>: ann@<host>"),
        ("torch", "import torch; torch:29500; ann@torch", "import torch; <host>:29500; ann@<host>"),
    ],
)
def test_a_machines_name_is_removed_where_it_cannot_be_another_word(monkeypatch, name, told, kept):
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert record.cleaner()(told) == kept


def test_a_run_is_only_recorded_under_the_name_of_its_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["record", "9xH900", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        record.main()
    assert "not '9xH900'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_outcomes_of_chapters_and_gpu_tests_are_kept_as_far_as_they_got(run):
    parts = json.loads((run / "machine.json").read_text())["parts"]
    assert list(parts) == ["02_stops", "01_fine", "tests/test_gpus.py"]  # as they were asked for
    assert parts["01_fine"]["ended"] == "passed"
    assert parts["02_stops"]["ended"] == "ValueError: no GPU"
    assert parts["tests/test_gpus.py"]["told"].startswith("1 failed, 1 passed")
    assert "test_with_a_gpu[False]" in parts["tests/test_gpus.py"]["failed"][0]
    before, stopped, after = nbformat.read(run / "02_stops.ipynb", as_version=4).cells[1:]
    assert before.outputs[0].text == "before\n"
    assert stopped.outputs[0].ename == "ValueError"
    assert after.outputs == []
    # Neither paths nor the machine's name are kept.
    (output,) = nbformat.read(run / "01_fine.ipynb", as_version=4).cells[1].outputs
    assert output.text == "<repository>/notebooks <host>:29500\n"


def test_what_has_passed_is_not_run_again_on_the_same_machine_if_its_folder_is_taken_along(
    tmp_path, monkeypatch
):
    asked = []

    def run_tests(path, *_):
        asked.append(path.stem)
        return {"ended": path.stem}

    monkeypatch.setattr(record, "run_tests", run_tests)
    facts = dict.fromkeys(record.SAME, "this") | {"note": ""}
    for machine in (facts, facts, facts | {"commit": "another"}):
        kept = record.Record(tmp_path, machine, math.inf)
        for name in ("passed", "failed"):
            kept.run(name, Path(f"{name}.py"))
    assert asked == ["passed", "failed", "failed", "passed", "failed"]


def test_the_site_shows_a_recorded_chapter_beside_its_own(run, repository, tmp_path):
    repository = shutil.copytree(repository, tmp_path / "repository")
    run = (repository / "book/runs" / run.name).rename(repository / "book/runs/2xT4")
    (repository / "book/runs/1xH200").mkdir()
    shutil.copy(run / "machine.json", repository / "book/runs/1xH200")
    where = "# Where\n\n" + "".join(
        f"```{{where-this-was-run}} {what}\n```\n\n" for what in ("chapters", "machines")
    )
    (repository / "book/where_this_was_run.md").write_text(
        where + "```{only} not kaggle_recorded\nNothing ran on Kaggle.\n```\n"
    )
    names = "\n".join(f"notebooks/{name}" for name in CHAPTERS)
    toc = f"```{{toctree}}\n{names}\nbook/where_this_was_run\n```\n"
    (repository / "index.md").write_text(f"# Small\n\n{toc}")
    settings = {
        "extensions": ["myst_nb", "book._ext.recorded_runs"],
        "nb_execution_mode": "off",
        "myst_enable_extensions": ["colon_fence"],
        "exclude_patterns": ["book/runs/2xT4/01_fine.ipynb", "book/runs/2xT4/02_stops.ipynb"],
        "suppress_warnings": ["myst.xref_missing", "myst-nb.lexer"],
    }
    assert sphinx(repository, **settings) == (0, "")
    site = repository / "_build"
    line = parsed(site / "notebooks/01_fine.html").select_one(".as-run-on")
    assert line.a["href"] == "../book/runs/2xT4/01_fine.html"
    assert line.a.text == "2x T4"
    assert "1x H200 (outputs not kept)" in line.text
    stopped = parsed(site / "book/runs/2xT4/02_stops.html")
    assert "ValueError: no GPU" in stopped.select_one(".admonition").text
    assert "Beside others." in stopped.select_one(".admonition").text
    assert "before" in stopped.select_one(".cell_output").text
    links = {a.text: a["href"] for a in stopped.select("section > p a.reference")}
    assert links == {"PyTorch": "https://pytorch.org"}
    told = parsed(site / "book/where_this_was_run.html").select_one("article").text
    for words in (
        "not noted",
        "2x T4, on 20",
        "Beside others.",
        "ValueError: no GPU",
        "1 failed, 1 passed",
        "01_fine: passed, outputs not kept",
    ):
        assert words in told
    assert "Nothing ran on Kaggle" not in told
