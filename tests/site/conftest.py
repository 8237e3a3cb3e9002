"""The site of the sources as they are: built from scratch, or just now by ``make test``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if folder := os.environ.get("TORCHLADDER_SITE"):
        return Path(folder).resolve()
    folder = tmp_path_factory.mktemp("site")
    tool = Path(sys.executable).with_name("jupyter-book")
    build = [tool, "build", ROOT, "--path-output", folder, "-W", "-n", "--keep-going", "--quiet"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "_build" / "html"


@pytest.fixture(scope="session")
def pages(site):
    """Every page, parsed, by its address within the site."""
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    return {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_bytes(), "html.parser")
        for path in files
    }
