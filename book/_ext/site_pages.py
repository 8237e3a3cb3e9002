"""Small things that Jupyter Book and its theme leave out of the pages."""

import hashlib
from html import escape
from pathlib import Path

from docutils import nodes
from pygments.lexers import get_lexer_by_name
from pygments.token import Error, Text

ENTRANCE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta name="description" content="The entrance of the book.">
<meta http-equiv="refresh" content="0; url={first}">
</head>
<body><p><a href="{first}">{title}</a></p></body>
</html>
"""


class ErrorLexer(type(get_lexer_by_name("ipythontb"))):
    """Tracebacks of cells; a message may hold anything, and is not wrong Python for that."""

    name = "IPython error"
    aliases = ("ipython-error",)

    def get_tokens_unprocessed(self, text):
        for index, kind, value in super().get_tokens_unprocessed(text):
            yield index, Text if kind is Error else kind, value


def colour_code_cells(app, doctree):
    """A notebook without ``language_info`` (Kaggle saves such) still holds Python."""
    for block in doctree.findall(nodes.literal_block):
        if block.parent.get("nb_element") == "cell_code_source" and block.get("language") in (
            None,
            "none",
        ):
            block["language"] = "ipython3"


def describe(app, pagename, templatename, context, doctree):
    """Add the description that search engines and link previews show: the first paragraph."""
    if '"description"' in context.get("metatags", ""):
        # The page brings its own, by ``html_meta`` at its top.
        return
    description = f"A page of {app.config.html_title}: {pagename}"
    if doctree:
        paragraph = next(doctree.findall(nodes.paragraph), None)
        if paragraph:
            description = " ".join(paragraph.astext().split())
            # The card of a chapter opens with these words; its aim is what follows them.
            description = description.removeprefix("You will be able to: ")
            description = description[:1].upper() + description[1:]
    content = escape(description[:300], quote=True)
    context["metatags"] = context.get("metatags", "") + (
        f'\n<meta name="description" content="{content}">\n'
    )


def write_entrance(app, exception):
    """The site's top-level ``index.html`` leads to the landing page, which is in ``book/``."""
    if exception is None and app.builder.name == "html" and app.config.root_doc != "index":
        first = app.builder.get_target_uri(app.config.root_doc)
        page = ENTRANCE.format(first=first, title=escape(app.config.html_title))
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def digest_of_looks():
    """Changes whenever an extension or a file of the site's own looks changes."""
    book = Path(__file__).parent.parent
    files = sorted(f for part in ("_ext/*.py", "_static/*") for f in book.glob(part))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def setup(app):
    # Sphinx rebuilds pages only for changes in their own text, or in a setting such as this one.
    app.add_config_value("digest_of_looks", digest_of_looks(), "env", str)
    app.add_lexer("ipython-error", ErrorLexer)
    app.connect("doctree-read", colour_code_cells)
    app.connect("html-page-context", describe)
    app.connect("build-finished", write_entrance)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
