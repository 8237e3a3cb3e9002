"""Every notebook is committed as it ran, and nbval, which `make notebooks` runs, compares enough.

These rules protect readers. What else makes a chapter good is in CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import sys
from itertools import pairwise

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from running import ROOT, text_of

from tools.refresh import digest

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in PATHS}
KNOWN = {"nbval-ignore-output", "raises-exception", "hide-output", "hide-cell", "hide-input"}

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", []))


@every_notebook
def test_a_notebook_was_run_from_top_to_bottom_and_names_its_machine(name):
    nbformat.validate(NOTEBOOKS[name])
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1)), "run make refresh"
    assert any(cell.outputs for cell in code_cells(name))
    run = NOTEBOOKS[name].metadata.get("run", {})
    assert {"date", "machine", "torch", "cpu"} <= set(run), "run make refresh"
    # The outputs are those of that run: none was edited since.
    assert run.get("outputs") == digest(NOTEBOOKS[name]), "run make refresh"


@every_notebook
def test_cells_fail_when_and_only_when_they_say_so(name):
    for cell in code_cells(name):
        assert tags(cell) <= KNOWN, cell.source
        fails = any(output.output_type == "error" for output in cell.outputs)
        assert fails == ("raises-exception" in tags(cell)), cell.source


@every_notebook
def test_outputs_are_short_and_hold_no_warning_and_no_machines_path(name):
    for cell in code_cells(name):
        for output in cell.outputs:
            text = text_of(output)
            assert text.count("\n") <= 60, cell.source
            assert output.get("name") != "stderr", text
            assert not re.search(r"/(root|home|work|tmp|Users)/\w", text), text


@every_notebook
def test_what_is_folded_says_what_it_is(name):
    for cell in code_cells(name):
        if tags(cell) & {"hide-output", "hide-cell", "hide-input"}:
            assert "code_prompt_show" in cell.metadata.get("mystnb", {}), cell.source


@every_notebook
def test_the_hidden_solution_of_an_exercise_checks_itself(name):
    title = None
    for cell, following in pairwise([*NOTEBOOKS[name].cells, new_markdown_cell()]):
        if cell.cell_type == "markdown" and (found := re.findall(r"^#+ .*", cell.source, re.M)):
            title = found[-1]
        ends_a_solution = "hide-cell" in tags(cell) - tags(following)
        if ends_a_solution and title and title.startswith("### Exercise"):
            last = ast.parse(cell.source).body[-1]
            assert isinstance(last, ast.Assert) or ast.unparse(last).endswith("solution=True)"), (
                title
            )


def exercises(name):
    """The words under each exercise's heading, and the code that a reader sees there."""
    words = None
    for cell in NOTEBOOKS[name].cells:
        if cell.cell_type == "markdown":
            *_, (title, words) = re.findall(r"(?ms)^(#+ [^\n]*|\A)\n?(.*?)(?=^#+ |\Z)", cell.source)
            words = words.strip() if title.startswith("### Exercise") else None
        elif words is not None and "hide-cell" not in tags(cell):
            yield words, cell.source


@every_notebook
def test_the_task_of_an_exercise_is_a_paragraph_above_a_cell_that_is_not_cut_off(name):
    for words, source in exercises(name):
        assert re.match(r"[\w`\[]", words), source
        if source.endswith("..."):
            assert max(map(len, source.splitlines())) <= 88, source
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    assert "\n" not in (ast.get_docstring(node) or ""), source


def test_nbval_compares_at_least_85_percent_of_the_outputs():
    ours = every = 0
    for name in NOTEBOOKS:
        shown = [cell for cell in code_cells(name) if cell.outputs]
        compared = [cell for cell in shown if "nbval-ignore-output" not in tags(cell)]
        assert len(compared) / len(shown) >= 0.7, name  # 03 shows what a machine has
        ours, every = ours + len(compared), every + len(shown)
    assert ours / every >= 0.85


# --- what is measured ---------------------------------------------------------------------------

# Clocks, and the field of a trace that says how long something took.
CLOCKS = {"perf_counter", "measure", "measure_across_ranks", "dur"}


