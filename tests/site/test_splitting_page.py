"""The programs on the pages about splitting a model and its estimates print what the pages say."""

import contextlib
import io
import re
from functools import partial

import pytest
import torch
from running import ROOT

from torchladder import launching

PROGRAM_AND_OUTPUT = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("splitting_a_model", 4), ("will_it_fit", 2)])
def test_the_pages_programs_print_what_it_says(page, count, monkeypatch):
    monkeypatch.setattr(launching, "launch", partial(launching.launch, timeout=60))
    text = (ROOT / f"book/{page}.md").read_text(encoding="utf-8")
    programs = PROGRAM_AND_OUTPUT.findall(text)
    assert len(programs) == text.count("```python") == count
    # As in a notebook: functions of __main__ travel to the ranks with their code.
    names = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for program, output in programs:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(program, page, "exec"), names)
            assert printed.getvalue() == output
