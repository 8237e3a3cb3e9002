"""What ``tools/record.py`` keeps of chapters on a machine, and how the site shows it.

A repository of two small chapters is recorded by the kernel that goes to Kaggle, which runs here
as it would there, and is then built as a site.
"""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
import record
from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import write_po
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow
LEAKS = """import os, socket, sys, tempfile, torchladder
print(os.path.dirname(os.getcwd()), "and", tempfile.gettempdir() + "/x", "and", sys.prefix)
print("on", socket.gethostname() + ":29500", "as", os.path.expanduser("~/a"))
print(torchladder.__file__)"""
CHAPTERS = {
    "01_fine": [
        "# A chapter\n\nSee the [**rank**](../book/glossary.md#rank), [another](02_stops.ipynb), "
        "[one that is gone](03_gone.ipynb) and [a word](../book/glossary.md#no-such-word).\n\n"
        "![A ladder.](../book/figures/ladder.svg)\n\n![Drawn.](../book/figures/gone.svg)\n\n"
        "```{literalinclude} ../rungs/2_gpu.py\n:diff: ../rungs/1_cpu.py\n```",
        LEAKS,
        "print(6 * 7, 'images a second')",
        "<!-- recorded: output -->\n\n<!-- recorded: copies -->\n\nA sentence."
        "<!-- until a GPU is recorded --> Not seen on a GPU.<!-- end -->",
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
    toc = ["book/glossary", "book/hosted", *(f"notebooks/{name}" for name in CHAPTERS)]
    (folder / "_toc.yml").write_text(
        "format: jb-book\nroot: book/where_this_was_run\nparts:\n- caption: A part\n  chapters:\n"
        + "".join(f"  - file: {page}\n" for page in toc)
    )
    (folder / "book/glossary.md").write_text("# Glossary\n\n## Rank\n\nA number.\n")
    (folder / "book/hosted.md").write_text("# Kaggle\n\n## Push a chapter from a terminal\n")
    (folder / "tests").mkdir()
    (folder / "tests/test_gpus.py").write_text(TESTS)
    (folder / "notebooks").mkdir()
    for name, (title, *sources) in CHAPTERS.items():
        cells = [nbformat.v4.new_markdown_cell(title)]
        for text in sources:
            kind = "markdown" if text.startswith("<!--") else "code"
            cells.append(getattr(nbformat.v4, f"new_{kind}_cell")(text))
        notebook = nbformat.v4.new_notebook(cells=cells)
        # Outputs of another machine, of which none may be left.
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
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

    import torchladder

    facts = json.loads((run / "machine.json").read_text())
    assert facts["machine"] == run.name
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["torch"] == torch.__version__
    assert facts["torchladder"] == torchladder.__version__
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
        "tests/test_gpus.py": {
            "passed": 1,
            "failed": 1,
            "skipped": 1,
            "names_of_failed": ["tests.test_gpus.test_with_a_gpu[False]"],
        }
    }


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
        .replace("![Drawn.](../book/figures/gone.svg)", "Drawn.")
        .replace("import os, socket", "import os, time, socket")
    )
    shutil.copytree(run, repository / "runs/2xT4")
    program = [sys.executable, ROOT / "benchmarks/gpu/copies.py", "--small", "--folder"]
    subprocess.run([*program, repository / "runs/2xT4"], check=True, stdout=subprocess.DEVNULL)
    machine = repository / "runs/2xT4/machine.json"
    facts = json.loads(machine.read_text()) | {"machine": "2xT4", "gpus": ["Tesla T4"] * 2}
    facts["notebooks"]["01_fine"] |= {"commit": "b" * 40, "clean": True, "date": "2031-02-03"}
    machine.write_text(json.dumps(facts))
    return build(repository)


def test_a_recorded_chapter_is_a_page_of_its_own_linked_with_the_chapter(page):
    line = page("notebooks/01_fine").select_one(".as-run-on")
    assert [words.strip() for words in line.text.partition(":")[2].split("·")][1] == "2x T4"
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


def test_a_chapter_shows_what_other_machines_have_measured_and_says_on_which(page, repository):
    chapter = page("notebooks/01_fine")
    assert re.search(r"The cell above on 2x T4, 20\d\d", chapter.text)
    (link,) = (a for a in chapter.select("section p a") if a.text == "its page")
    assert link["href"] == "../runs/2xT4/01_fine.html"
    assert "42 images a second" in link.find_next("pre").text

    content = json.loads((repository / "runs/2xT4/copies.json").read_text())
    table = chapter.select_one("table")
    told = table.find_previous("p").text
    assert content["machine"]["date"] in told
    assert f"PyTorch {content['machine']['torch']}" in told
    assert "a rehearsal with small sizes" in told
    cells = [[cell.text for cell in row.select("td")] for row in table.select("tbody tr")]
    assert [row[0] for row in cells] == list(content["rows"])
    middle = sorted(content["rows"][cells[0][0]]["bytes_per_second"])[4]
    assert float(cells[0][1]) == pytest.approx(middle / 1e9, rel=0.01)
    assert "A sentence." in chapter.text
    assert "Not seen on a GPU" not in chapter.text
    assert page("runs/2xT4/01_fine").select("table") == []


