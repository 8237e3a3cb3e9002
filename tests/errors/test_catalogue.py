"""The catalogue of errors holds what its head promises, links to what exists, quotes rightly."""

import mmap
import re
import tomllib
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import nbformat
import pytest
import torch
from clinic_notebooks import NEEDS, clinic_notebook
from mdit_py_plugins.anchors.index import slugify

from torchclinic import errors
from torchclinic.errors import catalogue, find, first_sentence

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
ENTRIES = tomllib.loads(Path(errors.__file__).with_suffix(".toml").read_text())["error"]
# C++ that only some builds of PyTorch hold: elsewhere nobody can look up what is quoted from it.
ONLY_WITH = {
    r"(c10/cuda|torch/csrc/(cuda|distributed/c10d))/.*": torch.version.cuda is not None,
    r"aten/src/ATen/mps/.*": torch.backends.mps.is_built(),
}

every_entry = pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.id)


def test_ids_are_unique_and_can_be_typed():
    ids = [entry["id"] for entry in ENTRIES]
    assert sorted(set(ids)) == sorted(ids)
    assert [name for name in ids if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []


@every_entry
def test_fields_are_of_their_types_and_name_what_exists(entry):
    for field in fields(entry):
        kind = {"str": str, "bool": bool, "list[str]": list}[field.type]
        assert type(getattr(entry, field.name)) is kind, field.name
    assert entry.part in errors.parts()
    assert entry.kind in errors.KINDS
    assert entry.needs in NEEDS
    assert entry.id not in entry.over
    assert set(entry.over) <= set(catalogue())


NO_CELL = ("silent", "2 gpus")  # what hangs two GPUs can be neither shown nor quoted


@every_entry
def test_an_entry_says_why_and_what_to_do_and_shows_both(entry):
    assert entry.cause.strip()
    assert entry.fix.strip()
    assert entry.fails.strip() or entry.quoted.strip() or (entry.kind, entry.needs) == NO_CELL
    assert bool(entry.quoted) == bool(entry.source)
    assert entry.patterns or entry.kind in ("silent", "follows")
    # A chapter's table shows only these.
    for text in (entry.cause, entry.fix):
        sentence = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", first_sentence(text))
        assert len(" ".join(sentence.split())) <= 110, sentence
        assert sentence[-1] in ".:", sentence


@every_entry
def test_a_heading_is_one_line_and_holds_the_words_of_pytorch_in_backticks(entry):
    assert "\n" not in entry.message
    assert len(entry.message) <= 170
    assert "`" in entry.message or entry.kind == "silent"


@every_entry
def test_cells_are_short_and_narrow(entry):
    for cell in (entry.fails, entry.works):
        assert len([line for line in cell.splitlines() if line.strip()]) <= 30
        assert [line for line in cell.splitlines() if len(line) > 100] == []


# --- links --------------------------------------------------------------------------------------


def anchors(path):
    """Of the headings of a page, as Sphinx makes them."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text()
    titles = re.findall(r"^#{1,3} (.+)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
    return {slugify(re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title)) for title in titles}


@every_entry
def test_links_lead_to_pages_and_headings_that_exist(entry):
    texts = (entry.cause, entry.fix, entry.avoid, entry.versions, entry.stand_in)
    links = re.findall(r"\]\(([^)]*)\)", "\n".join(texts))
    links += [re.sub(r"^([^#]*)", r"\1.ipynb", chapter) for chapter in entry.chapters]
    for link in links:
        if link.startswith("https://"):
            continue
        page, _, anchor = link.partition("#")
        path = ROOT / "notebooks" / (page or f"{entry.page}.ipynb")
        assert path.is_file(), link
        if re.match("errors_", path.name):
            assert anchor in catalogue(), link
            assert catalogue()[anchor].page == path.stem, link
        else:
            assert not anchor or anchor in anchors(path), link


@every_entry
def test_threads_are_public_and_few(entry):
    assert len(entry.threads) <= 3
    assert [thread for thread in entry.threads if not thread.startswith("https://")] == []


# --- quotations ---------------------------------------------------------------------------------


def bare(text):
    """Letters and digits alone: a message in the source is cut by quotes, braces and line ends."""
    return re.sub("[^A-Za-z0-9]", "", text)


def in_compiled_torch(text):
    """Whether the libraries hold each clause; clauses are put together when an error is raised."""
    clauses = {clause.strip() for clause in re.split(r"(?<=[.,:])\s|\n", text)}
    libraries = [path for path in TORCH.glob("lib/*") if path.suffix in (".so", ".dylib")]
    for library in sorted(libraries, key=lambda path: path.stat().st_size):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            clauses = {clause for clause in clauses if m.find(clause.encode()) < 0}
        if not clauses:
            return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith(f"{errors.quoted_torch()}."), reason="of another version"
)
@pytest.mark.parametrize(
    "entry", [e for e in catalogue().values() if e.quoted], ids=lambda entry: entry.id
)
def test_what_is_quoted_stands_in_the_installed_pytorch(entry):
    if not all(here for path, here in ONLY_WITH.items() if re.fullmatch(path, entry.source)):
        pytest.skip(f"this build of PyTorch lacks {entry.source}")
    # A * or ... leaves out what the program fills in.
    pieces = [piece.strip() for piece in re.split(r"\.\.\.|\*", entry.quoted) if bare(piece)]
    assert sum(map(len, pieces)) >= 20
    source = TORCH.parent / entry.source
    if source.is_file():
        there = bare(source.read_text())
        assert [piece for piece in pieces if bare(piece) not in there] == []
    else:
        assert [piece for piece in pieces if not in_compiled_torch(piece)] == []


def test_the_version_that_is_quoted_is_the_one_that_is_tested():
    tested = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert errors.quoted_torch() == tested[1]


# --- patterns -----------------------------------------------------------------------------------


def notebook(part):
    with (ROOT / "notebooks" / f"errors_{part}.ipynb").open(encoding="utf-8") as file:
        return nbformat.read(file, as_version=4)


def text_of(output):
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join([*output.traceback, f"{output.ename}: {output.evalue}"])
    return str(output.data.get("text/plain", ""))


def outputs():
    """For each entry what the cell that shows it printed or raised."""
    for part in errors.parts():
        cells = [cell for cell in notebook(part).cells if cell.cell_type == "code"]
        for entry in catalogue().values():
            if entry.part == part and entry.fails:
                for cell in [cell for cell in cells if cell.source == entry.fails.strip()]:
                    yield entry, "\n".join(map(text_of, cell.outputs))


@every_entry
def test_a_pattern_begins_with_a_word_and_is_long_enough_to_be_found_in_nothing_else(entry):
    for pattern in entry.patterns:
        assert "\n" not in pattern
        assert all(errors.squeeze(piece)[0] for piece in pattern.split("*")), pattern
        assert len(bare(pattern.split("*")[0])) >= 4, pattern
        assert len("".join(piece.decode() for piece in errors.squeeze(pattern))) >= 11, pattern


@every_entry
def test_the_heading_of_an_entry_finds_it_and_what_it_quotes_finds_no_other(entry):
    # Backticks are of Markdown, or of PyTorch.
    texts = [entry.message, entry.message.replace("`", ""), entry.quoted]
    *of_heading, of_quote = ([match.error.id for match in find(text)][:1] for text in texts)
    assert entry.kind == "silent" or [entry.id] in of_heading
    assert set(of_quote) <= {entry.id, *entry.over}


def test_what_a_reproduction_printed_finds_its_entry_first():
    wrong = {}
    for entry, text in outputs():
        found = [match.error.id for match in find(text)]
        # What stands in for a GPU may say something else, but nothing that another entry claims.
        allowed = [[entry.id], []] if entry.stand_in else [[entry.id]]
        if entry.patterns and found[:1] not in allowed and entry.kind != "silent":
            wrong[entry.id] = found
    assert wrong == {}


def test_no_two_entries_claim_the_same_line():
    """Unless one of them is over the other, and then only it is found."""
    texts = [text for _, text in outputs()]
    texts += [text for entry in catalogue().values() for text in (entry.message, entry.quoted)]
    claimed = set()
    for line in {line for text in texts for line in text.splitlines()}:
        claimed |= set(combinations(sorted(match.error.id for match in find(line)), 2))
    assert claimed == set()


# --- the notebooks of the clinic ----------------------------------------------------------------


@pytest.mark.parametrize("part", errors.parts())
def test_the_notebooks_say_what_the_catalogue_says(part):
    def shown(book):
        return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in book.cells]

    assert shown(notebook(part)) == shown(clinic_notebook(part)), "run tools/refresh.py"


def test_there_is_a_notebook_for_each_part_and_no_other():
    stems = {path.stem for path in (ROOT / "notebooks").glob("errors_*.ipynb")}
    assert stems == {entry.page for entry in catalogue().values()}


# What chapters raise in words of their own, or without any: nobody would look for it.
NO_ENTRY = {
    "'Net' object has no attribute 'first'",
    "'momentum'",
    "'gpu' is not a device. Write 'cpu', 'cuda', 'cuda:1' or 'mps'.",
    "rank 1 of 2 failed with ValueError: image 4711 is not an image",
    "skip or reinit: LeNet has no 'classifier.6'; is it 'classifier.5'?",
    "",
    "No module named 'nets'",  # of any import: its traceback says that a file names the module
}


def test_every_error_that_a_chapter_raises_is_in_the_catalogue():
    chapters = [
        nbformat.read(path, as_version=4)
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    ]
    raised = [
        output
        for chapter in chapters
        for cell in chapter.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    unknown = {e.evalue.split("\n")[0] for e in raised if not find(f"{e.ename}: {e.evalue}")}
    assert unknown == NO_ENTRY
