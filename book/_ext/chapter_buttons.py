"""*Download* and *Run on Kaggle* under the title of each chapter, without any script.

The notebooks for Kaggle are written into the site, so that it offers them wherever it is served
from.
"""

import re
import sys
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from translation import _

TOOLS = Path(__file__).parents[2] / "tools"
BUTTONS = """
<div class="chapter-buttons">
<a class="chapter-button" href="{source}" download>{download}</a>
{kaggle}</div>
"""
KAGGLE = """<details>
<summary class="chapter-button">{run}</summary>
<div class="chapter-panel">
{steps}</div>
</details>
"""


def add_buttons(app, page, template, context, doctree):
    folder, _slash, chapter = page.partition("/")
    if not doctree or folder not in ("notebooks", "runs"):
        return
    kaggle = ""
    if folder == "notebooks":
        file = f"kaggle/{chapter}/{chapter}.ipynb"
        notebook, more = context["pathto"](file, resource=True), context["pathto"]("book/kaggle")
        steps = steps_on_kaggle(notebook, more, import_address(app.config, file))
        html = MarkdownIt("commonmark", {"html": True}).render(steps)
        kaggle = KAGGLE.format(run=_("Run on Kaggle"), steps=html)
    source = context["pathto"](f"_sources/{context['sourcename']}", resource=True)
    buttons = BUTTONS.format(source=escape(source), download=_("Download"), kaggle=kaggle)
    context["body"] = context["body"].replace("</h1>", f"</h1>{buttons}", 1)


def steps_on_kaggle(notebook, more, address):
    """What to click, as Markdown; `address` is Kaggle's link that imports the notebook, or None."""
    file = f'href="{notebook}" download'
    steps = [
        _(
            "<a {file}>Download this chapter for Kaggle</a>, one file that brings the book's "
            "package along."
        ).format(file=file),
        _(
            "On [kaggle.com/code](https://www.kaggle.com/code), choose *New Notebook*, then "
            "*File > Import Notebook*, and give it that file."
        ),
        _(
            "Choose *Settings > Accelerator > GPU T4 x2*, and run the first cell. It says what the "
            "session has, and what to click if something is missing."
        ),
    ]
    lines = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    lines += ["", _("[More about Kaggle]({page})").format(page=more)]
    if address:
        or_import = _("Or [let Kaggle fetch this chapter]({address}), then go on with step 3.")
        lines += ["", or_import.format(address=address)]
    return "\n".join(lines)


def import_address(config, file):
    """Kaggle's link that imports a notebook, which it can do from GitHub and nowhere else."""
    repository = config.html_theme_options.get("repository_url", "").rstrip("/")
    if not re.match(r"https://github\.com/[^/]+/[^/]+$", repository):
        return None
    published = f"{repository.removesuffix('.git')}/blob/{config.published_branch}/{file}"
    return f"https://kaggle.com/kernels/welcome?src={published}"


def write_notebooks_for_kaggle(app, exception):
    if exception is None and app.builder.name == "html":
        sys.path.insert(0, str(TOOLS))
        import kaggle_notebooks

        kaggle_notebooks.write_all(Path(app.outdir, "kaggle"))


def setup(app):
    app.add_config_value("published_branch", "gh-pages", "html", str)
    app.connect("html-page-context", add_buttons)
    app.connect("build-finished", write_notebooks_for_kaggle)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
