"""``tools/record.py`` keeps what chapters do on a machine, and the site shows it.

A repository of two small chapters is recorded by the kernel that goes to Kaggle, which runs here
as it would there, and is then built as a site.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import record
import refresh
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]
LEAKS = """import os, socket, sys, tempfile, torchladder
print(os.path.dirname(os.getcwd()), "and", tempfile.gettempdir() + "/x", "and", sys.prefix)
print("on", socket.gethostname() + ":29500", "as", os.path.expanduser("~/a"))
print(torchladder.__file__)"""
CHAPTERS = {
    "01_fine": [
        "# A chapter\n\nSee the [**rank**](../book/glossary.md#rank), [another](02_stops.ipynb), "
        "[one that is gone](03_gone.ipynb) and [a word](../book/glossary.md#no-such-word).\n\n"
        "```{literalinclude} ../rungs/2_gpu.py\n:diff: ../rungs/1_cpu.py\n```",
        LEAKS,
    ],
    "02_stops": [
        "# A chapter that stops\n\nText.",
        "print('before')",
        "import os\nraise ValueError(f'not in {os.getcwd()}')",
        "print('after')",
    ],
}
TESTS = """import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("good", [True, False])
def test_with_a_gpu(good):
    assert good

@pytest.mark.multigpu
def test_with_two():
    pytest.skip("needs two")

def test_without():
    raise SystemExit("is not asked for")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The repository with other chapters and other tests."""
    folder = tmp_path_factory.mktemp("mini") / "repository"
    for name in ("book", "rungs", "src", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "*.npz", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("LICENSE", "pyproject.toml", "_config.yml"):
        shutil.copy(ROOT / name, folder)
    toc = ["book/glossary", "book/kaggle", *(f"notebooks/{name}" for name in CHAPTERS)]
    (folder / "_toc.yml").write_text(
        "format: jb-book\nroot: book/where_this_was_run\nchapters:\n"
        + "".join(f"- file: {page}\n" for page in toc)
    )
    (folder / "book/glossary.md").write_text("# Glossary\n\n## Rank\n\nA number.\n")
    (folder / "book/kaggle.md").write_text("# Kaggle\n\n## Push a chapter from a terminal\n")
    (folder / "tests").mkdir()
    (folder / "tests/test_gpus.py").write_text(TESTS)
    (folder / "notebooks").mkdir()
    for name, (title, *sources) in CHAPTERS.items():
        cells = [nbformat.v4.new_markdown_cell(title), *map(nbformat.v4.new_code_cell, sources)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        # Outputs of another machine, of which none may be left.
        for cell in notebook.cells[1:]:
            cell.outputs = [nbformat.v4.new_output("stream", text="stale\n")]
        nbformat.write(notebook, folder / "notebooks" / f"{name}.ipynb")
    return folder


def without_package():
    """An environment in which nothing names the repository's package."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture(scope="module")
def run(repository):
    """``runs/<this machine>`` as the kernel for Kaggle leaves it among its outputs."""
    kaggle = repository.parent / "kaggle"
    kaggle.mkdir()
    write = [sys.executable, repository / "tools/kaggle_record.py", kaggle / "kernel"]
    subprocess.run(write, check=True, stdout=subprocess.DEVNULL)
    machine = record.machine_name()
    done = subprocess.run(
        [sys.executable, "kernel/record.py"],
        cwd=kaggle,
        env=without_package() | {"TORCHLADDER_MACHINE": machine},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (kaggle / "runs").iterdir()] == [machine]
    return kaggle / "runs" / machine


def test_a_run_says_what_machine_software_data_and_command_it_was(run):
    import torch

    facts = json.loads((run / "machine.json").read_text())
    assert facts["machine"] == run.name
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["torch"] == torch.__version__
    assert facts["torchladder"] == "0.1.0"
    assert facts["command"] == f"python tools/record.py {run.name}"
    assert (facts["commit"], facts["clean"]) == (None, None)  # not a git repository
    assert facts["data"]["fashion_mnist_small"] == "cut from the full set"
    assert facts["cpu"]
    assert facts["cores"] == os.cpu_count()


def test_a_chapter_that_fails_is_kept_and_said_to_have_failed(run):
    outcomes = json.loads((run / "machine.json").read_text())["notebooks"]
    assert list(outcomes) == ["01_fine", "02_stops"]
    assert outcomes["01_fine"]["passed"] is True
    assert {key: outcomes["02_stops"][key] for key in ("passed", "cell", "code", "error")} == {
        "passed": False,
        "cell": "cell-02",
        "code": "import os",
        "error": "ValueError: not in <repository>/notebooks",
    }
    cells = nbformat.read(run / "02_stops.ipynb", as_version=4).cells
    assert cells[1].outputs[0].text == "before\n"
    assert cells[2].outputs[0].ename == "ValueError"
    assert cells[3].outputs == []


