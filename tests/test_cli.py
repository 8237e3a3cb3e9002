"""The command answers bad input with one sentence, a bug with its traceback."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import pretend, ran
from torch import nn

from torchclinic import cli
from torchclinic.errors.telling import UNKNOWN

CLINIC = [sys.executable, "-m", "torchclinic"]


def answer(capsys, *arguments):
    """Exit status and what is printed when the command runs in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, *capsys.readouterr()


# --- bad input ----------------------------------------------------------------------------------

BAD_INPUT = {
    "inspect ''": "path is empty",
    "inspect nosuch.pt": "nosuch.pt",
    "inspect a_file": "a_file",
    "fix '' -o x.pt": "path is empty",
    "fix nosuch.pt -o x.pt": "nosuch.pt",
    "fix x.pt -o x.pt": "x.pt is the source",
    "fix x.pt -o y.pt --key ema": "no weights under 'ema'",
    "fix x.pt -o z.pt --for nosuch:Net": "--for nosuch:Net: ModuleNotFoundError",
    "fix x.pt -o z.pt --for my_models:fails": "missing 1 required positional argument: 'width'",
    "fix x.pt -o z.pt --for my_models:none": "no attribute 'none'",
    "fix x.pt -o z.pt --for my_models:seven": "made a int, not a torch.nn.Module",
    "fix x.pt -o z.pt --for my_models": "Give module:Model",
    "fix x.pt -o z.pt --for ''": "--for : ValueError: Empty module name",
    "fix x.pt -o z.pt --for exits:Net": "stands under if __name__ == '__main__'",
    "doctor --timeout 5": "--timeout and --program go with --distributed, under torchrun",
    "doctor --program .": "--timeout and --program go with --distributed, under torchrun",
    "doctor --distributed --program ''": "--program is empty",
    "doctor --distributed": "RANK, LOCAL_RANK, WORLD_SIZE",
    "simulate --name 'a\nb' 2 python": "No GPU is called 'a",
    "simulate --capability=-1.5 2 python": "(-1, 5) is no compute capability",
    "simulate --capability 99999999999999.0 2 python": "is no compute capability",
    "simulate 0 python": "0 GPUs cannot be simulated: give a number from 1 to 16.",
    "simulate 2 --name A100 python": "--name goes before the number of GPUs.",
    "simulate 2": "Give the command to run",
    "simulate 2 nosuch": "nosuch is no command here",
}


