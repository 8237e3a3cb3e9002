"""The API reference: what each command prints, and what autodoc gets wrong."""

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest.mock import patch

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import torchexercises as check
from torchclinic import cli


def write_factories(app, what, name, obj, options, signature, returns):
    """``= <factory>`` of a dataclass is no Python; left so, the whole signature loses its links."""
    return (signature and signature.replace("<factory>", "...")), returns


def leave_out(app, what, name, obj, skip, options):
    """A field of a named tuple without a line of its own says only which number it has."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


class CommandHelp(SphinxDirective):
    """``command-help``: what ``torchclinic COMMAND --help`` prints."""

    required_arguments = 1

    def run(self):
        self.env.note_dependency(cli.__file__)
        shown = nodes.literal_block("", help_of(self.arguments[0]), language="none")
        self.set_source_info(shown)
        return [shown]


class Exercises(SphinxDirective):
    """``exercises``: a table of all that ``torchexercises`` judges, each a link to its page."""

    def run(self):
        self.env.note_reread()  # the cases are in several files
        rows = ["| Chapter | Exercise | Minutes | Ranks |", "| --- | --- | ---: | --- |"]
        chapters = {doc[10:12]: doc for doc in self.env.found_docs if doc.startswith("notebooks/")}
        in_order = sorted(check.all_exercises().items(), key=lambda item: item[1].chapter)
        for name, known in in_order:
            ranks = ", ".join(map(str, known.ranks)) if known.ranks != (1,) else ""
            link = f"[{known.chapter}](../{chapters[known.chapter]}.ipynb#exercises)"
            rows.append(f"| {link} | `{name}` | {known.minutes} | {ranks} |")
        return self.parse_text_to_nodes("\n".join(rows))


def help_of(command):
    """As in a terminal of 80 columns, without colours (which Python 3.14 adds)."""
    terminal = {"COLUMNS": "80", "NO_COLOR": "1"}
    printed = StringIO()
    with patch.dict(os.environ, terminal), redirect_stdout(printed), suppress(SystemExit):
        cli.main([command, "--help"])
    return printed.getvalue().rstrip()


def leave_as_code(app, env, node, contnode):
    """A name in backticks is a link if it is ours; a parameter or PyTorch's name stays code."""
    ours = node["reftarget"].startswith(("torchladder", "torchclinic", "torchexercises"))
    return contnode if node.get("reftype") == "obj" and not ours else None


def setup(app):
    app.add_directive("command-help", CommandHelp)
    app.add_directive("exercises", Exercises)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-signature", write_factories)
    app.connect("missing-reference", leave_as_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