def test_neither_paths_nor_the_machines_name_are_in_a_run(run, repository):
    text = "".join(path.read_text() for path in run.iterdir())
    for leak in (str(repository), str(run.parent), tempfile.gettempdir() + "/", sys.prefix):
        assert leak not in text
    assert f"{socket.gethostname()}:29500" not in text
    output = nbformat.read(run / "01_fine.ipynb", as_version=4).cells[1].outputs[0].text
    assert "<repository> and <temporary>/x and" in output
    assert "on <host>:29500 as ~/a" in output
    assert "<repository>/src/torchladder/__init__.py" in output


def test_the_gpu_tests_are_counted_and_those_that_failed_are_named(run):
    assert json.loads((run / "machine.json").read_text())["gpu_tests"] == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "names_of_failed": ["tests.test_gpus.test_with_a_gpu[False]"],
    }


def test_a_false_claim_is_refused_in_a_sentence_and_leaves_nothing(tmp_path):
    claim = "../2xT4000"
    done = subprocess.run(
        [sys.executable, ROOT / "tools/record.py", claim, "--runs", tmp_path / "runs"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"record: {claim!r} is not here: this machine has ")
    assert f"can be recorded as {record.machine_name()!r}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["Tesla T4", "Tesla T4"], "2xT4"),
        (["NVIDIA H200"], "1xH200"),
        (["NVIDIA A100-SXM4-40GB"] * 8, "8xA100"),
        (["NVIDIA GeForce RTX 4090", "Tesla P100-PCIE-16GB"], "1xRTX4090+1xP100"),
    ],
)
def test_a_machine_is_called_by_its_gpus(monkeypatch, gpus, name):
    fake = SimpleNamespace(device_count=lambda: len(gpus), get_device_name=gpus.__getitem__)
    monkeypatch.setattr("torch.cuda", fake)
    assert record.machine_name() == name


def test_refreshing_notes_what_the_outputs_of_a_chapter_come_from(monkeypatch, tmp_path):
    monkeypatch.setattr(refresh, "NOTEBOOKS", tmp_path / "notebooks")
    (tmp_path / "notebooks").mkdir()
    for name in ("01_a", "02_b"):
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
        refresh.note_where(name)
    (tmp_path / "notebooks/01_a.ipynb").unlink()
    refresh.note_where("02_b")
    noted = json.loads((tmp_path / "runs/chapters.json").read_text())
    assert list(noted) == ["02_b"]
    assert noted["02_b"]["machine"] == record.machine_name()


