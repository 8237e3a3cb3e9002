"""The catalogue of errors holds what its head promises, links to what exists, quotes rightly."""

import mmap
import re
from dataclasses import fields
from itertools import combinations
from pathlib import Path

import nbformat
import pytest
import torch
from running import ROOT, text_of

from tools.clinic_notebooks import NEEDS, PARTS, clinic_notebook, with_new_tables
from tools.clinic_notebooks import TORCH as QUOTED_TORCH
from torchclinic import errors
from torchclinic.errors import catalogue, find
from torchclinic.errors.entries import KINDS
from torchclinic.errors.squeezing import squeeze

TORCH = Path(torch.__file__).parent
ENTRIES = list(catalogue().values())
# C++ that only some builds of PyTorch hold: elsewhere nobody can look up what is quoted from it.
ONLY_WITH = {
    r"(c10/cuda|torch/csrc/(Cuda|cuda|distributed/c10d)).*": torch.version.cuda is not None,
    r"(aten/src/ATen/native/cud(a|nn)|torch/include/ATen/cudnn)/.*": torch.version.cuda is not None,
    r"aten/src/ATen/mps/.*": torch.backends.mps.is_built(),
}
NO_CELL = ("silent", "2 gpus")  # what hangs two GPUs can be neither shown nor quoted


