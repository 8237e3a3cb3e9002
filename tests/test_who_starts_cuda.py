"""`who_starts_cuda`, always in a process of its own: CUDA is started only once in each."""

import os
import subprocess
import sys

import pytest
import torch
from test_launching_in_notebooks import HANG, run_cell

pytestmark = pytest.mark.slow
needs_a_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="without CUDA support, there is nothing to spoil"
)
REFUSED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)

BEGIN = """
import os, sys, threading, torch
from contextlib import ExitStack, suppress
from torch import nn
from torchclinic.cuda_start import who_starts_cuda

def in_a_fork(function):
    if not (process := os.fork()):
        try:
            print(function())
        except Exception as error:
            print(error)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(process, 0)

def last_line(calls):
    return calls[-1].line if calls else None

sys.stdout.reconfigure(line_buffering=True)  # or a fork would print the same once more
"""


@pytest.fixture
def run(tmp_path):
    """Run a program as a file; what it prints."""

    def run(program, **environment):
        (tmp_path / "train.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def frame(file, line, name, code):
    return f'  File "{file}", line {line}, in {name}\n    {code}\n'


def test_of_an_import_that_starts_cuda_both_lines_are_named(run, tmp_path):
    eager = "import torch\ntry:\n    ONES = torch.ones(2).cuda()\nexcept Exception:\n    pass\n"
    (tmp_path / "eager.py").write_text(eager)
    printed = run(
        "from torchclinic.cuda_start import who_starts_cuda\n"
        "def build():\n"
        "    import eager\n"
        "with who_starts_cuda() as found:\n"
        "    size = 2\n"
        "    build()\n"
        "print(found)\n"
    )
    headline, _, rest = printed.partition("\n")
    assert headline in (
        "This tried to start CUDA:",
        "This started CUDA; a process forked later cannot use it:",
    )
    program = tmp_path / "train.py"
    assert rest == (
        frame(program, 6, "<module>", "build()")
        + frame(program, 3, "build", "import eager")
        + frame(tmp_path / "eager.py", 3, "<module>", "ONES = torch.ones(2).cuda()")
    )


CALLS = [
    "torch.cuda.init()",
    "torch.ones(2).cuda()",
    "torch.ones(2, device='cuda')",
    "torch.cuda.get_rng_state()",  # torch.cuda.random's copy of `_lazy_init`
    "torch.cuda.set_per_process_memory_fraction(0.5)",  # and that of torch.cuda.memory
]


def test_every_way_to_start_cuda_is_seen(run):
    printed = run(
        f"{BEGIN}\n"
        "def found_by(call):\n"
        "    with who_starts_cuda() as found, suppress(Exception):\n"
        "        exec(call)\n"
        "    return [call.name for call in found.started], found.before\n"
        f"for call in {CALLS}:\n"
        "    in_a_fork(lambda: found_by(call))\n"
    )
    assert printed.splitlines() == [str((["found_by", "<module>"], False))] * len(CALLS)


def test_what_computes_on_the_cpu_starts_nothing_and_spoils_no_fork(run):
    printed = run(
        f"{BEGIN}\n"
        "with who_starts_cuda() as found:\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Linear(2, 2)\n"
        "    torch.cuda.manual_seed(0)\n"
        "    model(torch.ones(2))\n"
        "print(found)\n"
        "print(found.before, found.asked, found.started)\n"
        "in_a_fork(torch.cuda._is_in_bad_fork)\n"
    )
    nothing = "As far as PyTorch knows, nothing in the block started CUDA or asked about the GPUs."
    assert printed.splitlines() == [nothing, "False [] []", "False"]


@needs_a_cuda_build
@pytest.mark.parametrize("question", ["torch.cuda.is_available()", "torch.cuda.get_arch_list()"])
def test_to_ask_for_a_gpu_spoils_forks_and_a_later_block_knows(run, tmp_path, question):
    printed = run(
        "import torch\n"
        "from torchclinic.cuda_start import who_starts_cuda\n"
        "with who_starts_cuda() as found:\n"
        f"    {question}\n"
        "print(found)\n"
        f"{BEGIN}\n"
        "print(torch.cuda.is_initialized())\n"
        "in_a_fork(torch.cuda.init)\n"
        "with who_starts_cuda() as found:\n"
        "    pass\n"
        "print(found)\n"
    )
    asked = "This asked CUDA about the GPUs; a process forked later cannot use CUDA:\n"
    asked += frame(tmp_path / "train.py", 4, "<module>", question)
    assert printed.startswith(asked)
    later = f"False\n{REFUSED}\nBefore the block, CUDA had been started or asked about the GPUs: "
    assert later in printed


@needs_a_cuda_build
def test_a_question_and_the_start_after_it_are_both_told(run):
    printed = run(
        f"{BEGIN}\n"
        "with who_starts_cuda() as found, suppress(Exception):\n"
        "    torch.cuda.is_available()  # first\n"
        "    torch.cuda.is_available()\n"
        "    torch.cuda.init()  # then\n"
        "print(last_line(found.asked), last_line(found.started), sep='\\n')\n"
        "print(str(found).index('# first') < str(found).index('# then'))\n"
    )
    first, then = "torch.cuda.is_available()  # first", "torch.cuda.init()  # then"
    assert printed.splitlines() == [first, then, "True"]


def test_an_exception_passes_and_everything_is_put_back(run):
    printed = run(
        f"{BEGIN}\n"
        "def functions():\n"
        "    names = ('_cuda_getDeviceCount', '_cuda_getArchFlags')\n"
        "    return [torch.cuda._is_in_bad_fork, *(getattr(torch._C, n, None) for n in names)]\n"
        "before = functions()\n"
        "try:\n"
        "    with who_starts_cuda() as outer:\n"
        "        with who_starts_cuda() as inner:\n"
        "            assert functions() != before\n"
        "        assert functions() != before\n"
        "        with suppress(Exception):\n"
        "            torch.cuda.init()\n"
        "        raise KeyError('passes')\n"
        "except KeyError as error:\n"
        "    print(error)\n"
        "print(last_line(inner.started), last_line(outer.started), functions() == before)\n"
        # Blocks of two threads need not end in the order in which they began.
        "first, second = ExitStack(), ExitStack()\n"
        "first.enter_context(who_starts_cuda())\n"
        "second.enter_context(who_starts_cuda())\n"
        "first.close()\n"
        "assert functions() != before\n"
        "second.close()\n"
        "print(functions() == before)\n"
    )
    assert printed.splitlines() == ["'passes'", "None torch.cuda.init() True", "True"]


def test_a_start_in_another_thread_is_told_by_that_threads_calls(run):
    printed = run(
        f"{BEGIN}\n"
        "def load():\n"
        "    with suppress(Exception):\n"
        "        torch.cuda.init()\n"
        "with who_starts_cuda() as found:\n"
        "    thread = threading.Thread(target=load)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "print([(call.name, call.line) for call in found.started])\n"
    )
    assert printed == "[('load', 'torch.cuda.init()')]\n"


def test_a_build_without_cuda_shows_the_attempt(run):
    """Such a build has neither the functions of CUDA nor the flag, which are taken away here."""
    printed = run(
        "import torch\n"
        "torch._C._has_cuda = False\n"
        "for name in [name for name in dir(torch._C) if name.startswith('_cuda_')]:\n"
        "    delattr(torch._C, name)\n"
        "torch.cuda._is_in_bad_fork = lambda: False\n"
        f"{BEGIN}\n"
        "with who_starts_cuda() as found:\n"
        "    print(torch.cuda.is_available())\n"
        "    try:\n"
        "        torch.zeros(2, device='cuda')\n"
        "    except AssertionError as error:\n"
        "        print(error)\n"
        "print(found.before, found.asked, last_line(found.started))\n"
    )
    attempt = "False [] torch.zeros(2, device='cuda')"
    assert printed.splitlines() == ["False", "Torch not compiled with CUDA enabled", attempt]


def test_in_a_notebook_the_cell_and_its_line_are_named():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        run_cell(client, BEGIN)
        number, _ = run_cell(
            client,
            "def build():\n    return nn.Linear(2, 2).cuda()\n\nprint(len(In) - 1)",
        )
        printed, error = run_cell(
            client,
            "with suppress(Exception), who_starts_cuda() as found:\n    build()\nprint(found)",
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert error is None
    defined = int(number)
    lines = frame(f"Cell In[{defined + 1}]", 2, "<module>", "build()")
    lines += frame(f"Cell In[{defined}]", 2, "build", "return nn.Linear(2, 2).cuda()")
    assert printed.partition("\n")[2].startswith(lines)


@pytest.mark.gpu
def test_on_a_gpu_the_line_that_started_cuda_is_named_and_a_fork_after_it_fails(run):
    printed = run(
        f"{BEGIN}\n"
        "in_a_fork(lambda: torch.ones(2, device='cuda').sum().item())\n"
        "with who_starts_cuda() as found:\n"
        "    ones = torch.ones(2, device='cuda')\n"
        "print(found)\n"
        "in_a_fork(lambda: torch.ones(2, device='cuda'))\n"
        "with who_starts_cuda() as found:\n"
        "    pass\n"
        "print(found.before)\n"
    )
    lines = printed.splitlines()
    assert lines[:2] == ["2.0", "This started CUDA; a process forked later cannot use it:"]
    assert lines[3:] == ["    ones = torch.ones(2, device='cuda')", REFUSED, "True"]


@pytest.mark.gpu
def test_on_a_gpu_a_question_spoils_forks_unless_nvml_answers_it(run):
    program = (
        f"{BEGIN}\n"
        "with who_starts_cuda() as found:\n"
        "    print(torch.cuda.is_available())\n"
        "print(bool(found.asked))\n"
        "in_a_fork(lambda: torch.ones(2, device='cuda').sum().item())\n"
    )
    assert run(program, PYTORCH_NVML_BASED_CUDA_CHECK="0").splitlines() == ["True", "True", REFUSED]
    answered = run(program, PYTORCH_NVML_BASED_CUDA_CHECK="1").splitlines()
    assert answered == ["True", "False", "2.0"]