MODELS = """
import torch
def net():
    return torch.nn.Linear(2, 1)
def needs_numbers():
    assert torch.ones(1).item() == 1
    return net()
def fails(width):
    pass
seven = lambda: 7
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a checkpoint, with models to fit, and with what is neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("a_file").write_bytes(b"not a checkpoint")
    Path("my_models.py").write_text(MODELS)
    Path("exits.py").write_text("import sys; sys.exit(3)")
    wrapped = nn.DataParallel(nn.Linear(2, 1))
    torch.save({"net": wrapped.state_dict(), "epoch": 3}, "x.pt")
    return sorted(os.listdir())


@pytest.mark.slow
def test_as_a_module_it_imports_nothing_from_a_strangers_folder(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    for name in ("torch", "json", "safetensors"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    assert "1 tensor" in ran(*CLINIC, "inspect", "x.pt", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bad_input_gets_one_sentence_and_writes_nothing(capsys, files):
    for command, sentence in BAD_INPUT.items():
        status, out, err = answer(capsys, *shlex.split(command))
        assert (status, out) == (2, ""), command
        assert re.fullmatch(r"torchclinic (inspect|fix|doctor|simulate): .*\n", err), command
        assert sentence in err
    assert sorted({*os.listdir()} - {"__pycache__"}) == files


@pytest.mark.parametrize("first", ["x = 1", "#!/nosuch/python"])
def test_a_program_that_the_system_cannot_run_is_one_sentence(capsys, tmp_path, first):
    (program := tmp_path / "program").write_text(first)
    program.chmod(0o755)
    status, _, err = answer(capsys, "simulate", "2", str(program))
    assert (status, err.count("\n")) == (2, 2)
    assert f"torchclinic simulate: {program} cannot be run (" in err


def test_a_message_that_repeats_words_needs_no_quotes(capsys):
    message = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    assert answer(capsys, "explain", *message.split()) == answer(capsys, "explain", message)
    assert answer(capsys, "explain", message)[0] == 0


def test_explain_has_a_sentence_where_there_is_no_standard_input():
    for words in ("explain", "explain -", "explain - -"):
        for given in ("<&-", "< /dev/null"):
            command = f"{shlex.join(CLINIC)} {words} {given}"
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
            assert done.returncode == 2, done
            assert done.stderr.startswith("torchclinic explain: nothing to read there."), done


def test_a_wrong_argument_sends_no_codes_to_the_terminal(capsys):
    status, _, err = answer(capsys, "inspect", "x.pt", "\x1b[31m")
    assert (status, err.splitlines()[-1].partition("error: ")[2]) == (
        2,
        "unrecognized arguments: ?[31m",
    )


def test_fix_fits_a_model_of_the_current_folder_and_converts_its_numbers(capsys, files):
    for name in ("net", "needs_numbers"):
        options = ["-o", "y.pt", "--for", f"my_models:{name}", "--dtype", "bf16"]
        status, out, err = answer(capsys, "fix", "x.pt", *options)
        assert status == 0, err
        assert "converted   2 tensors from float32 to bfloat16" in out
        dtypes = {key: tensor.dtype for key, tensor in torch.load("y.pt").items()}
        assert dtypes == {"weight": torch.bfloat16, "bias": torch.bfloat16}


def test_inspect_fails_if_a_number_is_not_finite_and_it_was_asked(capsys, files):
    torch.save({"w": torch.tensor([1.0, float("nan")])}, "nan.pt")
    for options, status in (["x.pt", "--verify"], 0), (["nan.pt"], 0), (["nan.pt", "--verify"], 1):
        code, out, _ = answer(capsys, "inspect", *options)
        assert code == status
        assert ("not finite  NaN or inf in 1 of 1 tensors: w (1)" in out) == ("nan.pt" in options)
        assert "checksums   right" in out


def test_a_bug_shows_its_traceback_though_it_is_a_value_error(monkeypatch):
    def with_a_bug(options):
        _first, _second = [1, 2, 3]

    monkeypatch.setattr(cli, "_doctor", with_a_bug)
    with pytest.raises(ValueError, match="too many values to unpack"):
        cli.main(["doctor"])


def test_an_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", interrupt)
    assert answer(capsys, "doctor") == (130, "", "torchclinic doctor: interrupted\n")


TORCHRUN = """W1129 15:25:15.279000 437 torch/distributed/run.py:774] *****
{}
W1129 15:25:15.279000 437 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 451 closing signal SIGTERM
E1129 15:25:15.408000 437 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 450) of binary: python3
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/distributed/run.py", line 1138, in main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_15:25:15
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 450)
"""  # noqa: E501


@pytest.mark.parametrize(
    "sentence",
    [
        "4_ddp.py: error: --lr -1.0: must be from 1e-09 to 99",
        "--data no.npy (FileNotFoundError): no .npy of more than --context numbers",
        "the following arguments are required: --out. --help lists the options",
        "Traceback (most recent call last):\n  File 'a.py', line 3, in f\nValueError: too few",
    ],
)
def test_explain_begins_with_the_programs_own_sentence_alone_and_under_torchrun(
    capsys, tmp_path, sentence
):
    for text in (sentence, TORCHRUN.format(sentence), TORCHRUN.format(f"epoch 1\n{sentence}")):
        (tmp_path / "log.txt").write_text(text)
        _, out, _ = answer(capsys, "explain", str(tmp_path / "log.txt"))
        first = out.removeprefix(f"{UNKNOWN}\n\n").partition("\n\n")[0]
        assert sentence.splitlines()[-1] in " ".join(first.split())
        assert ("torchrun says that rank 0 failed first." in out) == (text != sentence)
    (tmp_path / "log.txt").write_text(TORCHRUN.format("my run: too little data"))
    assert answer(capsys, "explain", str(tmp_path / "log.txt"))[1].startswith(
        "The program's last words, in line 2: my run: too little data"
    )


ENDED_WHILE_IT_WRITES = """
import os, signal, sys, torch, torchclinic.checkpoint_files.fixing as fixing
from torchclinic.cli import main

