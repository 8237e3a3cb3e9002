"""The ladder, *Download*, *Run on Kaggle*, *Open in Colab* under a chapter's title: no script.

The notebooks for Kaggle and Colab are written into the site, so that it offers them wherever it is
served from. Both can fetch them from GitHub, if the site is published there, and from nowhere else.
A book without the page that explains them, `MORE`, does not offer them.
"""

import re
import sys
from html import escape
from pathlib import Path

from landing import ladder
from markdown_it import MarkdownIt

MORE = "book/hosted"
TOOLS = Path(__file__).parents[2] / "tools"
BUTTONS = """
<div class="chapter-buttons">
<a class="chapter-button" href="{source}" download>{download}</a>
{hosted}</div>
"""
LINK = '<a class="chapter-button" href="{address}">{label}</a>\n'
OPENS = '<button class="chapter-button" popovertarget="{id}">{label}</button>\n'
# The browser closes it at Escape and at a click elsewhere.
PANEL = '<div class="chapter-panel" id="{id}" popover>\n{steps}</div>\n'


# The chapters between two rungs that are about the lower one.
ON_RUNG = {"faster_on_one_gpu": "2", "inside_ddp": "4"}


def ladder_links(app, chapter, pathto):
    """The rungs as links, that of the chapter lit."""
    here = re.search(r"_rung_(\d)_|$", chapter)[1] or ON_RUNG.get(chapter[3:])
    links = ""
    for rung in ladder(app.srcdir):
        lit = ' aria-current="true"' if str(rung["number"]) == here else ""
        link = f'<a href="{pathto("notebooks/" + rung["chapter"])}"{lit}>'
        link += f"<b>{rung['number']}</b> {rung.get('short', rung['title'])}</a>"
        links += f'<li style="--rung: {rung["color"]}">{link}</li>'
    return links and f'<nav class="rungs" aria-label="The ladder"><ol>{links}</ol></nav>'


def add_buttons(app, page, template, context, doctree):
    folder, _slash, chapter = page.partition("/")
    if not doctree or folder not in ("notebooks", "runs"):
        return
    hosted = beside = ""
    if folder == "notebooks" and MORE in app.env.found_docs:
        file = f"hosted/{chapter}.ipynb"
        published = published_path(app.config, file)
        notebook, more = context["pathto"](file, resource=True), context["pathto"](MORE)
        beside = OPENS.format(id="on-kaggle", label="Run on Kaggle")
        hosted = panel("on-kaggle", steps_on_kaggle(notebook, more, published))
        if published:
            address = f"https://colab.research.google.com/github/{published}"
            beside += LINK.format(address=escape(address), label="Open in Colab")
        else:
            beside += OPENS.format(id="on-colab", label="Open in Colab")
            hosted += panel("on-colab", steps_on_colab(notebook, more))
    source = context["pathto"](f"_sources/{context['sourcename']}", resource=True)
    buttons = BUTTONS.format(source=escape(source), download="Download", hosted=beside + hosted)
    above = ladder_links(app, chapter, context["pathto"]) if re.match(r"\d\d_", chapter) else ""
    body = context["body"].replace("</h1>", f"</h1>{above}{buttons}", 1)
    # Whoever wants to write an answer needs the notebook, and it is far up.
    exercise = f'\\1<div class="chapter-buttons">{beside}</div>'
    context["body"] = re.sub("(<h3>Exercise .*?</h3>)", exercise, body) if beside else body


def panel(name, steps):
    html = MarkdownIt("commonmark", {"html": True}).render(steps)
    return PANEL.format(id=name, steps=html)


def steps_on_kaggle(notebook, more, published):
    """What to click, as Markdown; `published` is the notebook's path on GitHub, or None."""
    address = f"https://kaggle.com/kernels/welcome?src=https://github.com/{published}"
    fetch = f"Or [let Kaggle fetch this notebook]({address}), then go on with step 3."
    return f"""
1. <a href="{notebook}" download>Download this notebook for Kaggle</a>, one file that brings the
   book's package along.
2. On [kaggle.com/code](https://www.kaggle.com/code), choose *New Notebook*, then
   *File > Import Notebook*, and give it that file.
3. Choose *Settings > Accelerator > GPU T4 x2*, and run the first cell. It says what the session
   has, and what to click if something is missing.

[More about Kaggle]({more})
{fetch if published else ""}"""


def steps_on_colab(notebook, more):
    """What to click where the notebook cannot be fetched, as Markdown."""
    return f"""
<a href="{notebook}" download>Download this notebook for Colab</a>, give it to
[colab.research.google.com](https://colab.research.google.com) by *File > Upload notebook*, and run
the first cell: it says what the session has, and what to click if something is missing.

[More about Colab]({more}#on-colab)"""


def published_path(config, file):
    """``OWNER/NAME/blob/BRANCH/`` and `file`, if the repository is one of GitHub, else None."""
    repository = config.html_theme_options.get("repository_url", "").rstrip("/")
    found = re.match(r"https://github\.com/([^/]+/[^/]+)$", repository)
    return found and f"{found[1].removesuffix('.git')}/blob/{config.published_branch}/{file}"


def write_notebooks(app, exception):
    if exception is None and app.builder.name == "html" and MORE in app.env.found_docs:
        sys.path.insert(0, str(TOOLS))
        import hosted_notebooks

        hosted_notebooks.write_notebooks(Path(app.outdir, "hosted"))


def setup(app):
    app.add_config_value("published_branch", "gh-pages", "html", str)
    app.connect("html-page-context", add_buttons)
    app.connect("build-finished", write_notebooks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
