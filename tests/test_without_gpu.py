"""book/test_without_gpu.md: what a stranger copies from it does what the page says."""

import re
import subprocess
import sys

import pytest
import yaml
from running import ROOT, SIMULATE, ran

PAGE = (ROOT / "book" / "test_without_gpu.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def pytest_says(folder, *before):
    words = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.slow
def test_the_bug_of_the_page_is_found_and_cured(tmp_path):
    model, test = blocks("python")
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "test_model.py").write_text(test)
    [error] = blocks("text")
    found = pytest_says(tmp_path, *SIMULATE, "2")
    assert error.strip() in found
    assert "2 failed, 1 passed" in found
    (tmp_path / "model.py").write_text(model.replace("bool)", "bool, device=scores.device)"))
    assert "3 passed" in pytest_says(tmp_path, *SIMULATE, "2")


def test_the_workflow_is_one_of_githubs_and_runs_the_commands_of_the_page(tmp_path):
    [text] = blocks("yaml")
    (tmp_path / "tests.yml").write_text(text)
    schema = ["--builtin-schema", "vendor.github-workflows"]
    ran("python", "-m", "check_jsonschema", *schema, tmp_path / "tests.yml")
    steps = yaml.safe_load(text)["jobs"]["two-gpus"]["steps"]
    [console] = blocks("console")
    _make_the_wheel, *there = re.findall(r"\$ (.+)", console)
    assert [step["run"] for step in steps[3:]] == there


def test_the_table_is_that_of_the_module():
    """By an include, which is silent where its marks are not found."""
    marks = re.search(r"\{include\} (\S+)\n:start-after: (.+)\n:end-before: '(.+)'", PAGE)
    path, start, end = marks.groups()
    source = (ROOT / "book" / path).read_text()
    table = source.split(start)[1].split(end)[0].strip()
    assert table.startswith("| simulated | not simulated |")
    assert len(table.splitlines()) > 5
