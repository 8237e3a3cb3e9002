"""The command answers bad input with one sentence, a bug with its traceback."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import pretend, ran
from torch import nn

from torchclinic import cli
from torchclinic.checkpoint_files import fixing
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
    "fix x.pt -o x.pt": "x.pt is the source",
    "fix x.pt -o y.pt --key ema": "no weights under 'ema'",
    "fix x.pt -o z.pt --for nosuch:Net": "--for nosuch:Net: ModuleNotFoundError",
    "fix x.pt -o z.pt --for my_models:seven": "made a int, not a torch.nn.Module",
    "fix x.pt -o z.pt --for exits:Net": "stands under if __name__ == '__main__'",
    "doctor --timeout 5": "--timeout and --program go with --distributed, under torchrun",
    "doctor --program .": "--timeout and --program go with --distributed, under torchrun",
    "doctor --distributed --program ''": "--program is empty",
    "doctor --distributed": "RANK, LOCAL_RANK, WORLD_SIZE",
    "simulate 0 python": "0 GPUs cannot be simulated: give a number from 1 to 16.",
    "simulate 2 --name A100 python": "--name goes before the number of GPUs.",
    "simulate 2": "Give the command to run",
}


MODELS = """
import torch
def net():
    return torch.nn.Linear(2, 1)
def needs_numbers():
    assert torch.ones(1).item() == 1
    return net()
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
    for name in ("torch", "json", "tomllib"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    assert "Keys begin with module." in ran(*CLINIC, "explain", "module-prefix", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_bad_input_gets_one_sentence_and_writes_nothing(capsys, files):
    for command, sentence in BAD_INPUT.items():
        status, out, err = answer(capsys, *shlex.split(command))
        assert (status, out) == (2, ""), command
        assert re.fullmatch(r"torchclinic (inspect|fix|doctor|simulate): .*\n", err), command
        assert sentence in err
    assert sorted({*os.listdir()} - {"__pycache__"}) == files


@pytest.mark.parametrize("first", ["x = 1", "#!/nosuch/python", None])
def test_a_program_that_the_system_cannot_run_is_one_sentence(capsys, tmp_path, first):
    program = tmp_path / "program"
    if first:
        program.write_text(first)
        program.chmod(0o755)
    status, _, err = answer(capsys, "simulate", "2", str(program))
    assert (status, err.count("\n")) == (2, 2)
    assert f"torchclinic simulate: {program} cannot be run (" in err


def test_a_message_that_repeats_words_needs_no_quotes(capsys):
    message = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    assert answer(capsys, "explain", *message.split()) == answer(capsys, "explain", message)
    assert answer(capsys, "explain", message)[0] == 0


@pytest.mark.parametrize("words", ["explain", "explain -", "explain - -"])
def test_explain_has_a_sentence_where_the_standard_input_is_empty(capsys, monkeypatch, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    status, _, err = answer(capsys, *words.split())
    assert (status, err.partition(".")[0]) == (2, "torchclinic explain: nothing to read there")


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


TORCHRUN = """{}
W1129 15:25:15.279000 437 torch/distributed/elastic/multiprocessing/api.py:1028] closing signal SIGTERM
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
  rank      : 0 (local_rank: 0)
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
        "The program's last words, in line 1: my run: too little data"
    )


@pytest.mark.parametrize("target", ["y.pt", "y.safetensors"])
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, (130, "", "torchclinic fix: interrupted\n")),
        (signal.SIGTERM, (143, "", "")),
        (signal.SIGHUP, (129, "", "")),
    ],
)
def test_fix_that_is_ended_while_it_writes_leaves_nothing(
    capsys, monkeypatch, files, number, said, target
):
    def ended(save):
        def saving(*arguments):
            save(*arguments)
            signal.raise_signal(number)

        return saving

    monkeypatch.setattr(torch, "save", ended(torch.save))
    monkeypatch.setattr(fixing, "save_file", ended(fixing.save_file))
    # Whoever started the tests, nohup or a background shell, may have it ignored.
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(number, usual)
    try:
        assert answer(capsys, "fix", "x.pt", "-o", target) == said
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert sorted(os.listdir()) == files


# --- where its output goes ----------------------------------------------------------------------


@pytest.fixture
def run_into(capsys, monkeypatch):
    """The status of the command if its output goes there, and what it says of trouble."""

    def run(descriptor, buffered, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"KeyError: 'x'")))
        raw = open(descriptor, "wb", -1 if buffered else 0)  # noqa: SIM115
        with io.TextIOWrapper(raw, write_through=not buffered) as out:
            monkeypatch.setattr(sys, "stdout", out)
            status, _, err = answer(capsys, *arguments)
        return status, err

    return run


FULL = "torchclinic {}: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_who_has_left_ends_the_command_quietly_and_a_full_disk_is_one_sentence(
    run_into, buffered
):
    reads, writes = os.pipe()
    os.close(reads)
    assert run_into(writes, buffered, "explain", "-") == (141, "")
    assert run_into("/dev/full", buffered, "explain", "-") == (2, FULL.format("explain"))


def test_a_file_that_was_fixed_is_there_though_the_report_cannot_be_written(run_into, files):
    assert run_into("/dev/full", True, "fix", "x.pt", "-o", "y.pt") == (2, FULL.format("fix"))
    assert torch.load("y.pt").keys() == {"weight", "bias"}


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