def test_ids_and_headings_are_unique_and_ids_can_be_typed():
    ids = [entry["id"] for part in PARTS for entry in errors.page(part)["error"]]
    for names in (ids, [entry.title for entry in ENTRIES]):
        assert sorted(set(names)) == sorted(names)
    assert [name for name in ids if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []


def test_fields_are_of_their_types_and_name_what_exists():
    kinds = {str: str, bool: bool, list[str]: list}
    for entry in ENTRIES:
        mistyped = [f for f in fields(entry) if type(getattr(entry, f.name)) is not kinds[f.type]]
        assert mistyped == [], entry.id
        assert entry.part in PARTS, entry.id
        assert entry.kind in KINDS, entry.id
        assert entry.needs in NEEDS, entry.id
        assert set(entry.over) <= set(catalogue()) - {entry.id}, entry.id


def test_an_entry_says_in_short_why_and_what_to_do_and_shows_both():
    for entry in ENTRIES:
        cells = f"{entry.fails}{entry.works}".strip()
        shown = cells or entry.quoted.strip() or (entry.kind, entry.needs) == NO_CELL
        assert shown or entry.needs == "elsewhere", entry.id
        assert bool(entry.quoted) == bool(entry.source), entry.id
        assert entry.patterns or entry.kind in ("silent", "follows"), entry.id
        prose = f"{entry.cause}\n{entry.fix}"
        assert not re.search(r"^ *\d+[.)] ", prose, re.M), (entry.id, "Markdown makes a list of it")
        for text in entry.in_brief:
            sentence = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", text).split())
            assert len(sentence) <= 110, (entry.id, sentence)
            assert sentence.endswith((".", ":")), (entry.id, sentence)
            assert "](#" not in text, (entry.id, "on another page, such a link leads nowhere")
        # A heading is in words; the message is one line, and holds those of PyTorch in backticks.
        assert 0 < len(entry.title) <= 70, entry.id
        assert "\n" not in entry.message, entry.id
        assert len(entry.threads) <= 3, entry.id
        assert all(thread.startswith("https://") for thread in entry.threads), entry.id
        assert len(entry.message) <= 170, entry.id
        assert "`" in entry.message or entry.kind == "silent", entry.id
        for lines in (entry.fails.splitlines(), entry.works.splitlines()):
            assert len([line for line in lines if line.strip()]) <= 30, entry.id
            assert max(map(len, lines), default=0) <= 100, entry.id


def test_an_entry_without_a_message_is_once_in_the_index_of_symptoms():
    text = (ROOT / "book/errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[\]\(\.\./notebooks/errors_\w+\.ipynb#([\w-]+)\)$", text, re.M)
    assert sorted(set(listed)) == sorted(listed)
    silent = {entry.id for entry in ENTRIES if entry.kind == "silent"}
    assert silent <= set(listed) <= set(catalogue())


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
@pytest.mark.skipif(not torch.__version__.startswith(f"{QUOTED_TORCH}."), reason="of another one")
def test_what_is_quoted_stands_in_the_installed_pytorch():
    missing = []
    for entry in ENTRIES:
        lacking = [path for path, here in ONLY_WITH.items() if not here]
        if not entry.quoted or any(re.fullmatch(path, entry.source) for path in lacking):
            continue
        # A * or ... leaves out what the program fills in.
        pieces = [piece.strip() for piece in re.split(r"\.\.\.|\*", entry.quoted) if bare(piece)]
        assert sum(map(len, pieces)) >= 20, entry.id
        source = TORCH.parent / entry.source
        there = bare(source.read_text()) if source.is_file() else ""
        for piece in pieces:
            if not (bare(piece) in there if there else in_compiled_torch(piece)):
                missing.append((entry.id, piece))
    assert missing == []


def test_the_version_that_is_quoted_is_the_one_that_is_tested():
    tested = re.search(
        r"^torch==(\d+\.\d+)", (ROOT / "tools/locks/newest.txt").read_text(), re.MULTILINE
    )
    assert tested[1] == QUOTED_TORCH


# --- patterns -----------------------------------------------------------------------------------


def notebook(part):
    return nbformat.read(ROOT / "notebooks" / f"errors_{part}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def reproduced():
    """Entries, each with what the cell that shows it printed or raised."""
    cells = [cell for part in PARTS for cell in notebook(part).cells if cell.cell_type == "code"]
    first = {cell.id.rpartition("-")[0]: cell for cell in reversed(cells)}
    shown = [(entry, first[entry.id].outputs) for entry in ENTRIES if entry.fails]
    return [(entry, "\n".join(map(text_of, outputs))) for entry, outputs in shown]


def test_a_pattern_begins_with_a_word_and_is_long_enough_to_be_found_in_nothing_else():
    for entry in ENTRIES:
        for pattern in entry.patterns:
            (squeezed,) = squeeze(pattern)
            first, *others = squeezed.split("*")
            assert all(others), (entry.id, pattern)
            assert len(bare(first)) >= 4, (entry.id, pattern)
            assert len(squeezed) >= 11 or "nan" in squeezed.lower(), (entry.id, pattern)


def test_the_heading_of_an_entry_finds_it_and_what_it_quotes_finds_no_other():
    for entry in ENTRIES:
        # Backticks are of Markdown, or of PyTorch.
        texts = [entry.message, entry.message.replace("`", ""), entry.quoted]
        *of_heading, of_quote = ([match.error.id for match in find(text)][:1] for text in texts)
        assert entry.kind == "silent" or [entry.id] in of_heading, entry.id
        assert set(of_quote) <= {entry.id, *entry.over}, entry.id


def test_what_a_reproduction_printed_finds_its_entry_first(reproduced):
    wrong = {}
    for entry, text in reproduced:
        found = [match.error.id for match in find(text)]
        # What stands in for a GPU may say something else, but nothing that another entry claims.
        allowed = [[entry.id], []] if entry.stand_in else [[entry.id]]
        if entry.patterns and found[:1] not in allowed and entry.kind != "silent":
            wrong[entry.id] = found
    assert wrong == {}


def test_no_two_entries_claim_the_same_line(reproduced):
    """Unless one of them is over the other, and then only it is found."""
    texts = [text for _, text in reproduced]
    texts += [text for entry in ENTRIES for text in (entry.message, entry.quoted)]
    claimed = set()
    for line in {line for text in texts for line in text.splitlines()}:
        claimed |= set(combinations(sorted(match.error.id for match in find(line)), 2))
    assert claimed == set()


# --- notebooks ----------------------------------------------------------------------------------


def test_the_notebooks_of_the_clinic_say_what_the_catalogue_says():
    def shown(book):
        return [(c.id, c.cell_type, c.source, c.metadata.get("tags", [])) for c in book.cells]

    for part in PARTS:
        assert shown(notebook(part)) == shown(clinic_notebook(part)), "run make refresh"


def test_the_tables_in_the_chapters_say_what_the_catalogue_says():
    chapters = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert [path.name for path, _ in with_new_tables(chapters)] == [], "run make refresh"


# What chapters raise in words of their own, or without any: nobody would look for it. The packages'
# own errors say what to do. Of each, the first 60 letters.
NO_ENTRY = {
    "'Net' object has no attribute 'first'",
    "rank 1 of 2 failed with ValueError: image 4711 is not an ima",
    "both.pt: several state dicts in it ('student', 'teacher'). C",
    "step_00000020.pt is of another run: epochs was 2, now 3. Go ",
}


def test_every_error_that_a_chapter_raises_is_in_the_catalogue():
    unknown = set()
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for output in [output for cell in cells for output in cell.get("outputs", [])]:
            if output.output_type == "error" and not find(f"{output.ename}: {output.evalue}"):
                unknown.add(output.evalue.split("\n")[0][:60])
    assert unknown == NO_ENTRY