def reads(node, measured):
    """Whether an expression or a definition reads one of these names, or a clock."""
    words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    own = [n.target for n in ast.walk(node) if isinstance(n, ast.comprehension)]
    words -= {n.id for target in own for n in ast.walk(target) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} & CLOCKS
    words |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & CLOCKS
    return bool(words & measured)


def set_by(node):
    """The target and the value of whatever gives a name its value."""
    match node:
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target) | ast.NamedExpr(target):
            return target, node.value
        case ast.For(
            target=ast.Tuple(elts=[_, target]), iter=ast.Call(ast.Attribute(attr="items"))
        ):
            return target, node.iter
        case ast.For(target=target):
            return target, node.iter
        case ast.Call(ast.Attribute(value=target, attr="append")):
            return target, ast.Tuple(node.args)
    return None


def statements(node):
    """The nodes of a cell in order, without what is inside of definitions."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from statements(child)


def claims_of_the_machine(sources):
    """Assertions on what was measured, other than ``assert when_recorded(...)``."""
    trees = [ast.parse(TransformerManager().transform_cell(source)) for source in sources]
    defined = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    measured = set(CLOCKS)
    for _ in defined:  # one may call another
        measured |= {function.name for function in defined if reads(function, measured)}
    for node in (node for tree in trees for node in statements(tree)):
        if pair := set_by(node):
            target, value = pair
            part = isinstance(target, ast.Subscript)
            names = {n.id for n in ast.walk(target.value if part else target) if hasattr(n, "id")}
            if reads(value, measured):
                measured |= names
            elif isinstance(node, ast.Assign | ast.For) and not part:
                measured -= names
        is_claim = isinstance(node, ast.Assert) and "when_recorded(" not in ast.unparse(node)
        if is_claim and reads(node.test, measured):
            yield ast.unparse(node)


@every_notebook
def test_what_is_measured_is_asserted_only_where_outputs_are_recorded(name):
    assert not list(claims_of_the_machine(cell.source for cell in code_cells(name)))


def test_chapter_21_concludes_what_its_tables_say():
    """Not asserted in its cells, in which readers put the numbers of their own machines."""
    said = "\n".join(text_of(o) for c in code_cells("21_rung_6_rehearse") for o in c.outputs)
    night = re.findall(r"^(?:shard 16|replicate 2, shard 8) .* (\S+) in .* (\S+) in", said, re.M)
    [[few, full], [two_full, two_more]] = night
    assert float(few) < float(full)
    assert full == two_full == two_more
    rows = re.findall(
        r"^(\S.*?)  +([\d,]+)  +([\d,]+)$", said.split("tokens per GPU that hide it ")[-1], re.M
    )
    tokens = {name: [float(n.replace(",", "")) for n in numbers] for name, *numbers in rows}
    assert len(tokens) == 10
    for name, (single, two) in tokens.items():
        assert two < single
        assert (two > 0.9 * single) == (name == "H100, 400 Gbit/s for each GPU")
    eight = re.findall(r"predicted (\S+) GB, counted (\S+) GB, hidden from (\S+) tokens", said)
    assert all(abs(float(guess) / float(out) - 1) < 0.02 for guess, out, _ in eight)
    single, copies = (float(n.replace(",", "")) for *_, n in eight)
    [in_bf16] = re.findall(r"with gradients in bfloat16: (\S+) and (\S+)", said)
    assert single < copies
    assert float(in_bf16[0].replace(",", "")) > float(in_bf16[1].replace(",", ""))


@pytest.mark.slow
def test_a_command_that_meets_its_limit_turns_a_chapter_red(tmp_path):
    sources = ("printed = %sx sleep 60", "1 + 1")
    cells = [
        new_code_cell(source, metadata={"tags": ["nbval-ignore-output"]}, execution_count=1)
        for source in sources
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "hangs.ipynb")
    nbval = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=3", "-p", "no:cacheprovider"]
    config = ["-c", str(ROOT / "pyproject.toml"), "-n", "0"]
    command = [sys.executable, "-m", "pytest", *config, *nbval, str(tmp_path / "hangs.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "XPASS(strict)" in done.stdout) == (1, True), done.stdout
