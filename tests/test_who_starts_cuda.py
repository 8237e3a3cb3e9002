"""`who_starts_cuda`, always in a process of its own: CUDA is started only once in each.

In a notebook it names the cell: a cell of the clinic, errors_workers, shows it.
"""

import os

import pytest
import torch
from running import ran

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
from contextlib import suppress
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

def found_by(call):
    with who_starts_cuda() as found, suppress(Exception):
        exec(call)
    return found.before, *([call.name for call in calls] for calls in (found.asked, found.started))

sys.stdout.reconfigure(line_buffering=True)  # or a fork would print the same once more
"""


@pytest.fixture
def run(tmp_path):
    """Run a program as a file; the lines that it prints."""

    def run(program, **environment):
        (tmp_path / "train.py").write_text(BEGIN + program)
        return ran("python", "train.py", cwd=tmp_path, env=os.environ | environment).splitlines()

    return run


def test_of_an_import_that_starts_cuda_both_lines_are_named(run, tmp_path):
    eager = "import torch\ntry:\n    ONES = torch.ones(2).cuda()\nexcept Exception:\n    pass\n"
    (tmp_path / "eager.py").write_text(eager)
    headline, *lines = run("""
def build():
    import eager

with who_starts_cuda() as found:
    build()
print(found)
""")
    started = "This started CUDA; a process forked later cannot use it:"
    assert headline in ("This tried to start CUDA:", started)
    assert [line.strip() for line in lines[1::2]] == [
        "build()", "import eager", "ONES = torch.ones(2).cuda()"
    ]  # fmt: skip
    assert lines[4] == f'  File "{tmp_path / "eager.py"}", line 3, in <module>'


# The last two have copies of `_lazy_init`: torch.cuda.random's and torch.cuda.memory's.
STARTS = ["torch.cuda.init()", "torch.ones(2).cuda()", "torch.ones(2, device='cuda')"]
STARTS += ["torch.cuda.get_rng_state()", "torch.cuda.set_per_process_memory_fraction(0.5)"]
ASKS = ["torch.cuda.is_available()", "torch.cuda.get_arch_list()"]


@needs_a_cuda_build
def test_every_way_to_start_cuda_or_to_ask_for_gpus_is_seen(run):
    printed = run(f"for call in {STARTS + ASKS}:\n    in_a_fork(lambda: found_by(call)[1:])\n")
    frames = ["found_by", "<module>"]
    # On a machine with GPUs, to move a tensor may ask first.
    assert [eval(line)[1] for line in printed] == [frames] * len(STARTS) + [[]] * len(ASKS)
    assert [eval(line)[0] for line in printed[len(STARTS) :]] == [frames] * len(ASKS)


def test_what_computes_on_the_cpu_starts_nothing_and_spoils_no_fork(run):
    printed = run("""
with who_starts_cuda() as found:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    torch.cuda.manual_seed(0)
    model(torch.ones(2))
print(found)
print(found.before, found.asked, found.started)
in_a_fork(torch.cuda._is_in_bad_fork)
""")
    nothing = "As far as PyTorch knows, nothing in the block started CUDA or asked about the GPUs."
    assert printed == [nothing, "False [] []", "False"]


@needs_a_cuda_build
def test_to_ask_for_a_gpu_spoils_forks_a_start_is_told_besides_and_a_later_block_knows(run):
    printed = run("""
with who_starts_cuda() as found:
    torch.cuda.is_available()  # first
    torch.cuda.is_available()
print(torch.cuda.is_initialized())
in_a_fork(torch.cuda.init)
print(found)
with who_starts_cuda() as found, suppress(Exception):
    torch.cuda.is_available()  # first
    torch.cuda.init()  # then
print(found)
""")
    before = [line for line in printed if line.startswith("Before the block, CUDA had been start")]
    asked = [line.strip() for line in printed if line.endswith("# first")]
    assert printed[:2] == ["False", REFUSED]
    assert printed[2] == "This asked CUDA about the GPUs; a process forked later cannot use CUDA:"
    assert (len(before), asked) == (1, ["torch.cuda.is_available()  # first"] * 2)
    assert printed[-1].strip() == "torch.cuda.init()  # then"


def test_an_exception_passes_from_nested_blocks_and_everything_is_put_back(run):
    printed = run("""
def functions():
    names = ('_cuda_getDeviceCount', '_cuda_getArchFlags')
    return [torch.cuda._is_in_bad_fork, *(getattr(torch._C, n, None) for n in names)]

def load():
    with suppress(Exception):
        torch.cuda.init()

before = functions()
try:
    with who_starts_cuda() as outer:
        with who_starts_cuda() as inner:
            assert functions() != before
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
        raise KeyError('passes')
except KeyError as error:
    print(error)
for found in (inner, outer):
    print([(call.name, call.line) for call in found.started])
print(functions() == before)
""")
    assert printed == ["'passes'", *["[('load', 'torch.cuda.init()')]"] * 2, "True"]


def test_a_build_without_cuda_shows_the_attempt(run):
    """Such a build has neither the functions of CUDA nor the flag, which are taken away here."""
    printed = run("""
torch._C._has_cuda = False
for name in [name for name in dir(torch._C) if name.startswith('_cuda_')]:
    delattr(torch._C, name)
torch.cuda._is_in_bad_fork = lambda: False
with who_starts_cuda() as found:
    print(torch.cuda.is_available())
    try:
        torch.zeros(2, device='cuda')
    except AssertionError as error:
        print(error)
print(found.before, found.asked, found.started[-1].line)
""")
    attempt = "False [] torch.zeros(2, device='cuda')"
    assert printed == ["False", "Torch not compiled with CUDA enabled", attempt]


@pytest.mark.gpu
def test_on_a_gpu_the_line_that_started_cuda_is_named_and_a_fork_after_it_fails(run):
    program = """
in_a_fork(lambda: torch.ones(2, device='cuda').sum().item())
with who_starts_cuda() as found:
    print(torch.cuda.is_available())
print(bool(found.asked))
in_a_fork(lambda: torch.ones(2, device='cuda').sum().item())
with who_starts_cuda() as found:
    ones = torch.ones(2, device='cuda')
print(str(found).splitlines()[-1].strip())
in_a_fork(lambda: torch.ones(2, device='cuda'))
"""
    end = ["ones = torch.ones(2, device='cuda')", REFUSED]
    asked = run(program, PYTORCH_NVML_BASED_CUDA_CHECK="0")
    assert asked == ["2.0", "True", "True", REFUSED, *end]
    answered = run(program, PYTORCH_NVML_BASED_CUDA_CHECK="1")  # by NVML
    assert answered == ["2.0", "True", "False", "2.0", *end]
