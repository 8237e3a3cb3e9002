"""``tools/record.py`` on a small copy of the repository; test_pages.py has the site of a run."""

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from running import ROOT

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
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
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
    facts = json.loads((run / "machine.json").read_text())
    parts = facts["parts"]
    assert facts["note"] == "Beside others."
    assert list(parts) == ["02_stops", "01_fine", "tests/test_gpus.py"]  # as they were asked for
    assert parts["01_fine"]["ended"] == "passed"
    assert parts["02_stops"]["ended"] == "ValueError: no GPU"
    assert parts["tests/test_gpus.py"]["told"].startswith("1 failed, 1 passed")
    assert "test_with_a_gpu[False]" in parts["tests/test_gpus.py"]["failed"][0]
    before, stopped, after = nbformat.read(run / "02_stops.ipynb", as_version=4).cells
    assert before.outputs[0].text == "before\n"
    assert stopped.outputs[0].ename == "ValueError"
    assert after.outputs == []
    # Neither paths nor the machine's name are kept.
    (output,) = nbformat.read(run / "01_fine.ipynb", as_version=4).cells[0].outputs
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
