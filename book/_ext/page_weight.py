"""A page loads what it shows: no icon font for nine icons, no style sheet for parts it lacks.

The theme's own files are trimmed after they were copied: Font Awesome goes, torchladder.css draws
the icons. And its script no longer measures every block of code, which it does twice while a page
opens, before and after the copy buttons come; torchladder.js has the browser tell the sizes.
What no style distinguishes is no element of its own: of a long page's elements, that is half.
"""

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from pygments.formatters import HtmlFormatter
from pygments.token import Name, Punctuation, Token, Whitespace
from sphinx.highlighting import PygmentsBridge
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
# What a page must hold for a style sheet or script to be of use; None: nothing has a use for it.
ONLY_WITH = {
    "_static/design-tabs.js": "sd-tab-set",
    "_static/sphinx-design*.css": 'class="sd-',
    "_static/mystnb*.css": 'class="cell ',
    "_static/copybutton.*": "<pre",
    "_static/clipboard.min.js": "<pre",
    "_static/doctools.js": None,  # keys for a search that is not there
    "_static/sphinx_highlight.js": None,  # marks words that Sphinx's own search has found
}
UNUSED = ("vendor", "scripts/fontawesome.js", "scripts/fontawesome.js.LICENSE.txt", "**/*.map")
FONT_AWESOME = re.compile(
    r"/\*!\s+\* Font Awesome.*?\*/"
    r"|@font-face\{[^{}]*Font Awesome[^{}]*\}"
    r"|@(?:-webkit-)?keyframes fa-[\w-]+\{(?:[^{}]*\{[^{}]*\})*\}"
    r"|(?<=[{}/])\.fa(?:[brs]|-[\w-]+)?(?![\w-])[^{}]*\{[^{}]*\}"
    r"|(?<=[{}/])[^{}]*\{[^{}]*(?:Font Awesome|font:var\(--fa-|content:var\(--pst-icon)[^{}]*\}",
    re.DOTALL,
)
# Both themes write these as they write any code, and the words of inline code alike.
PLAIN = (Name, Name.Other, Punctuation, Whitespace)
WORD = re.compile(r'<span class="pre">(.*?)</span>')
MEASURE_ALL = re.compile(r"(?<==>\{)document\.querySelectorAll\(\[\"pre\",.*?:-1\}\)(?=\})")


class FewerElements(HtmlFormatter):
    """Makes no element of names, brackets and spaces."""

    def format_unencoded(self, tokensource, outfile):
        coloured = ((Token if kind in PLAIN else kind, text) for kind, text in tokensource)
        super().format_unencoded(coloured, outfile)


def make_words_text(app, page, template, context, doctree):
    for part in {"body", "toc"} & context.keys():
        context[part] = WORD.sub(r"\1", context[part])


def load_what_is_used(app, page, template, context, doctree):
    body = context.get("body", "")
    for kind in ("script_files", "css_files"):
        context[kind] = [file for file in context.get(kind, ()) if is_used(file, body)]


def is_used(file, body):
    name = getattr(file, "filename", None) or ""
    marks = [mark for pattern, mark in ONLY_WITH.items() if fnmatch(str(name), pattern)]
    return not marks or (marks[0] is not None and marks[0] in body)


def trim_the_theme(app, exception):
    if exception is None and app.builder.name == "html":
        static = Path(app.outdir, "_static")
        for file in [file for pattern in UNUSED for file in static.glob(pattern)]:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for sheet in ("pydata-sphinx-theme", "sphinx-book-theme"):
            cut(static / f"styles/{sheet}.css", FONT_AWESOME, "Font Awesome")
        cut(static / "scripts/pydata-sphinx-theme.js", MEASURE_ALL, "scrollWidth")


def cut(file, pattern, mark):
    """Take what matches out of a file; a theme that is written otherwise is not overlooked."""
    text = pattern.sub("", file.read_text(encoding="utf-8"))
    if mark in text:
        LOGGER.warning("%s still has %r: the theme writes it otherwise", file.name, mark)
    file.write_text(text, encoding="utf-8")


def setup(app):
    PygmentsBridge.html_formatter = FewerElements
    # Before the theme makes its list of what is on the page.
    app.connect("html-page-context", make_words_text, priority=100)
    app.connect("html-page-context", load_what_is_used, priority=900)  # after those that add files
    app.connect("build-finished", trim_the_theme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