@pytest.fixture
def no_chapters(monkeypatch, tmp_path):
    """A repository with neither chapters nor tests, which is recorded in no time."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "NOTEBOOKS", tmp_path / "notebooks")
    return tmp_path


@pytest.mark.slow
def test_an_earlier_run_survives_when_the_new_one_cannot_take_its_place(no_chapters, monkeypatch):
    runs = no_chapters / "runs"
    earlier = runs / record.machine_name()
    earlier.mkdir(parents=True)
    (earlier / "machine.json").write_text("an earlier run")
    replace = os.replace

    def full_disk(source, target):
        if Path(target) == earlier and Path(source).name == earlier.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        record.record(earlier.name, runs, "command")
    assert (earlier / "machine.json").read_text() == "an earlier run"
    assert list(runs.iterdir()) == [earlier]


@pytest.mark.parametrize(
    ("host", "text", "cleaned"),
    [
        ("torch", "import torch; torch.float32", "import torch; torch.float32"),
        ("cuda", "on cuda:0", "on cuda:0"),
        ("torch", "tcp://torch:29500 as me@torch", "tcp://<host>:29500 as me@<host>"),
        ("blue-7.lab.org", "on blue-7, blue-7.lab.org:80", "on <host>, <host>:80"),
        ("blue-7", "not dark-blue-7 or blue-70", "not dark-blue-7 or blue-70"),
    ],
)
def test_a_hosts_name_is_replaced_but_never_a_word_of_the_book(monkeypatch, host, text, cleaned):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert record.cleaner()(text) == cleaned


def test_only_what_a_cell_put_out_is_cleaned_and_not_the_words_of_the_format():
    def clean(text):
        return text.replace("stream", "<host>").replace("stdout", "<host>")

    output = nbformat.v4.new_output("stream", name="stdout", text="a stream")
    assert record.cleaned(output, clean) == {**output, "text": "a <host>"}


# --- the site -----------------------------------------------------------------------------------


def build(repository):
    """The site of `repository`, which must build without a warning."""
    tool = Path(sys.executable).with_name("jupyter-book")
    done = subprocess.run(
        [tool, "build", repository, "-W", "-n", "--keep-going", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = repository / "_build/html"
    return lambda name: BeautifulSoup((site / f"{name}.html").read_bytes(), "html.parser")


@pytest.fixture(scope="module")
def page(repository, run):
    """The pages of the site with the run, recorded as if two GPUs had been there."""
    chapter = repository / "notebooks/01_fine.ipynb"
    # There may be no such link in a chapter; in a recorded run it may outlive what it leads to.
    chapter.write_text(
        chapter.read_text()
        .replace("[one that is gone](03_gone.ipynb)", "one")
        .replace("[a word](../book/glossary.md#no-such-word)", "word")
        .replace("import os, socket", "import os, time, socket")
    )
    shutil.copytree(run, repository / "runs/2xT4")
    machine = repository / "runs/2xT4/machine.json"
    facts = json.loads(machine.read_text()) | {"machine": "2xT4", "gpus": ["Tesla T4"] * 2}
    machine.write_text(json.dumps(facts))
    return build(repository)


def test_a_recorded_chapter_is_a_page_of_its_own_linked_with_the_chapter(page):
    line = page("notebooks/01_fine").select_one(".as-run-on")
    assert line.text == "As run on: CPU (this page) · 2x T4 · where this was run"
    assert line.a["href"] == "../runs/2xT4/01_fine.html"
    recorded = page("runs/2xT4/01_fine")
    assert recorded.title.text.startswith("A chapter, as run on 2x T4")
    assert "<repository> and <temporary>/x" in recorded.select_one(".cell_output").text
    assert recorded.select_one(".as-run-on a")["href"] == "../../notebooks/01_fine.html"
    note = recorded.select_one(".admonition.note").text
    assert "as it ran on 2x T4 on 20" in note
    assert recorded.select_one("meta[name=robots]")["content"] == "noindex"
    assert recorded.select_one("a[download]")["href"].endswith("_sources/runs/2xT4/01_fine.ipynb")


def test_a_recorded_page_says_what_failed_and_what_has_changed(page):
    assert "other code today" in page("runs/2xT4/01_fine").select_one(".warning").text
    failed = page("runs/2xT4/02_stops").select_one(".warning").text
    assert "ValueError: not in <repository>/notebooks" in failed
    assert "other code today" not in failed


def test_links_of_a_recorded_page_lead_on_or_are_words(page):
    links = {a.text: a["href"] for a in page("runs/2xT4/01_fine").select("section > p a.reference")}
    assert links == {
        "rank": "../../book/glossary.html#rank",
        "another": "02_stops.html",
        "a word": "../../book/glossary.html",
    }
    assert page("runs/2xT4/01_fine").select_one(".highlight-udiff .gd")


def test_recorded_pages_are_neither_searched_nor_in_the_contents(page, repository):
    text = (repository / "_build/html/searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    recorded = [i for i, name in enumerate(index["docnames"]) if name.startswith("runs/")]
    assert len(recorded) == 2
    assert [index["titles"][i] for i in recorded] == ["", ""]
    found = [pages if isinstance(pages, list) else [pages] for pages in index["terms"].values()]
    assert not set(recorded) & {number for pages in found for number in pages}
    assert page("notebooks/01_fine").select("nav.bd-links a[href*=runs]") == []


def test_where_this_was_run_tells_machines_failures_and_what_is_missing(page, repository):
    text = page("book/where_this_was_run").select_one("article").text
    assert "2x T4, on 20" in text
    assert "1 of 2 ran to their end" in text
    assert "stopped at import os: ValueError: not in <repository>/notebooks" in text
    assert "1 passed, 1 failed, 1 skipped: tests.test_gpus.test_with_a_gpu[False]" in text
    assert "not noted" in text  # these chapters were not refreshed
    assert "Not yet verified" not in text
    assert "is recorded yet" not in text

    shutil.rmtree(repository / "runs")
    text = build(repository)("book/where_this_was_run").select_one("article").text
    assert "Not yet verified on 2xT4" in text
    assert "No run on a GPU is recorded yet" in text
    assert "No run on two GPUs is recorded yet" in text
