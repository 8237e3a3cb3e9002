"""The landing page's numbers, diff and answer, read from the repository when the site is built.

The roles: ``added`` counts the lines that one program of ``rungs/`` adds to another; ``stored``
takes what a pattern's brackets match in the stored outputs of a chapter; ``count`` counts what the
book holds. The directive ``changes`` shows a diff of two programs, ``explained`` a log and what the
error clinic says to it. What is not found fails the build.
"""

import difflib
import json
import re
from pathlib import Path

from docutils import nodes
from error_clinic import CATALOGUE, LINK, moved
from sphinx.util.docutils import SphinxDirective, SphinxRole
from translation import _

from torchclinic import errors

NO_BREAK = "\u00a0"  # between a number and its unit


class Told(SphinxRole):
    """Text that a function reads from files; the role's own text says which and what."""

    def __init__(self, read):
        self.read = read

    def run(self):
        files, words = self.read(Path(self.env.app.srcdir), self.text)
        for file in files:
            self.env.note_dependency(file)
        return [nodes.Text(words)], []


def added(root, names):
    """As the chapters count: all lines but the program's title."""
    files = [root / "rungs" / name for name in names.split()]
    lines = difflib.ndiff(*(program(file) for file in files))
    return files, str(sum(line.startswith("+ ") for line in lines))


def program(file):
    _title, *lines = file.read_text(encoding="utf-8").splitlines()
    return ["", *lines]


def stored(root, text):
    chapter, pattern = text.split(" ", 1)
    file = root / "notebooks" / f"{chapter}.ipynb"
    outputs = "\n".join(outputs_of(file))
    found = re.search(pattern, outputs)
    if not found:
        raise ValueError(f"no output of {chapter} has {pattern}")
    return [file], found[1].replace(" ", NO_BREAK)


def outputs_of(file):
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            yield "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))


def count(root, what):
    chapters = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    if what == "errors":
        return [CATALOGUE], str(len(errors.catalogue()))
    if what == "chapters":
        return [], str(len(chapters))
    if what == "outputs":
        notebooks = [*chapters, *(root / "notebooks").glob("errors_*.ipynb")]
        return notebooks, f"{sum(len(list(outputs_of(file))) for file in notebooks):,}"
    raise ValueError(f"cannot count {what}")


class Changes(SphinxDirective):
    required_arguments = 2

    def run(self):
        files = [Path(self.env.app.srcdir, "rungs", name) for name in self.arguments]
        for file in files:
            self.env.note_dependency(file)
        names = [f"rungs/{name}" for name in self.arguments]
        lines = difflib.unified_diff(*map(program, files), *names, n=1, lineterm="")
        text = "\n".join(lines)
        return [nodes.literal_block(text, text, language="udiff")]


class Explained(SphinxDirective):
    has_content = True

    def run(self):
        self.env.note_dependency(CATALOGUE)
        log = "\n".join(self.content)
        error = errors.find(log)[0].error
        told = _("**Why.** {why}\n\n**What to do.** {fix}")
        why, fix = error.in_brief
        told = told.format(why=why, fix=fix)
        answer = f"[{error.message}]({error.page}.ipynb#{error.id})\n\n{told}"
        answer = LINK.sub(lambda found: moved(found[1]), answer)
        box = nodes.container("", *self.parse_text_to_nodes(answer), classes=["explained"])
        return [nodes.literal_block(log, log, language="ipython-error"), box]


def add_files(app, page, template, context, doctree):
    if page == app.config.root_doc:
        app.add_css_file("landing.css")


def setup(app):
    for name, read in {"added": added, "stored": stored, "count": count}.items():
        app.add_role(name, Told(read))
    app.add_directive("changes", Changes)
    app.add_directive("explained", Explained)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
