"""The judge of the exercises: right answers pass, and each wrong one is told its own mistake."""

import importlib
import inspect
import json
import subprocess
import sys
import time
from collections import Counter

import nbformat
import pytest
import torch
import torch.distributed as dist
from running import ROOT, text_of

import torchexercises as check
from torchexercises.__main__ import main

EXERCISES = check.all_exercises()
ANSWERS = {
    (name, answer.__name__): answer
    for module in check.CASES
    for name, answers in vars(importlib.import_module(f"answers_{module}")).items()
    if name in EXERCISES
    for answer in vars(answers).values()
    if inspect.isfunction(answer) or inspect.isclass(answer)
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), ANSWERS)
def test_an_answer_is_told_what_it_is(name, kind, monkeypatch):
    monkeypatch.setattr(check, "TIMEOUT", 8.0)
    answer = ANSWERS[name, kind]
    # Where an exercise asks for several functions, the answer makes them.
    several = len(inspect.signature(EXERCISES[name].cases).parameters) > 1
    right, said = EXERCISES[name].judge(*(answer() if several else [answer]))
    print(f"{name} | {kind} | {said}")
    assert (right, answer.__doc__ == "right") in [(True, True), (False, False)], said
    assert answer.__doc__ in said


@pytest.mark.parametrize(
    ("got", "right"),
    [("a" * 99, "a" * 98 + "b"), ([1] * 99, [1] * 98 + [2]), (torch.tensor(1.0002), torch.ones(())),
     (torch.arange(99), torch.arange(99).clamp(max=97))],
)  # fmt: skip
def test_two_values_that_begin_alike_are_shown_where_they_differ(got, right):
    with pytest.raises(check.Wrong) as error:
        check.expect("it", got, right)
    shown = str(error.value).removeprefix("it is ").split(", not ")
    assert len({*shown}) == 2
    assert max(map(len, shown)) <= 60


@pytest.mark.parametrize("name", EXERCISES)
def test_its_page_has_the_stub_and_a_solution_that_is_right(name):
    [page] = (ROOT / "notebooks").glob(f"{EXERCISES[name].chapter}_*.ipynb")
    cells = [cell for cell in nbformat.read(page, 4).cells if f"check.{name}(" in cell.source]
    said = ["".join(map(text_of, cell.outputs)) for cell in cells]
    stub, solution = said
    assert stub == f"{name}: not written yet\n"
    assert solution.splitlines()[-1].startswith(f"{name}: right")
    assert "hide-cell" in cells[1].metadata.tags


def test_what_is_left_out_is_not_written_yet_and_an_exercise_that_is_not_there_is_named():
    for stub in (None, ..., {"a": 1, "b": ...}):
        assert check.average_gradients.judge(stub) == (False, "not written yet")
    with pytest.raises(AttributeError, match="no exercise is called 'averages'"):
        _ = check.averages


@pytest.mark.slow
def test_a_hint_comes_with_the_second_wrong_try(monkeypatch, capsys):
    monkeypatch.setattr(check, "WRONG_TRIES", Counter())
    for hints in (0, 1):
        check.average_gradients(ANSWERS["average_gradients", "summed"])
        assert capsys.readouterr().out.count("Hint: ") == hints


@pytest.mark.slow
def test_what_is_right_is_done_until_its_file_is_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "DONE", tmp_path / "done.json")
    right = ANSWERS["average_gradients", "in_one_message"]
    check.average_gradients(right, solution=True)
    assert not check.DONE.exists()
    check.average_gradients(right)
    check.average_gradients(right)
    assert json.loads(check.DONE.read_text()) == ["average_gradients"]
    capsys.readouterr()
    check.progress()
    assert "average_gradients (" not in capsys.readouterr().out
    check.DONE.write_text("not JSON")
    check.progress()
    assert "average_gradients (10 min)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hang_ends_and_names_the_rank_that_waited(monkeypatch):
    def waits(net):
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(60)  # told as it stands, and so no sign of a Broken pipe

    monkeypatch.setattr(check, "TIMEOUT", 3.0)
    right, said = check.average_gradients.judge(waits)
    assert not right
    assert said.startswith("rank 0 and rank 1 of 2 still running after 3 s")
    assert "dist.barrier()" in said
    assert "time.sleep(60)" in said


@pytest.mark.slow
def test_an_exception_is_shown_with_the_readers_line_and_no_other():
    right, said = check.average_gradients.judge(ANSWERS["average_gradients", "without_a_gradient"])
    assert not right
    assert "dist.all_reduce(parameter.grad.data)" in said
    assert "many_ranks.py" not in said.replace("answers_many_ranks.py", "")


@pytest.mark.slow
def test_a_grader_gets_json_and_an_exit_status(tmp_path, monkeypatch, capsys):
    answers = tmp_path / "answers.py"
    source = inspect.getsource(ANSWERS["average_gradients", "summed"])
    source = "import torch.distributed as dist\n" + inspect.cleandoc("\n" + source)
    source = source.replace("def summed", "def average_gradients")
    answers.write_text(source)
    command = [sys.executable, "-m", "torchexercises", answers, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert not json.loads(done.stdout)["average_gradients"]["right"]
    mended = "                parameter.grad /= dist.get_world_size()\n"
    answers.write_text(source + "\n" + mended[4:])
    monkeypatch.setattr(sys, "argv", ["check", str(answers), "--json"])  # PyTorch is imported here
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["average_gradients"]["right"]
