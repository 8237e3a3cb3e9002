"""The API reference: every public name has one entry, and each docstring a first sentence."""

import importlib
import inspect
import re
from collections import Counter

import pytest
from running import ROOT

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
