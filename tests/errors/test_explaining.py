"""``torchclinic explain``: a log or an entry's id in; why, and what to do, out."""

import io
import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from running import ran

from torchclinic import cli, errors, logs
from torchclinic.errors import asking, cases, catalogue, entries, telling
from torchclinic.errors.terminal import without_links

LOG = """loading epoch_3.pt
RuntimeError: Error(s) in loading state_dict for Linear:
\tMissing key(s) in state_dict: "weight", "bias".
\tUnexpected key(s) in state_dict: "module.weight", "module.bias".
"""
LOGS = Path(__file__).parent / "logs"
WITHOUT_TORCH = """
import sys
sys.modules |= dict.fromkeys(["torch", "numpy", "torchladder", "IPython"])  # none can be imported
import torchclinic.errors, torchclinic.frames, torchclinic.cli
torchclinic.cli.main()
"""


@pytest.fixture
def explain(capsys, monkeypatch):
    """Exit status and what is printed, in this process; a terminal unless there is `given`."""

    def answer(*arguments, given=None):
        stdin = SimpleNamespace(isatty=lambda: given is None, buffer=io.BytesIO(given or b""))
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as ended:
            cli.main(["explain", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return answer


def test_a_log_in_a_file_or_in_the_standard_input_is_explained(explain, tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    answers = {explain(path), explain(given=LOG.encode()), explain("-", given=LOG.encode())}
    ((status, out, err),) = answers
    assert (status, err) == (0, "")
    assert out.startswith("In your log, line 4: Unexpected key(s) in state_dict")
    assert "\n\nmodule-prefix: Keys begin with module.\n" in out
    cause, fix = catalogue()["module-prefix"].in_brief
    assert f"Why: {cause[:30]}" in out
    assert f"Do: {fix[:30]}" in out
    assert out.endswith("torchclinic explain module-prefix\n")
    _, out, _ = explain(given=f"{LOG}\nIndexError: Target 10 is out of bounds.\n".encode())
    assert "Also in your log:\n  line 6, target-out-of-bounds: " in out


def test_beside_the_case_of_the_log_a_long_list_of_others_is_left_to_the_entry(explain):
    log = "No slot '4' specified on host 'localhost'"
    _, out, _ = explain(given=f"ValueError: {log}\n".encode())
    assert "\nDo:\n\n- `No slot`: " in out
    assert "\n\nOtherwise: " in out
    assert "- `DP world size of`" not in out
    assert "- `DP world size of`" in explain("deepspeed-settings")[1]


def case_of(log):
    """The case of the first entry that comes first, if one does."""
    match = errors.find(log)[0]
    fix = cases.this_case_first(match.error, match.place)
    return fix[2:] if "\n\nOtherwise: " in fix else ""


def test_a_long_traceback_names_a_case():
    frames = 'File "a.py", line 3, in evaluation_loop\n' + 'File "/x/y.py", line 3, in f\n' * 28
    full = "CUDA out of memory. 20.00 GiB is free. Tried to allocate 1.00 GiB"
    for above in ("", "Traceback (most recent call last):\n", "step 1\n" * 40):
        case = case_of(f"{above}{frames}OutOfMemoryError: {full}")
        assert case.startswith("Only in evaluation"), above


def test_a_log_leads_to_its_case():
    """``cases.tsv``: how the case begins, or nothing; then a log, whose lines are parted by \\n."""
    text = Path(__file__).with_name("cases.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line[0] != "#"]
    for case, log in rows:
        told = case_of(log.replace("\\n", "\n"))
        assert (told.startswith(case), bool(told)) == (True, bool(case)), log
    assert len(rows) >= 72


def test_the_samples_of_a_batch_differ_also_where_a_log_names_a_way_to_split_a_model():
    for error in (
        "RuntimeError: stack expects each tensor to be equal size, but got [3, 32] at entry 0",
        "RuntimeError: Trying to resize storage that is not resizable",
    ):
        (match,) = errors.find(f"use_fsdp: false\n[INFO] deepspeed\n{error}\n\nFSDP")
        assert match.error.id == "stack-sizes"


def test_what_numbers_decide_is_a_case_of_an_entry():
    for name, decided in cases.DECIDED.items():
        rules = [rules for _, rules in cases.cases_of(catalogue()[name]) if rules]
        assert rules == [*decided.values()], name


HEALTHY = """epoch 1: loss 0.5, val_error: 0.23, test error 0.21, train/error=0.2
UserWarning: The dataloader does not have many workers
E0000 Unable to register cuDNN factory: Attempting to register factory
{'mean_squared_error': 1.5, 'error_rate': 0.07}, 0 errors, failed: 0
"""


def test_a_log_without_an_error_is_told_so(explain):
    status, out, _ = explain(given=HEALTHY.encode())
    assert (status, out.partition(":")[0]) == (1, "There is no error in this log")
    assert "To ask others" not in out
    for line in ("10 errors", "CUDA error: 700", "test error", "Error 0.5.1 is too old: failed"):
        assert explain(given=(HEALTHY + line).encode())[1].startswith("No entry"), line


def test_good_logs_of_frameworks_hold_no_error(explain):
    for log in (
        "h:1:1 [0] NCCL INFO Failed to open libibverbs.so[.1]\nh:1:1 [0] NCCL INFO Init COMPLETE",
        "a.py:457: FutureWarning: This is deprecated and cannot stay\n{'loss': 0.5}",
        "[INFO] Invalidate trace cache @ step 10: expected module 1, but got module 2",
        "step 1: 0.5\njob 7 ended: exit code 0",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 6553, reducing to 3276",
        "[2023-03-01 10:00:00,1] [INFO] fail_on_nan: on\n[rank1]: WARNING: libaio was not found",
    ):
        assert explain(given=log.encode())[1].startswith("There is no error in this log"), log
    assert explain(given=b"exit code 1")[1].startswith(telling.UNKNOWN)


def test_a_log_of_warnings_alone_is_said_to_hold_no_error(explain):
    warning = "UserWarning: Plan failed with a cudnnException: CUDNN_BACKEND"
    says = "This log has no error message, but this notice"
    assert explain(given=f"{HEALTHY}{warning}\n".encode())[1].startswith(says)
    for line in ("Killed", "OSError: no such file", "The job failed"):
        assert says not in explain(given=f"{HEALTHY}{warning}\n{line}\n".encode())[1], line


def test_for_words_what_is_near_is_said_first_and_for_a_message_that_no_entry_has_it(explain):
    for said in ("the gpu is idle most of the time, no error", "python killed in wsl"):
        assert explain(said)[1].startswith(telling.NEAREST), said
    message = "RuntimeError: the ranks hang in the validation"
    assert explain(message)[1].startswith(f"{telling.UNKNOWN} {telling.NEAREST}")
    assert "Its error, in line 1: train.py: no lr" in explain("train.py: no lr")[1]
    assert "What to do: WSL has half" in " ".join(explain("python killed in wsl")[1].split())


def test_an_unknown_error_has_the_status_1_and_what_to_collect_is_said(explain):
    status, out, err = explain(given=b"RuntimeError: no state_dict that a worker could load\n")
    assert (status, err) == (1, "")
    assert out.startswith("No entry of the catalogue has these words.")
    assert "torchclinic doctor" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_hint_before_an_error_does_not_hide_it(explain):
    hint = "# If you get CUDA out of memory, lower --batch\n"
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate ... GPU 0 has a total capacity"
    assert explain(given=hint.encode())[0] == 1
    assert explain(given=f"{hint}{error}\n".encode())[1].startswith("In your log, line 2:")


def test_what_somebody_says_leads_to_what_is_nearest(explain):
    said = "loss grows when I accumulate gradients"
    answers = {explain(said)[1], explain(*said.split())[1], explain(given=said.encode())[1]}
    answers.add(explain(given=said.replace(" when", "\nwhen").encode())[1])
    assert all("\n  accumulation-by-parts: Gradient accumulation" in out for out in answers)
    for long in (1, 30):  # which no file's name can be
        assert "\n  hang-p2p: " in explain("升级驱动后多卡训练卡住" * long)[1]
    assert "\n  all-on-gpu-0: " in explain("memory on cuda:0 is higher than on cuda:1")[1]
    said_of_time = "big pause between two epochs: an epoch trains for 6:40"
    assert "\n  workers-start-again: " in explain(said_of_time)[1]
    for logged in ("12:34:56 the training", "10.0.0.1:29500: the training"):
        assert "no error in this log" in explain(f"{logged} is slow on two gpus")[1]
    nearest = json.loads(explain("--json", said)[1])["nearest"]
    assert "notebooks/errors_training#accumulation-by-parts" in nearest
    assert 1 <= len(nearest) <= 3
    assert "\n  cuda-out-of-memory: " in (out := explain("cuda oom during validation only")[1])
    assert "What to do: Only in evaluation" in out
    long = "I have a new card, and the GPU utilization is low in my 3D net. An epoch takes an hour"
    told = asking.what_to_do(f"{long}, most of it at 0 %.", errors.catalogue()["gpu-idle"])
    assert told.startswith("Always at 0 %")  # though a case has a rare word of it
    assert "slice-saves-storage: " in explain("why is my saved tensor file so large")[1]
    ram = "the ram fills up within an epoch, with num_workers alone"
    for denied in ("It is not a CUDA out of memory", "no cuda oom", "it’s not a hang"):
        assert asking.nearest(f"{ram}. {denied}") == asking.nearest(ram), denied
    assert telling.NEAREST not in explain(given=HEALTHY.encode())[1]
    assert telling.NEAREST not in explain(given=LOG.encode())[1]


POST = """DDP: only one GPU works

I start my script with four GPUs, but two GPUs are no faster than one,
every epoch takes as long as before. The others stay at 0 MB.

```
[2026-01-02 10:00:00] [INFO] rank 0: step 10, loss 0.31, 2.1 it/s
[2026-01-02 10:00:05] [INFO] rank 0: step 20, loss 0.30, 2.1 it/s
```
"""


TRACEBACK = """  File "ComfyUI/comfy/sd.py", line 140, in __init__
    m, u = self.load_sd(c)
AttributeError: 'Guider' object has no attribute 'that_it_should_have'
"""


def test_of_a_post_what_somebody_says_around_a_log_is_heard(explain):
    heard = asking.said_in
    assert explain(POST)[1].startswith(telling.NEAREST)
    for post in (POST, POST.replace("```", "")):
        assert heard(post).startswith("DDP: only")
        assert "INFO" not in heard(post)
    form = "### Logs\n- [x] mine\n![picture](https://x.y/z.png) @somebody\n"
    told = heard(f"[BUG] {POST.replace('I start my', 'Start the')}{form}")
    assert told.strip().startswith("DDP: only")
    assert not set(told).intersection("#[@/")
    # Though much stands between two marks.
    two = "I call `log_dir`, and in our lab the code freezes after the first step, on `rank 0` only"
    for said in ("My training hangs in the first step on two GPUs.", two):
        assert heard(f"{said}\n\n{TRACEBACK}").strip() == said
    assert "net" not in heard(f"It hangs in `{'net(x) ' * 9}`, at noon\n{TRACEBACK}")
    assert heard("RuntimeError: the ranks hang in the validation") != ""  # one line


def test_what_programs_print_is_not_taken_for_what_somebody_says(explain):
    log = POST.partition("```")[2]
    report = TRACEBACK.replace("File", "- **Exception Message:** it has no attribute\n  File")
    rare = f"{'[INFO] step 10 | loss 0.31' * 99}\nloss is the mean, not the sum\n"
    for text in (log, TRACEBACK, f"# ComfyUI Error Report\n{report}", rare):
        assert asking.said_in(text) == "", text
    assert explain(log)[1].strip() == telling.HEALTHY
    assert "No entry knows the first error, in line 3" in explain(given=TRACEBACK.encode())[1]


def test_who_ends_a_log_by_saying_that_it_hangs_is_heard(explain):
    log = "INFO 08-31 09:50:46 pynccl.py:63] vLLM is using nccl==2.20.5\n" * 4
    assert "no error in this log" in explain(given=log.encode())[1]
    said = "vLLM hangs at this step when trying to use multiple GPUs"
    assert "\n  hang-p2p: " in explain(given=f"{log}{said}\n".encode())[1]


def test_a_readers_own_sentence_with_an_option_is_not_a_programs(explain):
    said = "vllm serve with --tensor-parallel-size 2 hangs, both GPUs at 100 %"
    assert explain(said)[1].startswith(telling.NEAREST)


def test_where_a_section_answers_what_one_sees_comes_before_an_error():
    address = "notebooks/10_inside_ddp#batch-norm-and-buffers"
    assert ": sync-batch-norm: " in telling._brief(address, "batch norm")


def test_of_two_that_say_the_same_one_is_near_and_where_nothing_is_close_that_is_said(explain):
    for said, near in [
        ("training hangs at the end of the epoch", "errors_ranks#uneven-batches"),
        ("one gpu has one more batch than the others", "errors_ranks#uneven-batches"),
        ("train on more than one machine", "19_many_machines"),
    ]:
        found = asking.nearest(said)
        assert found[0] == f"notebooks/{near}"
        assert [other for other in found if asking.twins(other).intersection(found)] == []
    status, out, _ = explain("how do I bake a chocolate cake")
    assert status == 1
    assert out.startswith(telling.NOT_CLOSE)
    assert asking.nearest("the javascript promise never resolves") == []
    long = "We moved the machine to another room last week, and our admin installed it again. Both "
    long += "cards show 100 %, but the first step hangs. A colleague in Graz has the same model."
    assert asking.nearest(long)[0] == "notebooks/errors_ranks#hang-p2p"
    message = "the workers are slower than the loop over the batches"  # which no entry has
    assert asking.nearest(message) != []
    assert asking.nearest(f"ValueError: {message}") == []
    assert asking.is_said("loss不下降，一直在0.69")
    assert not asking.is_said("loss goes no lower: 0.69 0.69 0.69")


def test_where_no_entry_is_likely_what_decides_is_asked(explain):
    for said, kind, ask in [
        ("My colleague in Graz has the same cards, and goes home earlier", "", telling.NOT_CLOSE),
        (
            "We save the file, and see the old one in the morning",
            "files",
            "torchclinic inspect FILE",
        ),
        ("Since our move, the net on the new server is slow", "slow", "nvidia-smi -l 1"),
        ("The loss of the last batch is larger", "learning", "Train on one batch"),
        ("Our two answers to one picture differ on Mondays", "results", "one sample, twice"),
        ("More memory is used since our second coffee", "memory", "memory_allocated()"),
        ("Sometimes it loads, then freezes, and the results are lost", "hangs", "py-spy dump"),
    ]:
        assert asking.nearest(said) == [], said
        assert asking.decides(said)[0] == kind, said
        _, out, _ = explain(given=said.encode())
        assert out.startswith(telling.DECIDES if kind else ask), said
        assert ask in out
        told = json.loads(explain("--json", given=said.encode())[1])
        assert told.get("decides", "") == kind
        assert "nearest" not in told
        if kind:
            first = " ".join(telling._cases(*asking.decides(said))[1].split())
            assert f"Then: - {first}" in " ".join(out.split())
            assert " ".join(told["deciding"]["cases"][0].split()) == first
            assert told["deciding"]["read"] == entries.page("deciding")[kind]["read"]
    for said, kind in [
        ("It loads the checkpoint, and the memory grows", "memory"),
        ("our lab's net isn't slow", ""),
        ("It is not really slow. The accuracy is bad", "learning"),
        ("This is not a memory leak. The accuracy is bad", "learning"),
        ("no oom, the epoch is longer", "slow"),
        ("swap the two layers please", ""),
        ("the loop of our lab stands", ""),
    ]:
        assert asking.decides(said)[0] == kind, said
    for said, case in [
        ("each worker needs more memory", "- The computer's: start with"),
        ("We see a lot more GPU memory with FSDP in Graz", "- With FSDP or ZeRO"),
        ("mAP is 0 since we moved", "- A metric is 0"),
        ("numbers lower than reported, at our lab", "- Other numbers than a"),
        ("compiled, the net of our lab is slower", "- Slower with `torch.compile`"),
        ("it hangs in Graz, where each process binds a free port", "- At the start"),
        ("our lab's net does not converge with grad accum of 8", "- N times"),
    ]:
        out = explain(given=said.encode())[1]
        # What decides is asked first: a case that only seems to be meant would mislead.
        assert not out.split("\n\n")[1].startswith("- "), said
        assert re.search(r"(?s)\n\n(- .*)", out)[1].startswith(case), said
    error = "TypeError: 'momentum' is an invalid keyword argument for Unpickler()"
    printed = explain(given=f"{error}\n\nIt comes as I load a checkpoint\n".encode())[1]
    assert telling.DECIDES not in printed  # the message asks for itself
    assert f"Its error, in line 1: {error}" in " ".join(printed.split())


def test_where_no_kind_of_symptom_is_said_a_section_that_is_ahead_answers():
    port = "notebooks/09_rung_4_distributed#the-port-is-in-use"
    assert asking.nearest("the port is already in use, an error")[0] == port


def test_each_word_names_one_kind_of_symptom_and_each_kind_is_in_the_page_and_leads_to_a_section():
    kinds = entries.page("deciding")
    page = (entries.NOTEBOOKS.parent / "book/errors.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^```\{deciding\} (.*)", page)) == sorted(kinds)
    for kind in kinds.values():
        chapter, _, anchor = kind["read"].partition("#")
        book = json.loads((entries.NOTEBOOKS / f"{chapter}.ipynb").read_text(encoding="utf-8"))
        text = "\n".join(
            "".join(c["source"]) for c in book["cells"] if c["cell_type"] == "markdown"
        )
        headings = re.findall(r"(?m)^#+ (.*)", text)
        assert anchor in ["-".join(re.findall(r"[\w-]+", h.lower())) for h in headings], anchor
    named = [phrase for phrases, _ in asking.kinds().values() for phrase in phrases]
    assert sorted(named) == sorted(set(named))
    for name, kind in kinds.items():
        assert len(asking.kinds()[name][1]) == kind["ask"].count("\n- ") >= 4
        for head in kind["first"]:
            assert kind["ask"].count(f"\n- {head}") == 1, head


def test_a_question_in_the_list_is_answered_by_its_section():
    rows = asking._rows("asked")[::16]
    right = [
        any(t in asking.nearest(question) for t in targets.split()) for question, targets in rows
    ]
    assert len(right) > 100
    assert sum(right) / len(right) > 0.95


ROOT = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    x = batch["k"]
  File "/usr/lib/python3.11/site-packages/x/y.py", line 77, in get
KeyError: 'k'
"""


def test_the_first_error_that_no_entry_knows_is_quoted_before_its_echo_with_the_programs_line(
    explain,
):
    said = "No entry knows the first error, in line 5: KeyError: 'k'"
    log = f"{ROOT}\nfailed (exitcode: 1) local_rank: 0 (pid: 1)"
    _, out, _ = explain(given=log.encode())
    yours = '/home/me/train.py, line 9: x = batch["k"]'
    assert out.startswith(f"{said}\n  Your line: {yours}\n\nIn your log, ")
    assert "\n\nchild-failed: " in out
    told = json.loads(explain("--json", given=log.encode())[1])["unknown"]
    assert told == {"line": 5, "text": "KeyError: 'k'", "program": yours}
    assert said in explain(given=ROOT.encode())[1]
    own = "train.py: error: --replicas 2 must divide 3"
    _, out, _ = explain(given=f"usage: train.py\n{own}\nexitcode : 2 (pid: 5)".encode())
    assert out.startswith(f"No entry knows the first error, in line 2: {own}")
    # The first attempt's, before a later one's that is known; not what was handled on the way.
    _, out, _ = explain(given=f"{ROOT}{'restarting' + chr(10) * 9}{LOG}".encode())
    assert out.startswith("In your log")
    assert f"Also in your log:\n  {said[:50]}" in out
    stub = ROOT.replace("/home/me/train.py", "/usr/local/bin/accelerate")
    assert "Your line" not in explain(given=stub.encode())[1]
    handled = "\nDuring handling of the above exception, another exception occurred:\n"
    for log in (ROOT + handled + LOG, LOG + ROOT, LOG, ROOT.splitlines()[-1]):
        assert "No entry knows" not in explain(given=log.encode())[1], log


def test_the_line_of_the_readers_program_is_shown_with_its_function_and_code(explain):
    called = "    loss.backward()\n    ^^^^^\n"
    inside = 'File "/x/site-packages/torch/_tensor.py", line 5, in backward\n'
    begun = f'Traceback (most recent call last):\nFile "a.py", line 6, in step\n{called}{inside}'
    for error in ("IndexError: Target 10 is out of bounds.", "KeyError: 'k'"):
        log = f"{begun}{error}"
        for text in (log, "\n".join(f"[rank0]: {line}" for line in log.splitlines())):
            out = explain(given=text.encode())[1]
            assert "Your line: a.py, line 6, in step: loss.backward()\n\n" in out, text
            told = json.loads(explain("--json", given=text.encode())[1])
            ((*_, last),) = [told["matches"] or [told["unknown"]]]
            assert last["program"] == "a.py, line 6, in step: loss.backward()"
        assert "Your line" not in explain(given=f"{inside}{error}".encode())[1]


def test_with_json_the_same_answer_has_a_form_for_programs(explain):
    def told(*arguments, **given):
        with published("Documentation, https://a.example/book/"):
            return json.loads(explain("--json", *arguments, **given)[1])

    logs = [f"[rank1]: {line}" for line in LOG.splitlines()]
    answer = told(given="\n".join(logs).encode())
    (match,) = answer.pop("matches")
    assert answer == {"version": 1, "other_program": ""}
    entry = catalogue()["module-prefix"]
    assert match == {
        "id": entry.id, "line": 4, "text": f"[rank1]: {LOG.splitlines()[3].strip()}",
        "rank": "rank 1", "file": "", "kind": "error", "message": entry.message,
        "cause": without_links(entry.cause).strip(),
        "fix": without_links(entry.fix).strip(), "title": entry.title,
        "program": "", "url": "https://a.example/book/notebooks/errors_states.html#module-prefix",
    }  # fmt: skip
    (asked,) = told(entry.id, given=b"")["matches"]
    assert asked == match | {"line": None, "text": "", "rank": ""}
    page = (entries.NOTEBOOKS.parent / "book/errors.md").read_text(encoding="utf-8")
    assert [name for name in {**answer, "matches": 0, **asked} if f"`{name}`" not in page] == []
    unknown = told(given=b"RuntimeError: no state_dict that a worker could load")
    assert unknown["matches"] == []
    assert told(given=b"ggml: CUDA out of memory. ")["other_program"] == "llama.cpp"


GONE = "RuntimeError: [../gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1"
TIMED = "2026-11-22 05:20:{} INFO step 7\nTraceback (most recent call last):\n"
TIMED += "  File \"a.py\", line 7, in <module>\nKeyError: 'image'\n"
OLD, NEW, OWN = (f"logs/run/attempt_{at}/stderr.log" for at in ("2/0", "10/0", "10/1"))


def test_of_several_logs_the_rank_that_failed_first_is_named(explain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for later, first in [
        ("I1122 05:20:01.5", "11-22 05:20:00,9"),
        ("01-01 00:00:03", "E1231 23:59:58.1"),
        ("2027-01-01 00:00:03", "2026-12-31 23:59:58"),
        ("2026-11-22 05:20:09.1", "20261122 05:20:09,03"),
    ]:
        texts = {f"{n}.log": f"{time} x\nKeyError: 'i'\n" for n, time in enumerate((later, first))}
        assert logs.first_to_fail(texts)["file"] == "1.log", first
    in_one_second = {f"{n}.log": TIMED.format(f"09{part}") for n, part in enumerate(["", ".5"])}
    for texts, says in [
        (in_one_second, "One failed first, by the times of the files, "),
        ({"rank0.log": GONE, "rank1.log": LOG}, "Rank 1 failed first, the only one with an error "),
        (
            {"0.log": TIMED.format(31), "1.log": TIMED.format("09")},
            "One failed first, by the times",
        ),
        ({"rank0.log": LOG, "rank1.log": LOG}, "Rank 1 failed first, by the times of the files, "),
        ({OLD: LOG, NEW: GONE, OWN: LOG}, "Local rank 1 failed first, the only one with an error "),
    ]:
        for age, (name, text) in enumerate(texts.items()):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
            os.utime(name, (-age, -age))
        what = ["logs"] if OWN in texts else texts
        told = json.loads(explain("--json", *what)[1])
        assert explain(*what)[1].startswith(says)
        assert told["first_to_fail"]["file"] == [*texts][-1]
        assert ("(a.py, line 7)" in told["first_to_fail"]["says"]) == ("0.log" in texts)
        assert told["matches"][:1] == [m for m in told["matches"] if m["file"] == [*texts][-1]]


@pytest.mark.slow
def test_what_torchrun_logged_is_read_from_its_folder_or_its_files(explain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    Path("train.py").write_text(f"{train}if dist.get_rank() == 1: 1 / 0\ndist.barrier()")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    subprocess.run([*torchrun, "--log-dir=logs", "--redirects=3", "train.py"], timeout=300)
    ((_, out, _),) = {explain("logs"), explain(*sorted(Path("logs").rglob("*.log")))}
    says = "Rank 1 failed first, the only one with an error of its own, in logs/.*/1/stderr.log: "
    where = r"\(.*train\.py, line 2: if dist\.get_rank\(\) == 1: 1 / 0\)"
    assert re.match(rf"{says}ZeroDivisionError: division by zero {where}\n\n", out)


def test_bad_input_gets_one_sentence_and_the_status_2(explain, tmp_path):
    weights, archive = tmp_path / "random.pt", tmp_path / "an_archive"
    weights.write_bytes(os.urandom(1000))
    archive.write_bytes(b"PK\x03\x04 and so on")
    for argument, given, sentence in [
        ("module-prefx", b"", "is called module-prefx. The nearest entries: module-prefix"),
        ("no/such.log", b"", "no file and no entry is called no/such.log"),
        ("", None, "give a FILE with a log, pipe one in, or name an entry"),
        ("", b"\n \n", "add 2>&1"),
        (tmp_path, b"", f"{tmp_path} holds neither logs (*.log) nor dumps"),
        ("/dev/full", b"", "/dev/full is a device"),
        (weights, b"", f"{weights} holds no text. Of a checkpoint, ask torchclinic inspect"),
        (archive, b"", f"{archive} holds no text"),
    ]:
        status, out, err = explain(*filter(None, [argument]), given=given)
        assert (status, out) == (2, ""), argument
        assert err.startswith("torchclinic explain: "), argument
        assert sentence in err
        assert err.count("\n") == 1, argument


@pytest.mark.slow
def test_what_may_never_end_is_refused_in_a_folder_and_a_pipe_is_read_only_if_named(
    explain, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs/run"
    folder.mkdir(parents=True)
    (folder / "b.log").write_text(LOG)
    (folder / "round.log").symlink_to(tmp_path)  # a folder, and a way round and round
    odd = folder / "a.log"
    for make in (
        lambda: os.mkfifo(odd),
        lambda: odd.symlink_to("/dev/zero"),
        lambda: odd.symlink_to("gone"),
        lambda: odd.symlink_to(odd),
        lambda: socket.socket(socket.AF_UNIX).bind(str(odd)),
    ):
        make()
        sentence = "logs/run/a.log is a device, a pipe, a socket or a dead link: "
        status, out, err = explain("logs")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"torchclinic explain: {sentence}")
        odd.unlink()
    assert explain("logs")[0] == 0
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"version": "2.4", "entries": []}, 2))
    for what in (["/dev/zero"], ["trace_0", "/dev/zero"]):
        assert "/dev/zero is a device" in explain(*what)[2]
    assert "no file and no entry is called trace_1" in explain("trace_0", "trace_1")[2]
    command = f'{shlex.quote(sys.executable)} -m torchclinic explain <(cat "$1")'
    assert "module-prefix" in ran("bash", "-c", command, "bash", folder / "b.log")


def test_an_entry_is_printed_whole_and_fits_a_terminal(explain):
    for name, entry in catalogue().items():
        status, out, _ = explain(name, given=b"")
        assert status == 0, name
        assert all(line.strip() in out for line in entry.quoted.splitlines()), name
        assert all(url in out for url in re.findall(r"\]\((http[^)]*)\)", entry.cause + entry.fix))
        # Code and addresses are not wrapped.
        prose = re.sub(r"(?m)^    .*|\S*[/.]\S*", "", out)
        assert max(map(len, prose.splitlines())) <= 100, name
        assert "](" not in re.sub(r"(?m)^    .*", "", out), name
        assert "\x1b" not in out, name


def test_a_log_in_any_encoding_is_read(explain):
    for log in [
        LOG.encode("utf-16"),
        b"\xfe\xff" + LOG.encode("utf-16-be"),
        LOG.encode("utf-16-le"),  # without its mark
        b"\xef\xbb\xbf" + LOG.encode(),
        b"d\xe9but \xff\xfe\n" + LOG.encode(),
        "训练报错\n".encode("gbk") + LOG.encode(),
        LOG.encode().replace(b"\n", b"\0\0\n"),
        LOG.encode() + "训".encode()[:2],
        LOG.encode("utf-16") + b"x",
    ]:
        status, out, _ = explain("-", given=log)
        assert status == 0, log
        assert "\nmodule-prefix: " in out, log


IN_LITTLE_MEMORY = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
{WITHOUT_TORCH}"""


@pytest.mark.slow
def test_long_logs_are_explained_in_little_memory(tmp_path):
    """And without torch, on a terminal of any encoding."""
    path = tmp_path / "rank0.log"
    many = "🚀 epoch 1: loss 0.523, 12,345 images/s\n" * 250_000
    path.write_text(f'{many}训练 Unexpected key(s) in state_dict: "module.weight".\n{many}')
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    said = ran("python", "-c", IN_LITTLE_MEMORY, "explain", path, env=environment)
    assert "line 250001, of rank 0: ?? Unexpected key(s)" in said
    assert "\nmodule-prefix: " in said


FILLER = "epoch 1: loss 0.523, 12,345 images/s\n" * 1800


@pytest.mark.slow
def test_of_a_long_log_the_first_and_the_last_are_read_and_it_is_said(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "MOST", 300_000)

    def read(log):
        Path("a.log").write_text(log)
        (text,) = logs.read(["a.log"]).values()
        return text, capsys.readouterr().err

    for path in sorted(LOGS.glob("*.txt"))[::6]:
        one = path.read_bytes().decode()[:100_000]
        for log in (f"{one}\n{FILLER * 6}", f"{FILLER * 6}\n{one}"):
            text, said = read(log)
            assert len(text) < len(log) / 1.2
            assert said.endswith("of a.log, too long to be read whole, the middle is left out.\n")
            assert errors.find(text) == errors.find(log), path
    assert read(FILLER * 4) == (FILLER * 4, "")
    # Two halves of a message between which much is left out are no message.
    halves = ("RuntimeError: Expected size for first", "two dimensions of")
    assert errors.find(read((FILLER * 6).join(halves))[0]) == []


def published(*urls):
    found = Message()
    for url in urls:
        found["Project-URL"] = url
    return mock.patch("torchclinic.errors.entries.metadata", return_value=found)


def test_links_lead_to_the_published_book_if_the_package_says_where_it_is(tmp_path):
    entry = catalogue()["port-in-use"]
    with published("Repository, https://b.example", "Documentation, https://a.example/book/"):
        text, section = str(entry), errors.explain("how to save a tensor to disk in pytorch")
        with mock.patch.object(entries, "NOTEBOOKS", tmp_path / "gone"):
            table = errors.of_chapter("rung_4_distributed")._repr_markdown_()
    book = "https://a.example/book/notebooks"
    assert f"{book}/errors_ranks.html#port-in-use" in text
    assert f"{book}/errors_ranks.html#port-in-use" in table
    assert f"{book}/09_rung_4_distributed.html#the-port-is-in-use" in text
    assert f"\n  {book}/01_tensors_on_disk.html#how-do-i-save-a-tensor" in section
    with published("Repository, https://b.example"):
        assert "\n    errors_ranks#port-in-use\n    09_rung_4_distributed#" in str(entry)
        section = errors.explain("how to save a tensor to disk in pytorch")
        assert "\n  01_tensors_on_disk#how-do-i-save-a-tensor" in section


def test_who_asks_at_once_is_heard_though_a_table_follows(explain):
    table = "|    1   N/A  N/A   2579941      C   .../bin/python3.9    13868MiB |\n" * 6
    asked = "Why are several processes started on GPU 0 instead of one?"
    assert "\n  all-on-gpu-0: " in explain(given=f"{asked}\n{table}".encode())[1]
    assert "no error in this log" in explain(given=f"NVIDIA-SMI 550.54\n{table}".encode())[1]
