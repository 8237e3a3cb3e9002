"""The command ``torchladder``: ``doctor``, ``inspect`` and ``fix`` checkpoints, ``train``."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from torchladder import OLDEST_TORCH, __version__
from torchladder.launching import LaunchError

MODELS = ("lenet", "mlp", "linear-conv")
TRUST = "load a whole pickled model, which runs code of the file: only if you trust who made it"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input ends it with one sentence and exit status 2."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
    except (ValueError, OSError) as error:
        print(f"torchladder {options.command}: {error}", file=sys.stderr)
        status = 2
    except LaunchError as error:
        # Bad input is one sentence on a rank too; of any other failure the traceback is wanted.
        bad_input = {"ValueError", "OSError"} & set(error.kinds)
        text = str(error).splitlines()[0] if bad_input else error
        print(f"torchladder {options.command}: {text}", file=sys.stderr)
        status = 2 if bad_input else 1
    except KeyboardInterrupt:
        print(f"torchladder {options.command}: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torchladder", description="The device ladder: CPU, one GPU, DataParallel, DDP."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="what this machine has, and what is wrong with it")
    doctor.set_defaults(run=_doctor)

    _add_inspect(commands)
    _add_fix(commands)

    train = commands.add_parser(
        "train",
        help="train a model on one rung",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    train.set_defaults(run=_train)
    add = train.add_argument
    add("--rung", default="cpu", help="cpu, gpu, dp or ddp")
    add("--nproc", type=int, default=2, help="processes on rung ddp (torchrun decides for itself)")
    add("--device", help="which GPU on rung gpu, such as cuda:1")
    add("--model", choices=MODELS, default="lenet")
    add("--width", type=float, default=1 / 16, help="factor on the sizes of linear-conv")
    add("--data", default="fashion_mnist_small", help="or fashion_mnist, cifar10")
    add("--folder", help="where the data set lies, if not in one of the usual places")
    add("--download", action="store_true", help="fetch the data set if it is not there")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=64, help="on rung ddp: of each process")
    add("--lr", type=float, default=0.05, help="learning rate of the first step")
    add("--seed", type=int, default=0)
    add("--amp", choices=["fp16", "bf16"], help="mixed precision")
    add("--workers", type=int, default=0, help="processes that load data")
    add("--on-device", action="store_true", help="keep the data set on the device")
    add("--channels-last", action="store_true", help="memory layout for convolutions")
    add("--compile", action="store_true", help="compile the model first")
    add("--save", type=Path, metavar="FILE", help="write the trained state dict there")
    add("--checkpoint-dir", metavar="DIR", help="save the run there after every epoch")
    add("--checkpoint-every", type=int, metavar="N", help="save it every N steps, too")
    add("--resume", default="auto", help="auto (from the newest whole checkpoint), never or a file")
    return parser


# --- inspect and fix ----------------------------------------------------------------------------


def _add_inspect(commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what is in a checkpoint, and what to do with it",
        description="Say what is in a checkpoint: its kind, keys, shapes, dtypes and devices, which"
        " wrapper put what before the keys, and what to do next. No code in the file is run, and a"
        " file of any size takes a second.",
        epilog="Example:  torchladder inspect model.pth",
    )
    parser.set_defaults(run=_inspect)
    parser.add_argument("path", metavar="PATH", help="a file, or a sharded checkpoint's folder")
    parser.add_argument(
        "--verify", action="store_true", default=None, help="check the numbers too: reads all of it"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)


def _add_fix(commands) -> None:
    parser = commands.add_parser(
        "fix",
        help="turn any checkpoint into a plain state dict",
        description="Write the weights of any checkpoint as a plain state dict that loads on every"
        " rung: unwrapped, without wrappers' prefixes, for the CPU, without what is not weights."
        " DST is written whole or not at all.",
        epilog="Example:  torchladder fix ddp.pt -o plain.pt --for my_models:Net   "
        "(in my_models.py, Net() makes the model)",
    )
    parser.set_defaults(run=_fix)
    add = parser.add_argument
    add("path", metavar="SRC", help="a file, or a sharded checkpoint's folder")
    add("-o", dest="target", metavar="DST", help="the file to write")
    add("--in-place", action="store_true", help="write over SRC; SRC.bak keeps what it was")
    add("--for", dest="model", metavar="MODULE:MODEL", help="fit the keys of the model that this"
        " class or function makes without arguments")  # fmt: skip
    add("--partial", action="store_true", help="with --for: write what fits, if not all does")
    add("--key", help="where the weights are, such as model_ema, if in several places")
    add("--to", choices=["torch", "safetensors"], help="default: what the name of DST ends in")
    add("--trust", action="store_true", help=TRUST)


def _inspect(options: argparse.Namespace) -> int:
    from torchladder.checkpoints import inspect_checkpoint

    print(inspect_checkpoint(options.path, trust=options.trust, verify=options.verify))
    return 0


def _fix(options: argparse.Namespace) -> int:
    from torchladder.checkpoints import fix_checkpoint

    report = fix_checkpoint(
        options.path,
        options.target,
        model=_model_named(options.model) if options.model else None,
        key=options.key,
        to=options.to,
        strict=not options.partial,
        trust=options.trust,
    )
    print(report)
    return 0


def _model_named(name: str):
    """The model that ``package.module:Model`` makes, without memory for its weights if it can."""
    import importlib

    import torch

    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), attribute)
        try:
            with torch.device("meta"):
                model = make()
        except (RuntimeError, NotImplementedError):  # it computes with its weights
            model = make()
    except Exception as error:  # of the user's module, in whatever way
        raise ValueError(
            f"--for {name}: {type(error).__name__}: {error}. Give module:Model, importable from "
            "this folder or PYTHONPATH, that makes the model without arguments."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"--for {name}: made a {type(model).__name__}, not a torch.nn.Module.")
    return model


# --- train --------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    if options.save:  # found out now rather than after the training
        folder = options.save.absolute().parent
        if options.save.is_dir() or not os.access(folder, os.W_OK):
            raise OSError(f"--save {options.save}: name a file in a folder that can be written.")
    if options.rung != "ddp":
        return _train_here(options)
    import torch.distributed as dist

    from torchladder.launching import join_group, launch

    if "RANK" not in os.environ:  # not under torchrun: start the ranks from here
        launch(_train_here, options, nprocs=options.nproc)
        return 0
    join_group()
    try:
        return _train_here(options)
    finally:
        dist.destroy_process_group()


def _train_here(options: argparse.Namespace) -> int:
    """Train in this process; of several ranks only the first prints and saves."""
    import torch

    from torchladder.data import load
    from torchladder.training import device_of, train

    device = device_of(options.rung, options.device)
    data = load(options.data, options.folder, download=options.download)
    torch.manual_seed(options.seed)
    model = _model(options, data)
    first, where = True, device
    if options.rung == "ddp":
        import torch.distributed as dist

        first = dist.get_rank() == 0
        where = f"{dist.get_world_size()} ranks ({dist.get_backend()})"
    if first:
        print(f"{type(model).__name__} on {where}, {data}", flush=True)
    history = train(
        model,
        data,
        rung=options.rung,
        device=options.device,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        seed=options.seed,
        amp=options.amp,
        workers=options.workers,
        on_device=options.on_device,
        channels_last=options.channels_last,
        compile=options.compile,
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
    )
    if not first:
        return 0
    print(history)
    if options.save:
        # To a temporary file first: a crash here must not cost the file that was there.
        temporary = options.save.with_name(f"{options.save.name}.{os.getpid()}.tmp")
        try:
            torch.save(model.state_dict(), temporary)
            os.replace(temporary, options.save)
        finally:
            temporary.unlink(missing_ok=True)
        print(f"saved {options.save}")
    return 0


def _model(options: argparse.Namespace, data):
    from math import prod

    from torchladder import models

    if options.model == "mlp":
        return models.MLP(prod(data.shape), outputs=len(data.classes))
    if options.model == "lenet":
        return models.LeNet(data.shape, len(data.classes))
    return models.LinearConvNet(data.shape, len(data.classes), width=options.width)


# --- doctor -------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    """Print versions, devices, data sets and every problem found; 1 if there is a problem."""
    import torch
    import torchvision

    from torchladder.devices import device_table

    cuda = torch.version.cuda or torch.version.hip or "none"
    print(f"torchladder {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__} (CUDA {cuda}), torchvision {torchvision.__version__}\n")
    print(device_table(), end="\n\n")
    print(*data_sets_here(), sep="\n", end="\n\n")
    problems = list(find_problems())
    print(*(f"PROBLEM  {problem}" for problem in problems), sep="\n", end="")
    print("No problem found." if not problems else "")
    return 1 if problems else 0


def data_sets_here() -> Iterator[str]:
    """One line a data set: what it holds, or where it was looked for."""
    from torchladder.data import load

    for name in ("fashion_mnist_small", "fashion_mnist", "cifar10"):
        try:
            yield str(load(name))
        except (OSError, ValueError) as error:
            yield f"{name}: {error}"


def find_problems() -> Iterator[str]:
    """A sentence for each thing on this machine that will bite, and the way out."""
    import torch

    from torchladder.devices import why_no_cuda

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        yield (
            f"torch {torch.__version__} loads checkpoints unsafely (CVE-2026-24747): "
            "pip install --upgrade 'torch>=2.10' torchvision"
        )
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        yield f"nvidia-smi is here, but PyTorch sees no GPU: {why_no_cuda()}"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            yield from _gpu_problems(i)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if torch.get_num_threads() > cores:
        yield (
            f"PyTorch uses {torch.get_num_threads()} threads on {cores} cores, which is slower "
            "than as many threads as cores: set OMP_NUM_THREADS."
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < 256e6:
        yield (
            f"/dev/shm has {free / 1e6:.0f} MB left, which data loader workers may exceed "
            "(bus error): use workers=0, or start the container with --shm-size=2g."
        )


def _gpu_problems(i: int) -> Iterator[str]:
    import torch

    name = torch.cuda.get_device_name(i)
    try:
        torch.ones(8, device=f"cuda:{i}").sum().item()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(i)
        built = ", ".join(torch.cuda.get_arch_list())
        yield (
            f"cuda:{i} ({name}, sm_{major}{minor}) cannot compute: "
            f"{str(error).splitlines()[0]} This torch is built for {built}."
        )
