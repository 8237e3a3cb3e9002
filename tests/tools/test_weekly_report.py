"""The report of ``make weekly``: what is new, and each output that differs, stored and new."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import weekly_report

ROOT = Path(__file__).resolve().parents[2]


def test_versions_that_differ_are_listed_and_others_are_not():
    constraints = "# tested together\ntorch==2.15.0\nsphinx_design==0.8.0\nsix==1.17.0\n"
    installed = {"torch": "2.16.0", "sphinx-design": "0.8.0", "new": "1.0", "torchladder": "0.2.0"}
    rows = weekly_report.new_versions(constraints, installed)
    assert rows == [("new", "none", "1.0"), ("torch", "2.15.0", "2.16.0")]
    page = weekly_report.report(constraints, installed, Path("nothing/is/here"))
    assert "| torch | 2.15.0 | 2.16.0 |" in page
    assert page.count("did not run to their end") == 4


@pytest.mark.slow
def test_an_output_that_differs_is_shown_as_it_was_stored_and_as_it_is_now(tmp_path):
    stored = [nbformat.v4.new_output("stream", name="stdout", text="the stored words\n")]
    cells = [
        nbformat.v4.new_code_cell("print('the new words')", outputs=stored, execution_count=1),
        nbformat.v4.new_code_cell("print('the stored words')", outputs=stored, execution_count=2),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "small.ipynb")
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope"]
    pytest_ += ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_, f"--junitxml={tmp_path}/notebooks.xml", "--rootdir", tmp_path, "small.ipynb"],
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout
    page = weekly_report.report("", {}, tmp_path)
    assert "1 failed." in page
    assert "the stored words" in page
    assert "the new words" in page
    assert "Cell 0" in page
    assert "Cell 1" not in page
    assert "x1B" not in page
