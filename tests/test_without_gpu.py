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


@pytest.mark.slow
def test_the_bug_of_the_page_is_found_and_cured(tmp_path):
    model, test = blocks("python")
    cured = model.replace("bool)", "bool, device=scores.device)")
    for name, text in {"model": model, "cured": cured}.items():
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"test_{name}.py").write_text(test.replace("from model", f"from {name}"))
    words = [*SIMULATE, "2", sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    [error] = blocks("text")
    assert error.strip() in done.stdout
    assert re.search(r"test_cured\.py \.\.\. .*\ntest_model\.py \.FF", done.stdout)


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
