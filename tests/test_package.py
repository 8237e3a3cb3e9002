"""What holds for the packages as a whole."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"


def imported_by(path, modules):
    """Which of the `modules` a file imports, inside of functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            # Of a package, its modules alone may be asked for.
            names |= inside if inside <= modules else inside | {node.module}
    return names & modules


def test_no_circle_of_imports_even_inside_functions_and_the_clinic_needs_nothing_of_the_book():
    files = {
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SRC.rglob("*.py")
    }
    graph = {name: imported_by(path, files.keys()) - {name} for name, path in files.items()}
    assert "torchladder.measuring" in graph["torchladder.training"]
    # A circle raises graphlib.CycleError, which names its modules.
    TopologicalSorter(graph).prepare()
    clinic = [needed for name, needed in graph.items() if name.startswith("torchclinic")]
    assert not {name for name in set().union(*clinic) if name.startswith("torchladder")}
