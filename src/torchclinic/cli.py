"""The command ``torchclinic``: ``doctor``, ``explain``, ``inspect``, ``fix`` and ``simulate``."""

import argparse
import importlib
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from torchclinic import OLDEST_TORCH, UserError, __version__, printable


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input ends it with one sentence and exit status 2."""
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):  # not where a test or a notebook has put its own
        sys.stdout.reconfigure(errors="replace")  # for a terminal that lacks a character
    text = ""
    try:
        status = options.run(options) or 0
        sys.stdout.flush()  # here its errors can be told
    except BrokenPipeError:  # who read it has left, as head does
        status = 141  # what a shell says of a program that SIGPIPE has ended
    except KeyboardInterrupt:
        status, text = 130, "interrupted"
    except (UserError, OSError) as error:  # others are PyTorch's, or bugs
        status, text = 2, error
    if text:
        print(f"torchclinic {options.command}: {printable(str(text))}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at the end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    about = "What is wrong with this error, checkpoint or machine, and what to do."
    parser = argparse.ArgumentParser("torchclinic", description=about)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, about: str, example: str) -> Callable:
        """Add a command; what adds an argument to it."""
        example = f"Example: {example}"
        new = commands.add_parser(name, help=about, description=run.__doc__, epilog=example)
        new.set_defaults(run=run)
        return new.add_argument

    log = "torchrun train.py 2>&1 | tee log.txt; torchclinic explain log.txt"
    add = command("explain", _explain, "what an error means, and what to do", log)
    add("what", nargs="*", metavar="FILE|ID|WORDS", help="a log, - for the standard input (the"
        " default if it is no terminal), an entry of the catalogue, or what you see, in words; of"
        " several ranks, the logs or the flight recorder's dumps: their files or their folder, such"
        " as that of torchrun --log-dir (its last run's last attempt)")  # fmt: skip
    add("--json", action="store_true", help="for other programs, in a form that stays")

    path = {"metavar": "PATH", "help": "a file, or a sharded checkpoint's folder"}
    found = "torchclinic inspect found.pt"
    add = command("inspect", _inspect, "what is in a checkpoint, and what to do with it", found)
    add("path", **path)
    add("--verify", action="store_true", default=None, help="check the numbers too: reads all."
        " Exit status 1 if one is NaN or infinite")  # fmt: skip

    ddp = "torchclinic fix ddp.pt -o plain.pt --for my_models:Net"
    add = command("fix", _fix, "turn any checkpoint into a plain state dict", ddp)
    add("path", **path)
    add("-o", dest="target", metavar="FILE", required=True,
        help="the file to write; one called .safetensors gets that format")  # fmt: skip
    add("--for", dest="model", metavar="MODULE:MODEL", help="fit the model that this makes: Net"
        " in my_models.py, called without arguments, is my_models:Net")  # fmt: skip
    add("--key", help="where the weights are, such as model_ema, if in several places")
    add("--dtype", choices=["fp32", "fp16", "bf16"], help="convert all floating-point tensors;"
        " integers and booleans stay")  # fmt: skip

    hosts = "torchrun ... -m torchclinic doctor --distributed --program train.py"
    add = command("doctor", _doctor, "what this machine has, and what is wrong with it", hosts)
    add("--distributed", action="store_true", help="under torchrun: check all hosts together")
    add("--timeout", type=float, metavar="SECONDS",
        help="with --distributed: how long a rank may take to answer (60)")  # fmt: skip
    add("--program", metavar="PATH", help="with --distributed: a file or folder, such as the"
        " training program, that must be alike on all hosts")  # fmt: skip

    two = "torchclinic simulate 2 torchrun --standalone --nproc-per-node=2 train.py"
    add = command("simulate", _simulate, "run a command with GPUs that are not there", two)
    add("count", type=int, help="how many GPUs, 1 to 16")
    add("--name", default="Tesla T4", help="what they are called; (simulated) is added")
    add("--capability", default=(7, 5), type=capability,
        help="such as 8.0; below that, no bf16 (7.5)")  # fmt: skip
    add("--memory", default=15_843_721_216, type=float, metavar="BYTES",
        help="of each: more is out of memory (15.8e9)")  # fmt: skip
    add("--with-real-gpu", action="store_true", help="simulate though a real GPU is there")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what to run")
    return parser


# --- explain ------------------------------------------------------------------------------------


def _explain(options: argparse.Namespace) -> int:
    """Find known errors in a log, the likeliest cause first: why, and what to do. Of several ranks'
    logs, say also which rank failed first. Of an entry of the catalogue, print all. Of a hang's
    dumps, say which rank did not make a call. Exit status: 0 if there is an entry, 1 if not.
    """
    from torchclinic import errors, flight_recorder, logs

    what = options.what or ["" if sys.stdin.isatty() else "-"]
    if dumps := flight_recorder.dumps_in(what):
        one_by_one = ((str(file), file.read_bytes()) for file in dumps)
        ranks, absent = flight_recorder.read(one_by_one)
        differences = flight_recorder.compare(ranks)
        entries = [(errors.catalogue()[t["entry"]], t["says"]) for t in differences if "entry" in t]
        found = [errors.Match(entry, text=says) for entry, says in entries]
        log, more = "", {"differences": differences, "ranks_without_dump": absent}
        text = flight_recorder.explain(differences, absent)
    elif len(what) == 1 and (entry := errors.catalogue().get(what[0])):
        log, found, more, text = "", [errors.Match(entry)], {}, entry
    else:
        said = logs.said(what)
        texts = {"": said} if said else logs.read([*dict.fromkeys(what)])
        log, first = "\n".join(texts.values()), logs.first_to_fail(texts)
        found, more = logs.find(texts, first), {"first_to_fail": first} if first else {}
        says, text = first.get("says", ""), errors.explain(log, found)
        own = text.startswith(" ") and not first.get("text")  # the program's own sentence: first
        text = (f"{text}\n\n{says}" if own else f"{says}\n\n{text}").strip()
    print(errors.as_json(log, found, **more) if options.json else text)
    return 0 if found else 1


# --- inspect and fix ----------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    """Say what is in a checkpoint: kind, keys, shapes, dtypes, devices, which wrapper put what
    before the keys, and what to do next. No code in the file is run.
    """
    from torchclinic.checkpoint_files import inspect_checkpoint

    found = inspect_checkpoint(options.path, verify=options.verify)
    print(found)
    return 1 if options.verify and found.not_finite else 0


def _fix(options: argparse.Namespace) -> None:
    """Write the weights of any checkpoint as a plain state dict that loads on every rung:
    unwrapped, without wrappers' prefixes, for the CPU, without what is not weights. FILE is
    written whole or not at all.
    """
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, _end)

    import torch

    from torchclinic.checkpoint_files import fix_checkpoint

    model = None if options.model is None else _model_named(options.model)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    choices = {"key": options.key, "dtype": dtypes.get(options.dtype)}
    print(fix_checkpoint(options.path, options.target, model=model, **choices))


def _end(number: int, frame: object) -> NoReturn:
    """End as the signal would, but remove the file that is half written."""
    sys.exit(128 + number)


def _model_named(name: str):
    """The model that ``package.module:Model`` makes, without memory for its weights if it can."""
    import torch

    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), attribute)
        try:
            with torch.device("meta"):
                model = make()
        except RuntimeError:  # it computes with its weights
            model = make()
    except (Exception, SystemExit) as error:  # of the user's module, in whatever way
        raise UserError(
            f"--for {name}: {type(error).__name__}: {error}. Give module:Model, importable from "
            "this folder or PYTHONPATH, that makes the model without arguments. What the module "
            "does as a program stands under if __name__ == '__main__'."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"--for {name}: made a {type(model).__name__}, not a torch.nn.Module.")
    return model


# --- doctor -------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    """Say which versions and devices this machine has, and every problem found. Exit status: 1 if
    there is a problem.
    """
    if options.program == "":
        raise UserError("--program is empty.")
    if not options.distributed and (options.timeout is not None or options.program):
        raise UserError("--timeout and --program go with --distributed, under torchrun.")
    if options.distributed:
        from torchclinic import doctor

        timeout = 60 if options.timeout is None else options.timeout
        status = doctor.run(timeout, options.program)
        sys.stdout.flush()
        os._exit(status)  # a thread may hang in a collective, and would keep the process here

    import torch

    from torchclinic.machine import device_table

    cuda = torch.version.cuda or torch.version.hip or "none"
    print(f"torchclinic {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__} (CUDA {cuda})\n")
    print(device_table(), end="\n\n")
    problems = [f"PROBLEM  {problem}" for problem in find_problems()]
    print(*problems or ["No problem found."], sep="\n")
    return 1 if problems else 0


def find_problems() -> Iterator[str]:
    """A sentence for each thing on this machine that will fail or be slow, and the way out."""
    import torch

    from torchclinic.machine import why_no_cuda

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        yield (
            f"torch {torch.__version__} loads checkpoints unsafely (CVE-2026-24747): "
            "pip install --upgrade 'torch>=2.10' torchvision"
        )
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            try:
                torch.ones(8, device=f"cuda:{i}").sum().item()
            except RuntimeError as error:
                major, minor = torch.cuda.get_device_capability(i)
                yield (
                    f"cuda:{i} ({torch.cuda.get_device_name(i)}, sm_{major}{minor}) cannot "
                    f"compute: {str(error).splitlines()[0]} "
                    f"This torch is built for {', '.join(torch.cuda.get_arch_list())}."
                )
    elif shutil.which("nvidia-smi"):
        yield f"nvidia-smi is here, but PyTorch sees no GPU: {why_no_cuda()}"
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < 256e6:
        yield (
            f"/dev/shm has {free / 1e6:.0f} MB left, which data loader workers may exceed "
            "(bus error): use workers=0, or start the container with --shm-size=2g."
        )


# --- simulate -----------------------------------------------------------------------------------


def capability(text: str) -> tuple[int, int]:
    major, minor = map(int, text.split("."))
    return major, minor


def _simulate(options: argparse.Namespace) -> None:
    """Run a command that sees simulated GPUs, and all that it starts: is the program right about
    where each tensor is? It says nothing about speed.
    """
    from torchclinic.simulated_gpus import describe, inherited

    if not options.program:
        raise UserError("Give the command to run: torchclinic simulate 2 python train.py")
    settings = describe(
        options.count, name=options.name, capability=options.capability,
        memory=options.memory, with_real_gpu=options.with_real_gpu,
    )  # fmt: skip
    program = options.program[0]
    if program.startswith("-"):
        raise UserError(f"{program} goes before the number of GPUs.")
    print(f"Simulated GPUs: {options.count}. No time says anything about a GPU.", file=sys.stderr)
    try:
        os.execvpe(program, options.program, os.environ | inherited(settings))
    except OSError as error:
        way = "If it is a script, its first line says what runs it, such as #!/usr/bin/env python."
        raise UserError(f"{program} cannot be run ({error.strerror}). {way}") from error
