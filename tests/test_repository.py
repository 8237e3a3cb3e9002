"""The files around the book: what GitHub, PyPI and newcomers read.

What only GitHub can run is held to commands that everybody can run.
"""

import os
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml
from running import ROOT, ran, shellcheck

import torchclinic

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def jobs(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps(path):
    return [step for job in jobs(path).values() for step in job["steps"]]


# --- what GitHub reads --------------------------------------------------------------------------

SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[0-9]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.dependabot": ".github/dependabot.yml",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_files_are_as_their_schema_says(schema):
    tool = ["python", "-m", "check_jsonschema", "--builtin-schema", schema]
    ran(*tool, *sorted(ROOT.glob(SCHEMAS[schema])))


def test_a_workflow_runs_only_what_a_laptop_runs():
    """Targets of the Makefile, or commands that CONTRIBUTING.md names."""
    known = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    runs = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    for command in "\n".join(runs).splitlines():
        first, *words = shlex.split(command)
        if first == "make":
            targets = {word for word in words if "=" not in word} - {"-k"}
            assert targets
            assert targets <= known, command
        else:
            assert f"`{first} {words[0]}" in text(".github/CONTRIBUTING.md"), command


def test_actions_are_named_by_commit_and_rights_are_given_one_by_one():
    for path in WORKFLOWS:
        workflow = path.read_text(encoding="utf-8")
        for name in re.findall(r"uses: (.*)", workflow):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d[\d.]*", name), name
        assert yaml.safe_load(workflow)["permissions"] in ({}, {"contents": "read"})
        for job in jobs(path).values():
            if "write" in job.get("permissions", {}).values():  # it holds a right that others want
                assert not any("setup-python" in step.get("uses", "") for step in job["steps"])


# --- the test command ---------------------------------------------------------------------------


def test_a_part_that_fails_keeps_no_other_from_running_and_is_named_at_the_end(tmp_path):
    """`help` is a part here that passes; `make test` sets variables for the test that runs here."""
    (tmp_path / "tested").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for parts, last in {"nosuch help": "Failed: nosuch. ", "help help": "All checks pas"}.items():
        command = ["make", "test", "VENV=.", f"PARTS={parts}", "--old-file=tested"]
        env = {"PATH": os.environ["PATH"]}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert "make quick" in done.stdout
        assert done.stdout.splitlines()[-1].startswith(last)
        assert bool(done.returncode) == last.startswith("Failed")


def test_the_recipes_take_paths_with_spaces():
    """Paths that users choose are here variables of the shell: unquoted, they would be words."""
    targets = re.search(r"^\.PHONY: (.*)", text("Makefile"), re.MULTILINE)[1].split()
    paths = [f"{name}=$${name}" for name in ("CURDIR", "PYTHON", "FASHION", "MACHINE", "LINK")]
    command = ["make", "-nB", "--no-print-directory", *paths, *targets]
    printed = ran(*command, cwd=ROOT, env={"PATH": os.environ["PATH"]})
    recipes = re.sub(r"^make\b.*", "", printed, flags=re.MULTILINE)  # its own words
    assert "rm -rf _build/kaggle" in recipes
    # GROUPS, a list, may be split; `a && b || c` is not meant as if-then-else.
    shellcheck("--shell=sh", "--exclude=SC2015", "-", input=recipes)


def test_a_clone_that_cannot_be_in_the_path_is_refused(tmp_path):
    command = ["make", "-f", str(ROOT / "Makefile"), "help"]
    (tmp_path / "a:b").mkdir()
    for folder, refused in {"a:b": True, ".": False}.items():
        done = subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True)
        assert ("a folder with a colon cannot be in PATH" in done.stderr) == refused
        assert bool(done.returncode) == refused


def test_nothing_is_removed_but_what_a_recipe_has_made():
    for host in ("..", "../..", "a b", "", "kaggle colab"):
        command = ["make", "-n", "test-hosted", f"HOST={host}"]
        env = {"PATH": os.environ["PATH"]}  # not the variables of `make test`
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert "rm -rf" not in done.stdout
        assert f"HOST={host}: choose kaggle or colab" in done.stderr


# --- what is installed --------------------------------------------------------------------------


def test_with_constraints_nothing_is_installed_whose_hash_is_not_known():
    command = [
        "make",
        "-nB",
        "CONSTRAINTS=tools/locks/newest.txt",
        "VENV=new",
        "new/tested",
        "dist",
    ]
    lines = re.findall(r".*(?:pip install|-m build).*", ran(*command, cwd=ROOT))
    closed = "--require-hashes --no-deps|--no-index --no-build-isolation|--no-isolation"
    kinds = [re.findall(closed, line) for line in lines]
    assert list(map(len, kinds)) == [1] * 5  # without index or isolation nothing is fetched


def test_the_helper_does_not_know_the_exercises():
    """That the clinic knows neither, ruff sees."""
    for path in (ROOT / "src/torchladder").rglob("*.py"):
        assert "torchexercises" not in path.read_text(encoding="utf-8")


def test_the_oldest_versions_are_those_that_the_package_asks_for():
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["book"]]
    asked = [line for line in needed if line.startswith("torch")]
    assert GROUPS["oldest"] == [f"{line.replace('>=', '==')}.*" for line in asked]
    assert f"torch=={'.'.join(map(str, torchclinic.OLDEST_TORCH))}.*" in GROUPS["oldest"]


# --- what newcomers read ------------------------------------------------------------------------


def test_documents_link_to_what_is_there():
    for path in [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]:
        shown = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))  # without code
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", shown):
            if not target.startswith(("http", "../../../security/advisories/new")):
                assert (path.parent / target).exists(), (path.name, target)


def test_the_tests_that_the_security_policy_names_are_there():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+|(?<=\.py` \(`)\w+)`", text(".github/SECURITY.md")):
        assert re.search(rf'^def {name}\(|"{name}"', tests, re.M), name
    for path in re.findall(r"`(tests/[\w/.]+)`", text(".github/SECURITY.md")):
        assert (ROOT / path).exists(), path


def test_the_readmes_chapters_are_there_in_the_order_of_the_contents():
    chapters = re.findall(r"file: notebooks/((\d\d)_\w+)$", text("_toc.yml"), re.MULTILINE)
    rows = re.findall(r"^\| \[(\d\d)\]\(notebooks/(.*)\.ipynb\)", text("README.md"), re.MULTILINE)
    assert rows == [(number, name) for name, number in chapters if (number, name) in rows]


def test_a_link_to_a_chapter_names_its_number():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("book/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]:
        link = r"\[chapter (\d\d)[^\]]*\]\((?:\.\./)?(?:notebooks/)?(\d\d)_"
        for named, linked in re.findall(link, path.read_text(encoding="utf-8"), re.IGNORECASE):
            assert named == linked, path.name