def test_links_of_a_recorded_page_lead_on_or_are_words(page):
    links = {a.text: a["href"] for a in page("runs/2xT4/01_fine").select("section > p a.reference")}
    assert links == {
        "rank": "../../book/glossary.html#rank",
        "another": "02_stops.html",
        "a word": "../../book/glossary.html",
    }
    assert page("runs/2xT4/01_fine").select_one(".highlight-udiff .gd")


def test_pictures_of_a_recorded_page_are_there_or_are_words(page):
    for name in ("notebooks/01_fine", "runs/2xT4/01_fine"):
        assert page(name).select_one("figure.mechanism[aria-label='A ladder.'] > svg")
        assert page(name).find("p", string="Drawn.")


def test_recorded_pages_are_neither_searched_nor_in_the_contents(page, repository):
    index = (repository / "_build/html/_static/search_index.js").read_text(encoding="utf-8")
    assert '"notebooks/01_fine.html"' in index
    assert '"runs/' not in index
    assert page("notebooks/01_fine").select("nav.bd-links a[href*=runs]") == []


def test_where_this_was_run_tells_machines_failures_and_what_is_missing(page, repository, tmp_path):
    text = page("book/where_this_was_run").select_one("article").text
    assert "2x T4, on 20" in text
    for told in ("1 of 2", "import os: ValueError: not in", "1 passed", "test_with_a_gpu[False]"):
        assert told in text
    assert "01_fine on 2031-02-03 with bbbbbbbbbbbb" in text
    assert "benchmarks/gpu/copies.py on 20" in text
    assert "(a rehearsal)" in text
    assert "not noted" in text  # these chapters were not refreshed
    assert "No run on" not in text

    shutil.copytree(repository, tmp_path / "copy", ignore=shutil.ignore_patterns("runs", "_build"))
    without = build(tmp_path / "copy")
    text = without("notebooks/01_fine").select_one("article").text
    assert "Not seen on a GPU." in text
    for told in ("The cell above", "Measured on", "recorded:"):
        assert told not in text
    text = without("book/where_this_was_run").select_one("article").text
    for told in ("on 2xT4", "No run on a GPU", "No run on two GPUs"):
        assert told in text


# --- the same site in another language ----------------------------------------------------------


@pytest.fixture(scope="module")
def translated(repository, page):
    """The pages in an edition whose catalogues put a sign before each sentence."""
    shutil.copytree(repository, edition := repository.parent / "edition")
    messages = {message for _, _, message, *_ in extract_from_dir(edition / "book/_ext")}
    write_catalogue(edition, "extensions", messages)
    write_catalogue(edition, "book", ["A chapter", "A part"])
    run = functools.partial(subprocess.run, cwd=edition, check=True, capture_output=True)
    tools = Path(sys.executable).parent
    run([tools / "jupyter-book", "config", "sphinx", "."])
    sphinx = [tools / "sphinx-build", "-q", "-W", "-n", "-D", "language=zh_CN", ".", "zh_CN"]
    run(sphinx, env=os.environ | {"PYTHONPATH": str(edition / "book/_ext")})
    return lambda name: BeautifulSoup((edition / f"zh_CN/{name}.html").read_bytes(), "html.parser")


def write_catalogue(edition, name, messages):
    catalogue = Catalog(locale="zh_CN")
    for message in messages:
        catalogue.add(message, f"译{message}")
    file = edition / "locales/zh_CN/LC_MESSAGES" / f"{name}.po"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        write_po(opened, catalogue)


@pytest.mark.parametrize(
    ("name", "selector", "words"),
    [
        ("notebooks/01_fine", "h1", "译A chapter"),
        ("notebooks/01_fine", "nav.bd-links .caption", "译A part"),
        ("notebooks/01_fine", ".chapter-buttons > a", "译Download"),
        ("notebooks/01_fine", "summary.chapter-button", "译Run on"),
        ("notebooks/01_fine", ".chapter-panel li + li", "译On"),
        ("notebooks/01_fine", ".as-run-on", "译As run on: 译CPU (this"),
        ("notebooks/01_fine", ".as-run-on a:last-child", "译where"),
        ("notebooks/01_fine", ".extra_footer", "译Code"),
        ("runs/2xT4/01_fine", "h1", "译A chapter"),
        ("runs/2xT4/01_fine", "title", "译A chapter, 译as run on"),
        ("runs/2xT4/01_fine", ".note .admonition-title", "译A recorded"),
        ("runs/2xT4/01_fine", ".note p + p", "译This is"),
        ("runs/2xT4/02_stops", ".warning p + p", "译This run"),
        ("book/where_this_was_run", "th + th", "译Machine"),
        ("book/where_this_was_run", "td + td", "译not noted"),
        ("book/where_this_was_run", "li:-soup-contains('GPU tests')", "译GPU tests: 译1 passed"),
    ],
)
def test_what_an_extension_says_is_said_in_the_language_of_the_edition(
    translated, name, selector, words
):
    found = translated(name).select_one(selector).get_text(" ", strip=True)
    assert found.startswith(words)


def test_the_edition_says_which_language_it_is_in(translated):
    assert translated("index").html["lang"] == "zh-CN"
    assert "译" in translated("index").find("meta", {"name": "description"})["content"]
