"""The programs on the page about other ways to split a model print what the page says."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from torchladder import launching

PAGE = Path(__file__).resolve().parents[2] / "book" / "splitting_a_model.md"
PROGRAM_AND_OUTPUT = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_pages_programs_print_what_it_says(monkeypatch):
    monkeypatch.setattr(launching, "launch", partial(launching.launch, timeout=60))
    text = PAGE.read_text(encoding="utf-8")
    programs = PROGRAM_AND_OUTPUT.findall(text)
    assert len(programs) == text.count("```python") == 3
    # As in a notebook: functions of __main__ travel to the ranks with their code.
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for program, output in programs:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(program, str(PAGE), "exec"), names)
            assert printed.getvalue() == output
