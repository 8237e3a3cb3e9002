"""What `pip` makes of the repository works where the repository is not."""

import email
import os
import re
import shutil
import tarfile
import zipfile

import pytest
from running import ROOT, ran

import torchladder

PIP = ["python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
# In one process, since each takes seconds to import PyTorch.
PROGRAM = """
import torch, torchladder
from torchclinic import cli
from torchladder import data, models
torch.save(models.MLP().state_dict(), "mlp.pt")
print(torchladder.__file__, cli.__file__, data.BUNDLED, sep="\\n")
assert len(data.load_dataset().train_labels) == 12_000
for words in ("inspect mlp.pt", "fix mlp.pt -o fixed.safetensors", "explain log.txt", "doctor"):
    try:
        cli.main(words.split())
    except SystemExit as ended:
        assert not ended.code, words
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that pip builds from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ran("python", "-c", SDIST, folder, cwd=source)
    shutil.rmtree(source)
    (sdist,) = folder.glob("*.tar.gz")
    ran(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    return folder


def test_the_wheel_holds_the_packages_their_licences_and_nothing_else_the_sdist_all_of_it(built):
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for package in ("torchladder", "torchclinic", "torchexercises")
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "torchclinic/catalogue/files.toml" in files
    version = f"torchladder-{torchladder.__version__}"
    with zipfile.ZipFile(built / f"{version}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(f"{version}.dist-info/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == files
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-fashion-mnist"}
    with tarfile.open(built / f"{version}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {f"src/{name}" for name in files} | {"pyproject.toml", "LICENSE"}
    # Where PyPI shows it there is no clone, and a relative link leads nowhere.
    assert metadata.get_payload() == (ROOT / "src" / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\bmake [a-z]|\]\((?!https)|<img", metadata.get_payload())


def test_every_command_works_from_the_wheel_in_an_empty_folder(built, tmp_path):
    """The wheel is alone in a folder; what it needs is where this Python has it."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    ran(*PIP, "install", "--no-deps", "--target", installed, *built.glob("*.whl"))
    here.mkdir()
    (here / "log.txt").write_text("KeyError: 'RANK'\n")
    env = os.environ | {"PYTHONPATH": str(installed)}
    printed = ran("python", "-c", PROGRAM, cwd=here, env=env)
    for path in printed.splitlines()[:3]:
        assert path.startswith(str(installed))
    for words in ("state dict", "rank-not-set"):
        assert words in printed
    assert {path.name for path in here.iterdir()} == {"log.txt", "mlp.pt", "fixed.safetensors"}
    command = installed / "bin" / "torchclinic"
    assert torchladder.__version__ in ran(command, "--version", cwd=here, env=env)
