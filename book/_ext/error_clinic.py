"""The error clinic: anchors of its entries, the index of them, and the box that takes a log.

Every section of a notebook ``errors_NAME`` is an entry of the catalogue, and its anchor is the
entry's id. The directive ``error-index`` lists the entries of a part, ``symptoms`` those that it
names; ``log-box`` and ``index-filter`` are fields for the page's script, whose argument is their
label, and ``ask-others`` says what to collect. The rules by which the script finds entries in a log
are written into the site as a script, so that the page works from a file, too.
"""

import json
import re
from html import escape
from pathlib import Path
from posixpath import relpath

from controls import raw
from docutils import nodes
from site_pages import add_description
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from torchclinic import errors

LOGGER = logging.getLogger(__name__)
NOTEBOOK = re.compile(r"(?:notebooks|runs/[^/]+)/errors_(\w+)")
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
CATALOGUE = sorted(errors.CATALOGUE.glob("*.toml"))
RULES = "error_rules.js"


def note_catalogue(env):
    """A page that shows entries is built again when the catalogue has changed."""
    for file in CATALOGUE:
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
    """The entries of a part: message, cause, what to do, where one meets it, code that works."""

    required_arguments = 1

    def run(self):
        note_catalogue(self.env)
        index = nodes.bullet_list("", classes=["error-index"])
        for error in entries(self.arguments[0]):
            link = f"[{error.message}]({error.page}.ipynb#{error.id})"
            cause, fix = error.in_brief
            told = {"message": link, "cause": cause, "fix": fix}
            parts = [self.paragraph(f"error-{name}", text) for name, text in told.items()]
            parts += [nodes.paragraph("", facts(error), classes=["error-facts"])]
            if error.works:
                code = nodes.literal_block(error.works, error.works, language="ipython3")
                parts += [nodes.container("", code, classes=["error-works"])]
            index += nodes.list_item("", *(part for part in parts if part.astext()))
        return [index]

    def paragraph(self, name, markdown):
        """Text of the catalogue, whose links start from the notebooks."""
        text = LINK.sub(lambda found: moved(found[1]), " ".join(markdown.split()))
        (paragraph,) = self.parse_text_to_nodes(text)
        paragraph["classes"].append(name)
        return paragraph


class Symptoms(SphinxDirective):
    """Links to entries that have no message, each of which is found by what one sees."""

    has_content = True

    def run(self):
        note_catalogue(self.env)
        listed = [errors.catalogue()[name] for name in self.content]
        links = [f"- [{e.message}]({moved(f'{e.page}.ipynb')}#{e.id})" for e in listed]
        return self.parse_text_to_nodes("\n".join(links))


def moved(path):
    return relpath(f"notebooks/{path}", "book")


def facts(error):
    """What it takes to meet an error, and of which kind it is if it is no plain one."""
    words = {
        "2 processes": "with several processes",
        "gpu": "with a GPU",
        "2 gpus": "with several GPUs",
        "follows": "follows from another error",
        "warning": "a warning",
        "silent": "no message",
    }
    return " · ".join(words[fact] for fact in (error.needs, error.kind) if fact in words)


class Field(SphinxDirective):
    """A field with a label, a hint and where the script answers; hidden without a script."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True
    id = field = ""

    def run(self):
        label = f'<label for="{self.id}">{escape(self.arguments[0])}</label>'
        hint = self.parse_content_to_nodes()
        for paragraph in hint:
            paragraph["ids"].append(f"{self.id}-hint")
            paragraph["classes"].append("field-hint")
        says = f'<p class="field-says" id="{self.id}-says" role="status"></p></div>'
        start = raw(f'<div class="clinic-field" hidden>{label}')
        return [start, *hint, raw(self.field), raw(says)]


class LogBox(Field):
    id = "log"
    field = """<textarea id="log" rows="9" wrap="off" aria-describedby="log-hint"
 autocomplete="off" autocapitalize="off" spellcheck="false"></textarea>"""


class IndexFilter(Field):
    id = "index-filter"
    field = """<input type="text" id="index-filter" aria-describedby="index-filter-hint"
 autocomplete="off" autocapitalize="off" spellcheck="false">"""


class AskOthers(SphinxDirective):
    def run(self):
        return self.parse_text_to_nodes(errors.ASK)


# --- files --------------------------------------------------------------------------------------


def write_rules(app, env):
    if any(RULES in metadata.get("files", "") for metadata in env.metadata.values()):
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        # A script and not data: a page that is opened as a file may not read another file.
        (folder / RULES).write_text(f"const errorRules = {json.dumps(errors.rules())};\n")


def describe(app, page, template, context, doctree):
    """For search engines: the notebooks of the clinic all open with the same paragraph."""
    if doctree and (notebook := NOTEBOOK.fullmatch(page)):
        count = len(entries(notebook[1]))
        told = "{title}: {count} errors of PyTorch, each with code that fails and works."
        add_description(context, told.format(title=context["title"], count=count))


def setup(app):
    app.add_transform(Anchors)
    app.add_directive("error-index", Index)
    app.add_directive("symptoms", Symptoms)
    app.add_directive("log-box", LogBox)
    app.add_directive("index-filter", IndexFilter)
    app.add_directive("ask-others", AskOthers)
    app.connect("env-updated", write_rules)
    app.connect("html-page-context", describe, priority=400)  # before site_pages describes it
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
