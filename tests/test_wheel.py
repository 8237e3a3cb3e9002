"""What `pip` makes of the repository works where the repository is not."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torchladder

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that pip builds from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    (source / "tests").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "tests/test_wheel.py"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", SDIST, folder, cwd=source)
    shutil.rmtree(source)
    (sdist,) = folder.glob("*.tar.gz")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel, alone in a folder; what it needs is where this Python has it."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    run(*PIP, "install", "--no-deps", "--target", folder, wheel)
    return folder


# In one process, since each takes seconds to import PyTorch.
PROGRAM = """
import torch, torchladder
from torchclinic import cli
from torchladder import data, models
torch.save(models.MLP().state_dict(), "mlp.pt")
print(torchladder.__file__, data.BUNDLED, len(data.load_dataset().train_labels), sep="\\n")
for words in (
    "inspect mlp.pt",
    "fix mlp.pt -o fixed.safetensors",
    "explain log.txt",
    "doctor",
):
    try:
        cli.main(words.split())
    except SystemExit as ended:
        assert not ended.code, words
"""


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_whole_package_its_licences_and_nothing_else(built):
    src = ROOT / "src"
    package = {
        path.relative_to(src).as_posix()
        for path in (src / "torchladder").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    version = f"torchladder-{torchladder.__version__}"
    with zipfile.ZipFile(built / f"{version}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if ".dist-info/" not in name} == package
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-fashion-mnist"}
    with tarfile.open(built / f"{version}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames() if ".egg-info" not in name}
    assert {name for name in names if "torchladder/" in name} >= {f"src/{n}" for n in package}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_every_command_works_from_the_wheel_in_an_empty_folder(installed, tmp_path):
    (tmp_path / "log.txt").write_text("KeyError: 'RANK'\n")
    env = os.environ | {"PYTHONPATH": str(installed)}
    printed = run(sys.executable, "-c", PROGRAM, cwd=tmp_path, env=env)
    package, images, count, *_ = printed.splitlines()
    assert package.startswith(str(installed))
    assert images.startswith(str(installed))
    assert count == "12000"
    for words in ("state dict", "rank-key-error", "fashion_mnist_small"):
        assert words in printed
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "mlp.pt", "fixed.safetensors"}
    script = run(installed / "bin" / "torchladder", "--version", cwd=tmp_path, env=env)
    assert script.strip().endswith(torchladder.__version__)
