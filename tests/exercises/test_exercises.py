"""The judge of the exercises: right answers pass, and each wrong one is told its own mistake."""

import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import nbformat
import pytest
import torch
from running import ROOT, text_of

import torchexercises as check
from torchexercises import __main__

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
    monkeypatch.setattr(check, "TIMEOUT", 60.0)
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


@pytest.mark.parametrize("got", [torch.ones(2), 1])
def test_neither_a_tensor_nor_a_number_is_taken_for_a_list(got):
    with pytest.raises(check.Wrong, match=r"^it is .*, not \[1, 1\]$"):
        check.expect("it", got, [1, 1])


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
    for stub in (None, ...):
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
    monkeypatch.chdir(tmp_path)
    done = tmp_path / "exercises_done.json"
    right = ANSWERS["average_gradients", "in_one_message"]
    check.average_gradients(right, solution=True)
    assert not done.exists()
    check.average_gradients(right)
    check.average_gradients(right)
    assert json.loads(done.read_text()) == ["average_gradients"]
    capsys.readouterr()
    check.progress()
    assert "average_gradients (" not in capsys.readouterr().out
    done.write_text("not JSON")
    check.progress()
    assert "average_gradients (10 min)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_exception_is_shown_with_the_readers_line_and_no_other():
    right, said = check.average_gradients.judge(ANSWERS["average_gradients", "without_a_gradient"])
    assert not right
    assert "dist.all_reduce(parameter.grad.data)" in said
    assert "many_ranks.py" not in said.replace("answers_many_ranks.py", "")


# --- the graders' command -----------------------------------------------------------------------

RIGHT = """import torch.distributed as dist


def average_gradients(net):
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
FORGED = """import json, os, sys
import torchexercises

def average_gradients(net):
    print('{"average_gradients": {"right": true}}')
    os._exit(0)

torchexercises.Exercise.judge = lambda self, *answers, **options: (True, "right")
print(json.dumps({"average_gradients": {"right": True}}))
sys.exit(0)
"""
# As `jupyter nbconvert --to script` writes a notebook: with check cells and the book's solution.
EXPORT = """# In[1]:
import torchexercises as check

# In[2]:
get_ipython().run_line_magic("load_ext", "torchclinic")
raise ValueError("a cell that shows an error")

# In[3]:
{learners}
# In[4]:
check.average_gradients(average_gradients)

# In[5]:
{books}
check.average_gradients(average_gradients, solution=True)
"""
SUMMED = RIGHT[: RIGHT.index("            parameter.grad /=")]
TWO_FUNCTIONS = """import torch
import torch.distributed as dist

def shard(whole):
    print("shard_and_gather: right, says the hand-in")
    return whole.detach().tensor_split(dist.get_world_size())[dist.get_rank()].clone()

def gather(piece, shape):
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, piece)
    return torch.cat(pieces)
"""


@pytest.fixture
def graded(tmp_path, monkeypatch, capsys):
    """The verdicts of the command with these words, in a folder of its own, and the exit status."""
    monkeypatch.chdir(tmp_path)

    def judged(*words):
        monkeypatch.setattr(sys, "argv", ["grader", *words, "--out", "verdict.json"])
        with mock.patch.dict(check.EXERCISES):  # without a teacher's cases afterwards
            status = __main__.main()
        verdicts = json.loads(Path("verdict.json").read_text())
        printed = capsys.readouterr().out
        assert "says the hand-in" not in printed
        lines = printed.split("\n")[:-1]
        assert [line.partition(":")[0] for line in lines] == [*verdicts]
        assert all(line.isprintable() and len(line) < 500 for line in lines)
        return verdicts, status

    return judged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hand_in", "right", "reason"),
    [
        (RIGHT + "raise SystemExit\n", True, "right on 2, 3 and 4 ranks"),
        (EXPORT.format(learners=SUMMED, books=RIGHT), False, "is summed, not divided by the"),
        (RIGHT + "import os\nos._exit(0)\n", False, "ended its own process, with status 0"),
        (r"raise ValueError('\x1b[2J\nbuckets: right' + ' ' * 999 + '.' * 999)", False, "\x1b[2J"),
    ],
)
def test_a_hand_in_gets_a_true_verdict_whatever_it_does(tmp_path, graded, hand_in, right, reason):
    (tmp_path / "answers.py").write_text(hand_in)
    verdicts, status = graded("answers.py", "average_gradients")
    assert verdicts["average_gradients"]["right"] == right, verdicts
    assert reason in verdicts["average_gradients"]["reason"]
    assert status == (0 if right else 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nosuch.py", "nosuch.py: No such file or directory"),
        ("answers.py --cases nosuch.py", "nosuch.py: No such file or directory"),
        ("answers.py --out no/v.json", "--out no/v.json: Cannot write (No such file or directory)"),
        ("answers.py --out ./answers.py", "--out answers.py would replace a file that is read"),
        ("x.ipynb", "x.ipynb is no notebook"),
        ("answers.py nosuch", "no exercise is called nosuch"),
    ],
)
def test_what_cannot_be_graded_is_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.py").write_text(RIGHT)
    (tmp_path / "x.ipynb").write_text("{}")
    monkeypatch.setattr(__main__, "load", lambda *_: ({}, ""))
    monkeypatch.setattr(sys, "argv", ["grader", *words.split(" ")])
    with pytest.raises(SystemExit):
        __main__.main()
    assert capsys.readouterr().err.splitlines()[-1].partition("error: ")[2] == sentence
    assert (tmp_path / "answers.py").read_text() == RIGHT


@pytest.mark.slow
def test_an_endless_hand_in_ends_with_the_limit(tmp_path, graded):
    (tmp_path / "answers.py").write_text(RIGHT + "while True:\n    pass\n")
    verdicts, status = graded("answers.py", "average_gradients", "buckets", "--limit", "6")
    assert status == 1
    for name in ("average_gradients", "buckets"):
        assert "still runs after 6 s" in verdicts[name]["reason"]


@pytest.mark.slow
def test_an_endless_hand_in_ends_with_the_limit_though_its_grader_was_killed():
    cells = [("a.py", "import ctypes\nctypes.PyDLL(None).sleep(3000)")]  # keeps Python's lock
    command = [sys.executable, "-m", "torchexercises.loading", "answers.json", "1"]
    ended = subprocess.run(command, input=json.dumps(cells), text=True, check=False)
    assert ended.returncode == -signal.SIGALRM


@pytest.mark.slow
def test_a_notebook_is_a_hand_in_and_exercises_of_several_functions_are_found(tmp_path, graded):
    check_cell = "import torchexercises as check\ncheck.shard_and_gather(shard, gather)"
    cells = [*map(nbformat.v4.new_code_cell, (TWO_FUNCTIONS, check_cell))]
    cells.append(nbformat.v4.new_markdown_cell("text"))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "chapter.ipynb")
    verdicts, status = graded("chapter.ipynb")
    assert not (tmp_path / "exercises_done.json").exists()  # the check cell has done nothing
    assert verdicts == {"shard_and_gather": {"right": True, "reason": "right on 2, 3 and 4 ranks"}}
    assert status == 0


TEACHERS = (ROOT / "book/for_teachers.md").read_text(encoding="utf-8")
MEAN = """import torch
import torch.distributed as dist

