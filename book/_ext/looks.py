"""A page's own scripts and style sheets, its colours, and when pages are built again."""

import hashlib
import re
from pathlib import Path


def add_files(app, page, template, context, doctree):
    """The scripts and style sheets that a page's front matter lists as its ``files``."""
    for file in app.env.metadata[page].get("files", "").split() if doctree else ():
        if file.endswith(".css"):
            app.add_css_file(file)
        else:
            app.add_js_file(file, loading_method="defer")


# A number and its unit, in one line; code and what a script reads stay as they are
UNIT = r"(?<=[\d}]) (?=(?:%|[kMGT]?i?B|[mµ]?s|h|min|T?FLOP/s)(?!\w))"
NO_TEXT = r"<(head|pre|code|script|style|select|svg|textarea)\b.*?</\1>"


def finish_pages(app, exception):
    """A page says ``auto``, which has no colours until the theme's script comes, or none does."""
    dark = '(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")'
    if exception is None and app.builder.name == "html":
        for file in Path(app.outdir).rglob("*.html"):
            text = file.read_text("utf-8")
            if 'data-theme="auto"' in text:
                text = re.sub(r"<th([^>]*)>(<p></p>)?</th>", r"<td\1></td>", text)  # heads nothing
                text = re.sub(f"(?s){NO_TEXT}|{UNIT}", lambda m: m[0].strip(" ") or "&nbsp;", text)
                text = text.replace('data-theme="auto"', 'data-theme="light"', 1)
                chosen = 'localStorage.getItem("theme") || '
                file.write_text(text.replace(f'{chosen}"auto"', chosen + dark, 1), "utf-8")


def digest_of_looks():
    """Changes whenever an extension or a file of the site's own looks changes."""
    root = Path(__file__).parents[2]
    # Sphinx notices a change in only one of the two files of a diff: hence rungs/;
    # and no change of what the numbers of book/_ext/measured.py come from.
    numbers = ("src/torchclinic/will_it_fit.py", "book/will_it_fit.md", "benchmarks/measured_by*")
    looks = ("book/_ext/*.*", "book/_static/*", "book/_templates/*.html", "book/figures/*.html")
    parts = (*looks, "book/search/*", "rungs/*.py", *numbers)
    files = sorted(file for part in parts for file in root.glob(part))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def setup(app):
    # Sphinx rebuilds pages only for changes in their own text, or in a setting such as this one.
    app.add_config_value("digest_of_looks", digest_of_looks(), "env", str)
    app.connect("html-page-context", add_files)
    app.connect("build-finished", finish_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
