"""Labelled fields of a calculator, and the phrases that its script puts together.

The directive ``controls`` takes YAML: a ``legend``, a list of ``fields``, and ``more``: a list of
folded parts, which have a legend and fields, too, and may be ``open``. A field has a
``name`` (that of the setting in the page's script and in links), a ``label``, and either
``options``, or ``value`` with the limits ``from`` and ``to``. An option may ``set`` other fields;
``if`` says for which options a field is there. The directive ``phrases`` takes a YAML mapping of
names to sentences with ``{gaps}``. What they write is in controls.html.
"""

import json
from pathlib import Path

import jinja2
import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
)  # fmt: skip


class Controls(SphinxDirective):
    """``controls``: a fieldset; its argument is the first part of every ``id``."""

    has_content = True
    required_arguments = 1

    def run(self):
        return self.show("controls", id=self.arguments[0])

    def show(self, kind, **more):
        told = yaml.safe_load("\n".join(self.content))
        return [rendered("controls.html", kind=kind, told=told, json=json.dumps, **more)]


class Phrases(Controls):
    required_arguments = 0

    def run(self):
        return self.show("phrases")


def rendered(template, **gaps):
    """A template of this folder, filled, as a node."""
    return raw(TEMPLATES.get_template(template).render(gaps))


def raw(html):
    return nodes.raw("", html, format="html")


def setup(app):
    app.add_directive("controls", Controls)
    app.add_directive("phrases", Phrases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
