"""*Download* and *Run on Kaggle* under the title of each chapter, without any script.

The notebooks for Kaggle are written into the site, so that it offers them wherever it is served
from. Words are in ``book/parts/``.
"""

import re
import sys
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt

BOOK = Path(__file__).parent.parent
BUTTONS = """
<div class="chapter-buttons">
<a class="chapter-button" href="{source}" download>Download</a>
{kaggle}</div>
"""
KAGGLE = """<details>
<summary class="chapter-button">Run on Kaggle</summary>
<div class="chapter-panel">
{steps}</div>
</details>
"""


def add_buttons(app, page, template, context, doctree):
    folder, _, chapter = page.partition("/")
    if not doctree or folder not in ("notebooks", "runs"):
        return
    kaggle = ""
    if folder == "notebooks":
        file = f"kaggle/{chapter}/{chapter}.ipynb"
        notebook, more = context["pathto"](file, resource=True), context["pathto"]("book/kaggle")
        steps = part("run_on_kaggle", notebook=notebook, help=more)
        if address := import_address(app.config, file):
            steps += part("open_on_kaggle", address=address)
        kaggle = KAGGLE.format(steps=steps)
    source = context["pathto"](f"_sources/{context['sourcename']}", resource=True)
    buttons = BUTTONS.format(source=escape(source), kaggle=kaggle)
    context["body"] = context["body"].replace("</h1>", f"</h1>{buttons}", 1)


def import_address(config, file):
    """Kaggle's link that imports a notebook, which it can do from GitHub and nowhere else."""
    repository = config.html_theme_options.get("repository_url", "").rstrip("/")
    if not re.match(r"https://github\.com/[^/]+/[^/]+$", repository):
        return None
    published = f"{repository.removesuffix('.git')}/blob/{config.published_branch}/{file}"
    return f"https://kaggle.com/kernels/welcome?src={published}"


def part(name, **words):
    text = (BOOK / "parts" / f"{name}.md").read_text(encoding="utf-8")
    return MarkdownIt("commonmark", {"html": True}).render(Template(text).substitute(words))


def write_notebooks_for_kaggle(app, exception):
    if exception is None and app.builder.name == "html":
        sys.path.insert(0, str(BOOK))
        import kaggle_notebooks

        kaggle_notebooks.write_all(Path(app.outdir, "kaggle"))


def setup(app):
    app.add_config_value("published_branch", "gh-pages", "html", str)
    app.connect("html-page-context", add_buttons)
    app.connect("build-finished", write_notebooks_for_kaggle)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
