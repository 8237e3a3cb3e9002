"""The API reference: every public name has one entry, and each docstring a first sentence."""

import importlib
import inspect
import os
import re
from collections import Counter

import pytest
from running import ROOT, ran

SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "book/api").glob("*.md"))
MODULES = re.findall(r"automodule:: (\S+)", SOURCES)


def public(module):
    """What a module offers: ``__all__``, or all that it defines and that has no underscore."""
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == module.__name__
    ]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


@pytest.mark.slow
def test_every_public_name_of_a_module_with_a_page_has_exactly_one_entry(pages):
    counts = Counter(
        term["id"]
        for name, page in pages.items()
        if name.startswith("book/api/")
        for term in page.select("dt.sig[id]")
    )
    expected = set().union(*(public(importlib.import_module(name)) for name in MODULES))
    assert {name: counts[name] for name in expected if counts[name] != 1} == {}
    assert {name: count for name, count in counts.items() if count > 1} == {}


@pytest.mark.slow
def test_the_commands_page_shows_what_each_command_prints(pages):
    page = pages["book/api/commands.html"]
    shown = {pre.get_text().split()[2]: pre.get_text().strip() for pre in page.select("pre")}
    assert help_of() == f"{{{','.join(shown)}}}"
    command = next(iter(shown))
    assert help_of(command) == shown[command]


def help_of(*command):
    """What a terminal shows of ``--help``; without a command, its list of commands."""
    env = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    printed = ran("python", "-m", "torchclinic", *command, "--help", env=env).strip()
    return printed if command else re.search(r"\{.*?\}", printed)[0]