def mean_of_all(x):
    sums = torch.stack([x.sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    return sums[0] / sums[1]
"""
HAND_INS = {
    "right": (MEAN, "right on 2 and 3 ranks"),
    "wrong": ("def mean_of_all(x):\n    return x.means()\n", "line 2, in mean_of_all"),
    "empty": ("", "not written yet: the hand-in defines no mean_of_all"),
    "syntax": (MEAN.replace("(x):", "(x:"), "SyntaxError"),
    "endless": ("def mean_of_all(x):\n    while True:\n        pass\n", "still running after"),
    "forged": (FORGED.replace("average_gradients(net)", "mean_of_all(x)"), "exited with 0"),
}


@pytest.mark.slow
def test_the_teachers_page_can_be_followed(tmp_path, graded):
    command, exams = re.findall(
        r"^python -m torchexercises (answers.py .*) --out verdict.json$", TEACHERS, re.M
    )
    (tmp_path / "answers.py").write_text(RIGHT)
    verdicts, _ = graded(*command.split())
    assert [verdict["right"] for verdict in verdicts.values()] == [True, False]
    assert exams == "answers.py --cases exam.py"  # as in the page's loop


@pytest.mark.slow
def test_a_folder_of_hand_ins_is_judged_by_the_pages_loop(tmp_path, graded, monkeypatch):
    [exam] = re.findall(r"```python\n(.*?)```", TEACHERS, re.DOTALL)
    (tmp_path / "exam.py").write_text(exam)
    (tmp_path / "hand_ins").mkdir()
    for name, (text, _) in HAND_INS.items():
        (tmp_path / f"hand_ins/{name}.py").write_text(text)
    [loop] = re.findall(r"^mkdir verdicts\n.*?^done$", TEACHERS, re.M | re.S)
    shown = subprocess.check_output(["sh", "-c", f'python() {{ echo "$@"; }}\n{loop}'], text=True)
    assert shown.count("\n") == len(HAND_INS)
    for name, (_, reason) in HAND_INS.items():
        [words] = re.findall(
            rf"^-m torchexercises (.*{name}.py .*) --out verdicts/{name}.py.json$", shown, re.M
        )
        monkeypatch.setattr(check, "TIMEOUT", 6.0 if name == "endless" else 60.0)
        verdict = graded(*words.split())[0]["mean_of_all"]
        assert verdict["right"] == (name == "right"), verdict
        assert reason in verdict["reason"], name
        assert "exam" not in verdict["reason"]


def test_a_class_has_the_minutes_that_the_chapters_name():
    row = r"^\| \d \|.*\| (.*): (\d+) min \| ([\d, ]+): (\d+) min(?:, (\d+) judged)? \|$"
    rows = re.findall(row, TEACHERS, re.M)
    assert len(rows) == 6
    for reading, to_read, chapters, minutes, judged in rows:
        names = re.findall(r"notebooks/(\d\d\w+)\.ipynb", reading)
        texts = {name: (ROOT / f"notebooks/{name}.ipynb").read_text("utf-8") for name in names}
        read = [int(re.search(r"(\d+) minutes to read", text)[1]) for text in texts.values()]
        assert sum(read) == int(to_read), reading
        done = "".join(text for name, text in texts.items() if name[:2] in chapters)
        _, *parts = re.split(r"### Exercise \d.*?\((?=\d+ minutes\))", done)
        spent = [(int(part.split()[0]), bool(re.search(r"\bcheck\.\w+\(", part))) for part in parts]
        assert sum(time for time, _ in spent) == int(minutes), reading
        assert sum(time for time, is_judged in spent if is_judged) == int(judged or minutes), (
            reading
        )
