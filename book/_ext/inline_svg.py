"""Pictures of ``book/figures`` become part of the page, which an ``<img>`` is not.

There they take the colour of the text, so they follow the theme, and their words can be found and
selected. The frame is that of the figures that cells draw: `torchladder.showing.Svg`. In place of a
picture, a template of the same name is shown where there is one: it goes step by step.
"""

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from book._ext.controls import TEMPLATES

LOGGER = logging.getLogger(__name__)
FRAME = '<figure class="torchladder-figure mechanism" role="img" aria-label="{}">{}</figure>'


class InlineSvg(SphinxPostTransform):
    default_priority = 5
    formats = ("html",)

    def run(self, **kwargs):
        for image in list(self.document.findall(nodes.image)):
            if not re.fullmatch(r"book/figures/[\w.-]+\.svg", image["uri"]):
                continue
            if not isinstance(image.parent, nodes.paragraph) or len(image.parent) > 1:
                LOGGER.warning("a picture needs a paragraph of its own", location=image)
                continue
            file = Path(self.app.srcdir, image["uri"])
            if (steps := file.with_suffix(".html")).exists():
                html = TEMPLATES.from_string(steps.read_text(encoding="utf-8")).render()
            else:
                svg = file.read_text(encoding="utf-8").strip()
                html = FRAME.format(escape(image.get("alt", "")), svg)
            image.parent.replace_self(nodes.raw("", html, format="html"))


def add_captions(app, page, template, context, doctree):
    """Below a figure, what it says to those who cannot see it; of a long text the start."""
    figure = r'(?s)(<figure class="torchladder-figure[^>]* aria-label="([^"]*)">.*?)(?=</figure>)'
    if doctree and page.startswith(("notebooks/", "book/")):
        context["body"] = re.sub(figure, with_caption, context["body"])


def with_caption(figure):
    said = figure[2] if len(figure[2]) < 150 else re.split(r"(?<=[.:;]) (?=[A-Z])", figure[2])[0]
    return f"{figure[1]}<figcaption>{said}</figcaption>"


def setup(app):
    app.add_post_transform(InlineSvg)
    app.connect("html-page-context", add_captions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
