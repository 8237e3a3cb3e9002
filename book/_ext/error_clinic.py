"""The error clinic: anchors of its entries, the index of them, and the rules for a log.

Every section of a notebook ``errors_NAME`` is an entry of the catalogue, and its anchor is the
entry's id. The directive ``error-index`` lists the entries of a part, ``ask-others`` says what to
collect, and ``deciding`` what decides in a kind of symptom. The rules by which the page's script
finds entries in a log are written into the site as a script, so that the page works from a file,
too.
"""

import json
import re
from pathlib import Path
from posixpath import relpath

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from book._ext.controls import raw
from book._ext.descriptions import add_description
from tools.clinic_notebooks import heading
from torchclinic import errors
from torchclinic.errors.entries import CATALOGUE, page
from torchclinic.errors.telling import ASK

LOGGER = logging.getLogger(__name__)
NOTEBOOK = re.compile(r"(?:notebooks|book/runs/[^/]+)/errors_(\w+)")
LINK = re.compile(r"(?<=\]\()([^)#:\s]*)(?=[)#])")
RULES, WORDS = "error_rules.js", "error_words.js"


def note_catalogue(env):
    """A page that shows entries is built again when the catalogue has changed."""
    for file in CATALOGUE.glob("*.toml"):
        env.note_dependency(file)


def entries(part):
    return [error for error in errors.catalogue().values() if error.part == part]


# --- anchors ------------------------------------------------------------------------------------


class Anchors(SphinxTransform):
    """The anchor of an entry's section is its id, not one made of a long message."""

    default_priority = 800  # before anchors are looked up, and before the contents are collected

    def apply(self):
        if not (page := NOTEBOOK.fullmatch(self.env.docname)):
            return
        note_catalogue(self.env)
        top = self.document.next_node(nodes.section)
        sections = [child for child in top if isinstance(child, nodes.section)]
        wanted = entries(page[1])
        if len(sections) == len(wanted):
            for section, error in zip(sections, wanted, strict=True):
                name_section(self.document, section, error.id)
        elif self.env.docname.startswith("notebooks/"):  # a recorded run may be older
            told = f"{len(sections)} sections for {len(wanted)} entries: run make refresh"
            LOGGER.warning(told, location=self.env.docname)


def name_section(document, section, name):
    for old in section["ids"]:
        document.ids.pop(old, None)
    for key in [key for key, value in document.nameids.items() if value in section["ids"]]:
        document.nameids[key] = name
    section["ids"] = [name]
    section["classes"].append("error-entry")
    document.ids[name] = section
    # The same dictionary is what links from other pages are resolved with.
    document.myst_slugs[name] = (section.line, name, section.next_node(nodes.title).astext())


# --- the page -----------------------------------------------------------------------------------


class Index(SphinxDirective):
    """The entries of a part: title and message, and, for the box, the whole cause and cure."""

    required_arguments = 1

    def run(self):
        note_catalogue(self.env)
        index = nodes.bullet_list("", classes=["error-index"])
        for error in entries(self.arguments[0]):
            link = f"[{heading(error.title)}]({error.page}.ipynb#{error.id})"
            brief = {"title": link, "message": error.message}
            whole = {"cause": error.cause, "fix": error.fix}
            parts = [self.part(f"error-{name}", text) for name, text in (brief | whole).items()]
            index += nodes.list_item("", *parts)
        return [raw(f"<details><summary>{len(index)} errors</summary>"), index, raw("</details>")]

    def part(self, name, markdown):
        return shown(self, markdown, name, f"errors_{self.arguments[0]}.ipynb")


def shown(directive, markdown, name, own=""):
    """Text of the catalogue, whose links start from the notebooks, or from the entry's page."""
    text = LINK.sub(lambda found: relpath(f"notebooks/{found[1] or own}", "book"), markdown)
    return nodes.container("", *directive.parse_text_to_nodes(text), classes=[name])


class Deciding(SphinxDirective):
    """What decides in a kind of symptom."""

    required_arguments = 1

    def run(self):
        note_catalogue(self.env)
        kind = self.arguments[0]
        return [shown(self, page("deciding")[kind]["ask"], f"deciding-{kind}")]


class AskOthers(SphinxDirective):
    def run(self):
        return self.parse_text_to_nodes(ASK)


# --- files --------------------------------------------------------------------------------------


def write_rules(app, env):
    if any(RULES in metadata.get("files", "") for metadata in env.metadata.values()):
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        # A script and not data: a page that is opened as a file may not read another file.
        (folder / RULES).write_text(f"const errorRules = {json.dumps(errors.rules())};\n")
        questions = json.dumps(errors.questions(), ensure_ascii=False)
        (folder / WORDS).write_text(f"const errorWords = {questions};\n", "utf-8")


def describe(app, page, template, context, doctree):
    """For search engines: the notebooks of the clinic all open with the same paragraph."""
    if doctree and (notebook := NOTEBOOK.fullmatch(page)):
        count = f"{context['title']}: {len(entries(notebook[1]))} errors of PyTorch"
        add_description(context, f"{count}, each with code that fails and works.")


def unfold_contents(app, page, template, context, doctree):
    """*On this page* of the list of all errors names its groups."""
    if page == "book/errors":
        context["theme_show_toc_level"] = 2


def setup(app):
    app.add_transform(Anchors)
    app.add_directive("error-index", Index)
    app.add_directive("ask-others", AskOthers)
    app.add_directive("deciding", Deciding)
    app.connect("env-updated", write_rules)
    app.connect("html-page-context", describe, priority=400)  # before descriptions does
    app.connect("html-page-context", unfold_contents, priority=400)  # before the theme draws it
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
