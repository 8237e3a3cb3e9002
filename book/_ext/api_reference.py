"""The API reference: who uses each name, what each command prints, and what autodoc gets wrong.

Nobody keeps a list of chapters and clinic pages: the notebooks' code says which names it imports
from the packages, and which attributes of their modules it takes, such as ``training.train``.
"""

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
from sphinx.util.docutils import SphinxDirective
from translation import _

from torchclinic import cli

IMPORT = re.compile(
    r"^ *from (torch(?:ladder|clinic)[\w.]*) import ([\w ,]+|\([^)]+\))", re.MULTILINE
)
LINES = re.compile(r'<dl>\n((?:<dd><em class="sig-param.*</dd>\n)+)</dl>')


def names_used(code):
    """The full names, from the package on, that code uses; it need not be all Python."""
    known = {}
    for module, names in IMPORT.findall(code):
        for name in names.strip("()").split(","):
            name, _as, other = name.strip().partition(" as ")
            known[other or name] = f"{module}.{name}"
    chains = re.findall(r"(?<![\w.])([A-Za-z_]\w*)((?:\.\w+)*)", code)
    return {known[first] + rest for first, rest in chains if first in known}


@cache
def notebooks_by_name(folder):
    """For each full name the notebooks that use it, in the order of the book."""
    users = defaultdict(list)
    for notebook in sorted(Path(folder).glob("*.ipynb")):
        cells = json.loads(notebook.read_bytes())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        for name in names_used(code):
            users[name].append(notebook.stem)
    return users


def add_users(app, what, name, obj, options, lines):
    """Append a field; napoleon has made fields of the sections by now."""
    folder = Path(app.srcdir, "notebooks")
    links = []
    for user in notebooks_by_name(folder).get(name, []):
        app.env.note_dependency(folder / f"{user}.ipynb")
        number, _underscore, rest = user.partition("_")
        label = number if number.isdigit() else _("clinic: {page}").format(page=rest)
        links.append(f":doc:`{label} </notebooks/{user}>`")
    if links and what != "module":
        lines += ["", ":{}: {}".format(_("Used in"), ", ".join(links)), ""]


def write_factories(app, what, name, obj, options, signature, returns):
    """``= <factory>`` of a dataclass is no Python; left so, the whole signature loses its links."""
    return (signature and signature.replace("<factory>", "...")), returns


def leave_out(app, what, name, obj, skip, options):
    """A field of a named tuple without a line of its own says only which number it has."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def lines_of_signatures(app, page, template, context, doctree):
    """Sphinx puts the lines of a long signature into a ``dl`` without terms, which HTML forbids."""
    if doctree and page.startswith("book/api/"):
        context["body"] = LINES.sub(
            lambda lines: (
                lines[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
            ),
            context["body"],
        )


class CommandHelp(SphinxDirective):
    """``command-help``: what ``torchclinic COMMAND --help`` prints."""

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


def leave_as_code(app, env, node, contnode):
    """A name in backticks is a link if it is ours; a parameter or PyTorch's name stays code."""
    ours = node["reftarget"].startswith(("torchladder", "torchclinic"))
    return contnode if node.get("reftype") == "obj" and not ours else None


def setup(app):
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-signature", write_factories)
    app.connect("html-page-context", lines_of_signatures)
    app.connect("missing-reference", leave_as_code)
    app.connect("autodoc-process-docstring", add_users, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
