"""What holds for the package as a whole."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import torchladder

SOURCE = Path(torchladder.__file__).parent


def imported_by(path):
    """Names of the package's modules that `path` imports, inside of functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_modules_do_not_import_each_other_in_a_circle_not_even_inside_functions():
    files = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in SOURCE.rglob("*.py")
    }
    graph = {name: imported_by(path) & files.keys() - {name} for name, path in files.items()}
    assert "torchladder.measuring" in graph["torchladder.training"]
    # A circle raises graphlib.CycleError, which names its modules.
    TopologicalSorter(graph).prepare()
