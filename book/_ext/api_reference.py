"""The API reference: who uses each name, what each command prints, and what autodoc gets wrong.

Nobody keeps a list of chapters and clinic pages: the notebooks' code says which names it imports
from the packages, and which attributes of their modules it takes, such as ``training.train``.
"""

import ast
import json
import os
import re
from collections import defaultdict
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from docutils import nodes
from IPython.core.inputtransformer2 import TransformerManager
from sphinx.util.docutils import SphinxDirective
from translation import _

from torchclinic import cli

PACKAGES = ("torchladder", "torchclinic")
LINES = re.compile(r'<dl>\n((?:<dd><em class="sig-param.*</dd>\n)+)</dl>')


def trees(notebook):
    """Each code cell, parsed; what a cell magic such as ``%%writefile`` is given, too."""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            if source.startswith("%%"):
                source = source.partition("\n")[2]
            with suppress(SyntaxError):  # a shell's script, or a mistake that is to be shown
                yield parse(source)


def parse(source):
    try:
        return ast.parse(source)
    except SyntaxError:  # slow, and most cells have no such line as ``!nvidia-smi``
        return ast.parse(TransformerManager().transform_cell(source))


def names_used(notebook):
    """The full names, from the package on, that a notebook's code uses."""
    parsed = list(trees(notebook))
    nodes = [node for tree in parsed for node in ast.walk(tree)]
    known = {package: package for package in PACKAGES}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for name in node.names:
                known[name.asname or name.name] = f"{node.module}.{name.name}"
    chains = (dotted(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    used = {
        ".".join([known[first], *rest]) for first, *rest in filter(None, chains) if first in known
    }
    return used | set(known.values())


def dotted(node):
    """``["devices", "where_is"]`` for an expression that is nothing but names and dots."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return None


@cache
def notebooks_by_name(folder):
    """For each full name the notebooks that use it, in the order of the book."""
    users = defaultdict(list)
    for notebook in sorted(Path(folder).glob("*.ipynb")):
        for name in names_used(notebook):
            users[name].append(notebook.stem)
    return users


def label(notebook):
    number, _underscore, rest = notebook.partition("_")
    return number if number.isdigit() else _("clinic: {page}").format(page=rest)


def add_users(app, what, name, obj, options, lines):
    """Append a field; napoleon has made fields of the sections by now."""
    folder = Path(app.srcdir, "notebooks")
    users = notebooks_by_name(folder).get(name, [])
    if what == "module" or not users:
        return
    links = ", ".join(f":doc:`{label(user)} </notebooks/{user}>`" for user in users)
    lines += ["", ":{}: {}".format(_("Used in"), links), ""]


def pages_with_new_users(app, env, added, changed, removed):
    """All of the reference if a notebook has begun or ceased to use a name, else nothing."""
    users = dict(notebooks_by_name(Path(app.srcdir, "notebooks")))
    before, env.notebooks_by_name = getattr(env, "notebooks_by_name", None), users
    return [] if users == before else [page for page in env.found_docs if "book/api/" in page]


def write_factories(app, what, name, obj, options, signature, returns):
    """``= <factory>`` of a dataclass is no Python; left so, the whole signature loses its links."""
    return (signature and signature.replace("<factory>", "...")), returns


def lines_of_signatures(app, page, template, context, doctree):
    """Sphinx puts the lines of a long signature into a ``dl`` without terms, which HTML forbids."""
    if doctree and page.startswith("book/api/"):
        context["body"] = LINES.sub(
            lambda lines: (
                lines[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
            ),
            context["body"],
        )


def flatten_list_of_sources(app, page, template, context, doctree):
    """Sphinx nests it as no list may be nested, and all of it is under one name anyway."""
    if page == "_modules/index":
        head, _list, items = context["body"].partition("<ul>")
        context["body"] = f"{head}<ul>{re.sub('</?ul>', '', items)}</ul>"


def leave_out(app, what, name, obj, skip, options):
    """A field of a named tuple without a line of its own says only which number it has."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


class CommandHelp(SphinxDirective):
    """``command-help``: what ``torchladder COMMAND --help`` prints."""

    required_arguments = 1

    def run(self):
        self.env.note_dependency(cli.__file__)
        shown = nodes.literal_block("", help_of(self.arguments[0]), language="none")
        self.set_source_info(shown)
        return [shown]


def help_of(command):
    """As in a terminal of 80 columns, without colours (which Python 3.14 adds)."""
    terminal = {"COLUMNS": "80", "NO_COLOR": "1"}
    printed = StringIO()
    with patch.dict(os.environ, terminal), redirect_stdout(printed), suppress(SystemExit):
        cli.main([command, "--help"])
    return printed.getvalue().rstrip()


def resolve_backticks(app, env, node, contnode):
    """A name in backticks is a link if it is ours; a parameter or PyTorch's name stays code."""
    target = node["reftarget"]
    if node.get("reftype") != "obj" or target.startswith(PACKAGES):
        return None
    domain = env.get_domain("py")
    classes = [name for name in domain.objects if name.endswith(f".{target}")]
    if target[0].isupper() and len(classes) == 1:  # of another module; `train` may be a parameter
        node["reftarget"] = classes[0]
        return domain.resolve_xref(
            env, node["refdoc"], app.builder, "obj", classes[0], node, contnode
        )
    return contnode


def setup(app):
    app.add_directive("command-help", CommandHelp)
    app.connect("env-get-outdated", pages_with_new_users)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-signature", write_factories)
    app.connect("html-page-context", lines_of_signatures)
    app.connect("html-page-context", flatten_list_of_sources)
    app.connect("missing-reference", resolve_backticks)
    app.connect("autodoc-process-docstring", add_users, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
