"""The API reference: every public name has one entry, which says where the book uses it."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import api_reference
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "book/api").glob("*.md")}
MODULES = re.findall(r"automodule:: (\S+)", "\n".join(SOURCES.values()))


def public(module):
    """What a module offers: ``__all__``, or all that it defines and that has no underscore."""
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
    ]
    return {f"{module.__name__}.{name}" for name in names}


def object_of(name):
    module, _dot, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="module")
def entries(pages):
    """Each name's entries, from the built pages."""
    found = [
        (term["id"], term.find_next_sibling("dd"))
        for name, page in pages.items()
        if name.startswith("book/api/")
        for term in page.select("dt.sig[id]")
    ]
    assert found
    return found


@pytest.mark.slow
def test_every_public_name_of_a_module_with_a_page_has_exactly_one_entry(entries):
    expected = set().union(*(public(importlib.import_module(name)) for name in MODULES))
    counts = Counter(name for name, _body in entries)
    assert {name: counts[name] for name in expected if counts[name] != 1} == {}
    assert {name: count for name, count in counts.items() if count > 1} == {}


def test_a_name_is_found_behind_another_name_after_a_magic_and_beside_a_mistake(tmp_path):
    cells = [
        "from torchladder import devices as d\nfrom torchclinic.tables import Table as T",
        "!nvidia-smi\nd.where_is(model).odd",
        "%%writefile train.py\nimport torchladder\ntorchladder.training.train()",
        "this is no Python; d.try_gpu()",
        "%%bash\nfor i in 1 2; do d.cpu_name; done",
        "other.where_is()",
    ]
    notebook = tmp_path / "01_a.ipynb"
    cells = [{"cell_type": "code", "source": cell} for cell in cells]
    notebook.write_text(json.dumps({"cells": cells}))
    assert api_reference.names_used(notebook) == {
        "torchladder",
        "torchladder.devices",
        "torchclinic.where.where_is",
        "torchladder.showing.Table",
        "torchladder.training",
        "torchladder.training.train",
    }


@pytest.mark.parametrize("module", MODULES)
def test_each_docstring_begins_with_a_sentence(module):
    module = importlib.import_module(module)
    things = {module.__name__: module} | {name: object_of(name) for name in public(module)}
    bad = {}
    for name, thing in things.items():
        first = (inspect.getdoc(thing) or "").split("\n\n")[0]
        if not re.match(r"[^a-z\s].*[.?]$", " ".join(first.split())):
            bad[name] = first
    assert bad == {}


@pytest.mark.slow
def test_the_commands_page_shows_what_each_command_prints(pages):
    page = pages["book/api/commands.html"]
    shown = {pre.get_text().split()[2]: pre.get_text().strip() for pre in page.select("pre")}
    assert help_of() == f"{{{','.join(shown)}}}"
    command = next(iter(shown))
    assert help_of(command) == shown[command]


def help_of(*command):
    """What a terminal shows of ``--help``; without a command, its list of commands."""
    printed = subprocess.run(
        [sys.executable, "-m", "torchclinic", *command, "--help"],
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return printed if command else re.search(r"\{.*?\}", printed)[0]
