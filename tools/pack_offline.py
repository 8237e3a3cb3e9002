"""Pack what a machine with a GPU and no network needs to be recorded: ``make pack``.

    python tools/pack_offline.py --python 3.12 --platform x86_64

writes Fashion-MNIST, the wheels of what runs notebooks and the commit's name to ``dist/offline/``.
Carry the tree there with that folder, but without ``.git``, and run the line that is printed.
PyTorch, torchvision, matplotlib, accelerate and pytest have to be there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from machine_facts import commit, write_json

from torchladder import data

# All that running notebooks needs, since pip is told not to look for what a package needs; what is
# there already is not installed.
WHEELS = {
    "nbclient": "runs the cells of a notebook",
    "nbformat": "reads and writes notebooks",
    "fastjsonschema": "nbformat: is a notebook as it should be?",
    "jsonschema": "nbformat: and if not, why not?",
    "jsonschema-specifications": "jsonschema",
    "referencing": "jsonschema",
    "rpds-py": "referencing",
    "attrs": "jsonschema",
    "ipykernel": "the process in which cells run",
    "comm": "ipykernel",
    "nest-asyncio": "ipykernel before version 7.1",
    "nest-asyncio2": "ipykernel since then",
    "matplotlib-inline": "ipykernel: figures in notebooks",
    "psutil": "ipykernel",
    "jupyter-client": "starts that process and talks to it",
    "jupyter-core": "jupyter-client: where things are",
    "platformdirs": "jupyter-core",
    "python-dateutil": "jupyter-client",
    "six": "python-dateutil",
    "tzdata": "python-dateutil: time zones",
    "pyzmq": "jupyter-client: the connection",
    "tornado": "jupyter-client and ipykernel: its loop",
    "traitlets": "all of them: settings",
    "packaging": "ipykernel",
    "ipython": "what a cell can do beyond Python",
    "ipython-pygments-lexers": "ipython: colours of tracebacks",
    "pygments": "ipython: the same",
    "jedi": "ipython imports it for completion",
    "parso": "jedi",
    "pexpect": "ipython: shell commands",
    "ptyprocess": "pexpect",
    "prompt-toolkit": "ipython imports it",
    "wcwidth": "prompt-toolkit",
    "stack-data": "ipython: tracebacks",
    "executing": "stack-data",
    "asttokens": "stack-data",
    "pure-eval": "stack-data",
    "typing-extensions": "several of them",
    "cloudpickle": "torchladder: functions of cells on other processes",
    "safetensors": "torchladder and chapter 01",
    "tqdm": "torchladder: progress bars",
}


def download(folder: Path, python: str, platform: str) -> None:
    """All of `WHEELS` for that version of Python and that kind of processor.

    Raises
    ------
    subprocess.CalledProcessError
        If pip finds no wheel for one of them.
    """
    # pip takes these literally. Wheels for a newer glibc than 2.28 might not run there.
    glibcs = [f"manylinux_2_{minor}_{platform}" for minor in (28, 27, 26, 24, 17, 12, 5)]
    named = [*glibcs, f"manylinux2014_{platform}", f"manylinux1_{platform}"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={name}" for name in named]
    subprocess.run([*command, *WHEELS], check=True)


def data_files() -> list[Path]:
    """Fashion-MNIST's four files, packed, from where `torchladder.data` finds them.

    Raises
    ------
    FileNotFoundError
        If one of them is nowhere.
    """
    folders = data._folders(None)
    files = {name: data._find(folders, f"{name}.gz") for name in data.FASHION_SHA256}
    if missing := [name for name, found in files.items() if not found]:
        raise FileNotFoundError(
            f"Fashion-MNIST lacks {', '.join(missing)}: put the files, ending in .gz, in a folder "
            "and name it with TORCHLADDER_DATA."
        )
    return [found[0] for found in files.values()]


def size(paths) -> float:
    """In MB."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def tracked() -> list[Path]:
    names = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True)
    return [ROOT / name for name in names.split("\0") if name]


def pack(folder: Path, python: str, platform: str) -> list[Path]:
    """Write `folder` from scratch; the files in it."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "wheels").mkdir(parents=True)
    (folder / "data").mkdir()
    download(folder / "wheels", python, platform)
    for file in data_files():
        shutil.copy(file, folder / "data")
    write_json(commit(), folder / "commit.json")
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "dist" / "offline")
    parser.add_argument("--python", default="3.12", help="its version there (default 3.12)")
    parser.add_argument("--platform", default="x86_64", help="its processor: x86_64 or aarch64")
    options = parser.parse_args(arguments)
    files = pack(options.folder, options.python, options.platform)
    tree = size(tracked())
    print(f"{len(files)} files, {size(files):.1f} MB, in {options.folder}; the tree: {tree:.1f} MB")
    folder = options.folder.resolve()
    here = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    print("Copy the tree with that folder there, without .git, and run in it:")
    print(f"  python3 tools/record_all.py --packed {here} --folder ../recorded --minutes 40")
    return 0


if __name__ == "__main__":
    sys.exit(main())
