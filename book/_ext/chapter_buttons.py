"""The ladder, *Download*, the rung's program, *For Kaggle*, *For Colab* under a chapter's title.

Their markup is in chapter_buttons.html. The notebooks for Kaggle and Colab are written into the
site, so that it offers them wherever it is served from. Both can fetch them from GitHub, if the
site is published there, and from nowhere else. A book without the page that explains them, `MORE`,
does not offer them.
"""

import re
import shutil
from pathlib import Path

from book._ext.controls import TEMPLATES
from book._ext.landing import ladder
from tools import hosted_notebooks

MORE = "book/hosted"
# The chapters between two rungs that are about the lower one.
ON_RUNG = {"faster_on_one_gpu": "2", "inside_ddp": "4"}


def ladder_links(rungs, chapter, pathto):
    """The rungs as links, that of the chapter lit; nothing for a chapter that is on none."""
    here = re.search(r"_rung_(\d)_|$", chapter)[1] or ON_RUNG.get(chapter[3:])
    if not here:
        return ""
    links = ""
    for rung in rungs:
        lit = ' aria-current="true"' if str(rung["number"]) == here else ""
        link = f'<a href="{pathto("notebooks/" + rung["chapter"])}"{lit}>'
        link += f"<b>{rung['number']}</b> {rung.get('short', rung['title'])}</a>"
        links += f'<li style="--rung: {rung["color"]}">{link}</li>'
    return links and f'<nav class="rungs" aria-label="The ladder"><ol>{links}</ol></nav>'


def add_buttons(app, page, template, context, doctree):
    folder, _slash, chapter = page.rpartition("/")
    if not doctree or not folder.startswith(("notebooks", "book/runs/")):
        return
    pathto = context["pathto"]
    gaps = {"source": pathto(f"_sources/{context['sourcename']}", resource=True)}
    if hosted := folder == "notebooks" and MORE in app.env.found_docs:
        file = f"hosted/{chapter}.ipynb"
        gaps |= {"notebook": pathto(file, resource=True), "more": pathto(MORE)}
        gaps |= {"published": published_path(app.config, file)}
    rungs = ladder(app.srcdir) if re.match(r"\d\d_", chapter) else []
    for rung in rungs:
        if rung["chapter"] == chapter:
            gaps["program"] = pathto(f"rungs/{rung['program']}", resource=True)
    missing = {"notebook": None, "program": None}
    template = TEMPLATES.get_template("chapter_buttons.html", globals=missing)
    buttons = ladder_links(rungs, chapter, pathto) + template.render(gaps, exercise=False)
    body = context["body"].replace("</h1>", f"</h1>{buttons}", 1)
    # Whoever wants to write an answer needs the notebook, and it is far up.
    exercises = template.render(gaps, exercise=True) if hosted else ""
    context["body"] = re.sub("<h2>Exercises<.*?</h2>", lambda h2: h2[0] + exercises, body)


def published_path(config, file):
    """``OWNER/NAME/blob/BRANCH/`` and `file`, if the repository is one of GitHub, else None."""
    repository = config.html_theme_options.get("repository_url", "").rstrip("/")
    found = re.match(r"https://github\.com/([^/]+/[^/]+)$", repository)
    return found and f"{found[1].removesuffix('.git')}/blob/{config.published_branch}/{file}"


def write_files(app, exception):
    """The programs of the rungs, and the notebooks for Kaggle and Colab."""
    if exception or app.builder.name != "html":
        return
    for rung in ladder(app.srcdir):
        Path(app.outdir, "rungs").mkdir(exist_ok=True)
        shutil.copy(Path(app.srcdir, "rungs", rung["program"]), Path(app.outdir, "rungs"))
    if MORE in app.env.found_docs:
        hosted_notebooks.write_notebooks(Path(app.outdir, "hosted"))


def setup(app):
    app.add_config_value("published_branch", "gh-pages", "html", str)
    app.connect("html-page-context", add_buttons)
    app.connect("build-finished", write_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
