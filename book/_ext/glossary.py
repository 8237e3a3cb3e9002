"""A link into the glossary brings the definition along."""

import re
from functools import cache
from html import escape

from docutils import nodes


def define_terms(app, page, template, context, doctree):
    """Put the definition where torchladder.js finds it to show."""
    if doctree:
        context["body"] = re.sub(
            r'(href="[^"]*\bglossary\.html#([\w-]+)")(?=>)',
            lambda link: f'{link[1]} aria-description="{definitions(app.env).get(link[2], "")}"',
            # In docutils' list of references each has a role that a list may not hold.
            context["body"].replace('role="doc-biblioentry"', 'role="listitem"'),
        )


@cache
def definitions(env):
    """The first paragraph of each term, by its anchor."""
    sections = env.get_doctree("book/glossary").findall(nodes.section)
    told = {part["ids"][0]: part.next_node(nodes.paragraph).astext() for part in sections}
    return {name: escape(" ".join(text.split())) for name, text in told.items()}


def setup(app):
    app.connect("html-page-context", define_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