def ended(save):
    def saving(state, path, *more):
        written = save(state, path, *more)
        os.kill(os.getpid(), int(sys.argv[1]))
        return written
    return saving

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
torch.save, fixing.save_file = ended(torch.save), ended(fixing.save_file)
main(["fix", "x.pt", "-o", sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["y.pt", "y.safetensors"])
def test_fix_that_is_ended_while_it_writes_leaves_nothing(tmp_path, target):
    torch.save({"w": torch.zeros(1)}, tmp_path / "x.pt")
    for number, said in (
        (signal.SIGINT, (130, "torchclinic fix: interrupted\n")),
        (signal.SIGTERM, (143, "")),
        (signal.SIGHUP, (129, "")),
    ):
        command = [sys.executable, "-c", ENDED_WHILE_IT_WRITES, str(int(number)), target]
        how = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
        # Whoever started the tests, nohup or a background shell, may have it ignored.
        how["preexec_fn"] = partial(signal.signal, number, signal.SIG_DFL)
        done = subprocess.run(command, **how)
        assert (done.returncode, done.stderr) == said
        assert os.listdir(tmp_path) == ["x.pt"]


# --- where its output goes ----------------------------------------------------------------------


def run_into(stdout, words, folder=None, **environment):
    """The status of the command, and what it says of trouble."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*CLINIC, *words.split()], input="KeyError: 'x'", stdout=stdout, stderr=subprocess.PIPE,
        text=True, cwd=folder, timeout=300, env=plain | environment,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_who_has_left_ends_the_command_quietly_and_a_full_disk_is_one_sentence(buffer):
    reads, writes = os.pipe()
    os.close(reads)
    assert run_into(writes, "explain -", **buffer) == (141, "")
    os.close(writes)
    with open("/dev/full", "w") as full:
        sentence = "torchclinic explain: [Errno 28] No space left on device\n"
        assert run_into(full, "explain -", **buffer) == (2, sentence)


@pytest.mark.slow
def test_a_file_that_was_fixed_is_there_though_the_report_cannot_be_written(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "x.pt")
    with open("/dev/full", "w") as full:
        sentence = "torchclinic fix: [Errno 28] No space left on device\n"
        assert run_into(full, "fix x.pt -o y.pt", tmp_path) == (2, sentence)
    assert torch.load(tmp_path / "y.pt").keys() == {"w"}


IMPORTING = """
import sys
sys.modules |= dict.fromkeys(["matplotlib", "torchvision", "tqdm"])
import torchladder.devices, torchclinic.where, torchclinic.checkpoint_files
from torchclinic import cli
from torchclinic.errors.telling import UNKNOWN
for words in sys.argv[1:]:
    try:
        cli.main(words.split())
    except SystemExit:
        print("ended")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.prefix.isascii(), reason="no torch from such a path in an ASCII locale")
def test_names_and_terminals_may_be_of_any_encoding_and_nothing_heavy_but_torch_is_needed(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "モデル.pt")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", IMPORTING, "inspect モデル.pt", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    inspected, examined, _ = done.stdout.split("ended\n")
    assert "plain state dict" in inspected
    assert "torch " in examined


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_shows_versions_and_devices_and_fails_if_there_is_a_problem(capsys, monkeypatch):
    for problems, said in ([], "No problem found."), (["It burns."], "PROBLEM  It burns."):
        monkeypatch.setattr(cli, "find_problems", lambda found=problems: found)
        status, out, _ = answer(capsys, "doctor")
        assert status == len(problems)
        for part in (f"torch {torch.__version__}", "\ncpu ", said):
            assert part in out


def test_an_unsafe_torch_a_hidden_gpu_and_little_shared_memory_are_problems(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    pretend(monkeypatch, torch.cuda, is_available=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pretend(monkeypatch, torch.backends.cuda, is_built=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64e6))
    problems = "\n".join(cli.find_problems())
    for said in ("CVE-2026-24747", "hides every GPU; unset it", "/dev/shm has 64 MB left"):
        assert said in problems


def test_a_gpu_this_torch_is_not_built_for_is_a_problem(monkeypatch):
    def no_kernel(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\n")

    p100 = {"get_device_name": "Tesla P100-PCIE-16GB", "get_device_capability": (6, 0)}
    pretend(monkeypatch, torch.cuda, is_available=True, device_count=1, **p100)
    pretend(monkeypatch, torch.cuda, get_arch_list=["sm_75", "sm_80"])
    monkeypatch.setattr(torch, "ones", no_kernel)
    (problem,) = [p for p in cli.find_problems() if "P100" in p]
    assert "sm_60) cannot compute: CUDA error: no kernel image" in problem
    assert "built for sm_75, sm_80" in problem
