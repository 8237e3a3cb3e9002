"""Versions and counts that the prose names are those of today.

Each is counted where it comes from. A page that names another one fails here, with its sentence.
"""

import difflib
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import torchladder
from torchclinic import errors
from torchladder import data

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
)
NUMBERS = {word: number for number, word in enumerate(WORDS.split())} | {
    "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20,
}  # fmt: skip
COUNT = rf"\b(\d[\d,]*|{'|'.join(NUMBERS)})"


def markdown(path):
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


# Not the changelog, which says what was.
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [*sorted((ROOT / "book").rglob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
PROSE = {path.relative_to(ROOT).as_posix(): markdown(path) for path in PAGES}


def said(pattern):
    """Each place where the prose has `pattern`: the page, the words, the groups."""
    for page, text in PROSE.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield page, " ".join(match[0].split()), match.groups()


def number(word):
    return NUMBERS.get(word.lower()) or int(word.replace(",", ""))


def wrong(pattern, right):
    """Places whose first group is not the number or the version `right`."""
    value = number if isinstance(right, int) else str
    return [(page, words) for page, words, groups in said(pattern) if value(groups[0]) != right]


def constraints(name):
    found = re.search(rf"^{name}==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    return found[1]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHON = PROJECT["requires-python"].removeprefix(">=")
OLDEST = next(d for d in PROJECT["dependencies"] if d.startswith("torch>=")).removeprefix("torch>=")
NEWEST = constraints("torch")
CHAPTERS = [
    entry["file"].removeprefix("notebooks/")
    for part in yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
    for entry in part["chapters"]
    if re.match(r"notebooks/\d\d_", entry["file"])
]


def test_the_pages_are_found_and_a_wrong_number_is_noticed(monkeypatch):
    assert len(PROSE) > 30
    monkeypatch.setitem(
        PROSE, "a page", "All seventy-one chapters? No: 71 chapters, Python 3.9 or later."
    )
    assert ("a page", "71 chapters") in wrong(rf"{COUNT} chapters\b", len(CHAPTERS))
    assert ("a page", "Python 3.9 or later") in wrong(
        r"Python (\d\.\d+) or (?:later|newer)", PYTHON
    )


def test_the_oldest_python_is_named_as_pyproject_has_it():
    pattern = r"Python (\d\.\d+) or (?:later|newer)"
    assert wrong(pattern, PYTHON) == []
    assert {"README.md", "book/setup.md", "book/index.md"} <= {page for page, *_ in said(pattern)}
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    floor = tuple(map(int, PYTHON.split(".")))
    assert f"v >= {floor}" in make
    assert f"Python {PYTHON} or later is needed" in make


def test_the_oldest_pytorch_is_named_as_pyproject_has_it():
    assert wrong(r"(?:PyTorch|torch) (\d\.\d+) or (?:later|newer)", OLDEST) == []
    assert wrong(r"on PyTorch (\d\.\d+)(?=,| too|\n)", OLDEST) == []
    assert wrong(r"from torch (\d\.\d+) on", OLDEST) == []
    assert wrong(r"PyTorch (\d\.\d+) (?:to \d\.\d+ read|as in)", OLDEST) == []
    tools = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tools").glob("*.py"))
    assert set(re.findall(r"(\d\.\d+) or later is needed", tools)) == {OLDEST}


def test_the_newest_pytorch_is_the_one_that_is_tested():
    """What is said of it was looked up there, and has to be looked up again for a newer one."""
    patterns = [
        r"In the source of PyTorch (\d\.\d+)",
        r"PyTorch \d\.\d+ to (\d\.\d+) read",
        r"in PyTorch \d\.\d+ as in (\d\.\d+)",
        r"still experimental in (\d\.\d+)",
    ]
    assert [wrong(pattern, NEWEST) for pattern in patterns] == [[]] * len(patterns)
    assert all(any(said(pattern)) for pattern in patterns)
    catalogue = (ROOT / "src/torchclinic/errors.toml").read_text(encoding="utf-8")
    assert re.search(r'^torch = "(.*)"$', catalogue, re.MULTILINE)[1] == NEWEST


def test_the_version_of_the_package_is_named_as_it_is():
    assert wrong(r"torchladder (\d+\.\d+\.\d+)\b", torchladder.__version__) == []


def test_the_number_of_chapters_and_of_errors_is_named_as_it_is():
    count = r"(?!one |two |three )" + COUNT  # of all, not of some
    assert wrong(rf"{count} chapters\b", len(CHAPTERS)) == []
    assert wrong(r"\b(\d{3}) (?:entries|errors)\b", len(errors.catalogue())) == []
    assert wrong(rf"{COUNT} notebooks \(`notebooks/errors_", len(errors.parts())) == []
    assert any(said(rf"{COUNT} notebooks \(`notebooks/errors_"))


def test_the_readme_lists_every_chapter_in_order():
    rows = re.findall(r"^\| \[(\d\d)\]\(notebooks/(.*)\.ipynb\)", PROSE["README.md"], re.MULTILINE)
    assert rows == [(name[:2], name) for name in CHAPTERS]


def test_a_link_to_a_chapter_names_its_number():
    links = list(said(r"\[chapter (\d\d)[^\]]*\]\((?:\.\./)?(?:notebooks/)?(\d\d)_"))
    assert len(links) > 50
    assert [(page, words) for page, words, (named, linked) in links if named != linked] == []


def test_the_lines_that_change_for_a_gpu_are_counted():
    cpu, gpu = (
        (ROOT / "rungs" / name).read_text().splitlines() for name in ("1_cpu.py", "2_gpu.py")
    )
    added = sum(line.startswith("+ ") for line in difflib.ndiff(cpu[1:], gpu[1:]))
    pattern = rf"{COUNT} lines (?:of the program change|besides the title)"
    assert wrong(pattern, added) == []
    assert "notebooks/05_rung_1_cpu.ipynb" in {page for page, *_ in said(pattern)}


def test_the_space_on_the_disk_is_the_same_on_every_page():
    sizes = {groups[0] for _, _, groups in said(r"about (\d+) GB (?:of|on)\s+disk")}
    assert len(sizes) == 1


def test_the_images_that_come_along_are_counted():
    small = data.load()
    assert (
        wrong(rf"{COUNT} images that come with", len(small.train_labels) + len(small.test_labels))
        == []
    )
    assert (
        wrong(rf"the first {COUNT} images of each", len(small.train_labels) // len(small.classes))
        == []
    )


@pytest.mark.parametrize("name", [name for name in CHAPTERS if name[:2] in ("10", "17")])
def test_a_program_has_as_many_lines_as_its_heading_says(name):
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    heading = re.compile(r"^## (\w+) in (\d+) lines$", re.MULTILINE)
    ((here, found),) = [(i, m) for i, source in enumerate(sources) if (m := heading.search(source))]
    kinds = [cell["cell_type"] for cell in cells]
    start = kinds.index("code", here)
    program = "\n".join(sources[start : kinds.index("markdown", start)]).splitlines()
    lines = [line.strip() for line in program if line.strip()]
    code = [line for line in lines if not line.startswith(('"', "#"))]
    # A docstring may count or not.
    assert len(code) <= int(found[2]) <= len(lines)
    assert wrong(rf"{found[1]}[^.;]*? in (\d+) lines", int(found[2])) == []
