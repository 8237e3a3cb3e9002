"""The pages of recorded runs, and what the book says of where it was run.

``tools/record.py`` writes ``book/runs/<machine>/``. Each notebook there becomes a page outside the
contents and outside the search, linked from its chapter. The directive ``where-this-was-run``
tells where the chapters' own outputs come from (``chapters``; each notebook's metadata knows it)
and what ran elsewhere (``machines``). Of these machines, Sphinx's ``only`` knows ``gpu_recorded``,
``multigpu_recorded`` and ``kaggle_recorded``.
"""

import json
import re
from datetime import date
from html import escape
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

WHERE = "book/where_this_was_run"
RUNS = "book/runs"
# A recorded page's words lead nowhere: the chapter's own page has the links.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:)[^)\s]+\)")


def find_runs(app, config):
    """Read what `RUNS` holds, and let its notebooks be pages though the contents lack them."""
    root = Path(app.srcdir)
    files = sorted(root.glob(f"{RUNS}/[!.]*/machine.json"))
    app.recorded_runs = {file.parent.name: json.loads(file.read_text("utf-8")) for file in files}
    notebooks = sorted(root.glob("notebooks/*.ipynb"))
    app.chapters_run = {file.stem: facts_of(file) for file in notebooks}
    pages = {f"{page}.ipynb" for name in app.recorded_runs for page in recorded(app, name).values()}
    config.exclude_patterns = [name for name in config.exclude_patterns if name not in pages]
    config.told_of_runs = json.dumps([app.recorded_runs, app.chapters_run])
    runs = [*app.recorded_runs.values(), *app.chapters_run.values()]
    gpus = max((len(facts.get("gpus", [])) for facts in runs), default=0)
    here = {"gpu": gpus >= 1, "multigpu": gpus >= 2, "kaggle": "2xT4" in app.recorded_runs}
    for machine in filter(here.get, here):
        app.tags.add(f"{machine}_recorded")


def facts_of(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("run", {})


def recorded(app, machine):
    """The pages of a run by the names of their chapters."""
    files = sorted(Path(app.srcdir, RUNS, machine).glob("*.ipynb"))
    return {file.stem: f"{RUNS}/{machine}/{file.stem}" for file in files}


def run_and_chapter(app, page):
    """``("1xH200", "05_rung_1_cpu")`` for a page of a recorded run, else None."""
    folder, _slash, chapter = page.rpartition("/")
    machine = folder.removeprefix(f"{RUNS}/")
    return (machine, chapter) if machine in app.recorded_runs else None


def day(facts):
    return f"{date.fromisoformat(facts['date']):%-d %B %Y}" if "date" in facts else "no date noted"


def label(machine):
    return "CPU" if machine == "cpu" else re.sub(r"(\d)x", r"\1x ", machine).replace("+", " + ")


# --- the pages ----------------------------------------------------------------------------------


def adapt_recorded_page(app, page, text):
    """Say at the top of a recorded notebook what it is; its links are words."""
    if not (found := run_and_chapter(app, page)):
        return
    notebook = json.loads(text[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LINK.sub(r"\2", "".join(cell["source"]))
        for output in cell.get("outputs", []):
            if table := output.get("data", {}).get("text/markdown"):
                output["data"]["text/markdown"] = LINK.sub(r"\2", "".join(table))
    title, *rest = notebook["cells"][0]["source"].split("\n", 1)
    notebook["cells"][0]["source"] = "\n".join([title, "", note(app, *found), *rest])
    text[0] = json.dumps(notebook)


def note(app, machine, chapter):
    """What stands at the top of a recorded page, as Markdown."""
    facts = app.recorded_runs[machine]
    told = (
        f"This page as it ran on **{label(machine)}** on {facts['date']}, with PyTorch "
        f"{facts['torch']}. The text is the chapter's, and the numbers in it are those of the "
        f"chapter's own outputs. {facts.get('note', '')} [More about this run](/{WHERE}.md)."
    )
    ended = facts["parts"].get(chapter, {}).get("ended", "passed")
    if ended != "passed":
        error = ended.replace("`", "'")
        told += f" It did not reach its end: `{error}`. The cells after that have no outputs."
    return f":::{{admonition}} A recorded run\n:class: note\n{told}\n:::"


def keep_out_of_search(app, doctree):
    if run_and_chapter(app, app.env.docname):
        app.env.metadata[app.env.docname] |= {"orphan": True, "nosearch": True}


def link_runs(app, page, template, context, doctree):
    """Under a chapter's title, and under that of its recorded runs: where else it was run."""
    found = run_and_chapter(app, page)
    if not doctree or not (found or page.startswith("notebooks/")):
        return
    chapter = page.rpartition("/")[2]
    facts = app.recorded_runs[found[0]] if found else app.chapters_run.get(chapter, {})
    own = app.chapters_run.get(chapter, {}).get("machine")
    pages = {f"notebooks/{chapter}": label(own)} if own else {}
    for machine in app.recorded_runs:
        if there := recorded(app, machine).get(chapter):
            pages[there] = label(machine)
    links = [
        f"{escape(words)} (this page, {day(facts)}, PyTorch {facts['torch'].partition('+')[0]})"
        if target == page
        else f'<a href="{context["pathto"](target)}">{escape(words)}</a>'
        for target, words in pages.items()
        if target in app.env.all_docs
    ]
    for machine, run in app.recorded_runs.items():
        if chapter in run["parts"] and chapter not in recorded(app, machine):
            links.append(f"{escape(label(machine))} (outputs not kept)")
    if links and WHERE in app.env.found_docs:
        links.append(f'<a href="{context["pathto"](WHERE)}">where this was run</a>')
    if links:
        line = f'<p class="as-run-on">As run on: {" · ".join(links)}</p>'
        # Below the minutes that a chapter takes, folded with what it needs, if it says them
        said = r"(?s)</h1>(.*?to read\.</em>.*?</p>(\s*<details>.*?(?=</details>))?)?"
        body = context["body"]
        context["body"] = re.sub(said, lambda told: f"{told[0]}\n{line}", body, count=1)
    if found:
        context["metatags"] = context.get("metatags", "") + '<meta name="robots" content="noindex">'


# --- "Where this was run" -----------------------------------------------------------------------


class WhereThisWasRun(SphinxDirective):
    required_arguments = 1

    def run(self):
        lines = {"chapters": chapters_table, "machines": machines_list}[self.arguments[0]]
        return self.parse_text_to_nodes("\n".join(lines(self.env.app)))


def chapters_table(app):
    """The chapters, those with the same origin in one row."""
    rows = {}
    for chapter, facts in app.chapters_run.items():
        rows.setdefault(told_of(facts), []).append(chapter)
    for told, names in rows.items():
        links = [f"[{short(name)}](../notebooks/{name}.ipynb)" for name in names]
        numbers = [link for link, name in zip(links, names, strict=True) if short(name)]
        yield f"**{told}:**"
        yield ""
        yield from [f"- chapters {', '.join(numbers)}"] * bool(numbers)
        yield from (f"- {link}" for link in links if link not in numbers)
        yield ""


def short(name):
    """A chapter's number; nothing for another notebook, whose link then is its title."""
    return name[:2] if name[:2].isdigit() else ""


def told_of(facts):
    """A machine and its software in words."""
    if not facts:
        return "not noted"
    gpus = "; ".join(facts["gpus"]) or "no GPU"
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    cpu = f"{facts['cpu']}, {facts['cores']} cores"
    names = {"torch": "PyTorch", "cuda": "CUDA", "torchvision": "torchvision", "python": "Python"}
    software = ", ".join(f"{name} {facts[key]}" for key, name in names.items() if facts[key])
    return f"{gpus}{driver}; {cpu}; {software}; {facts['system']}"


def machines_list(app):
    """Every recorded run: the machine, the software, and what passed and what failed there."""
    for machine, facts in app.recorded_runs.items():
        pages = recorded(app, machine)
        when = f"on {facts['date']}, commit {(facts['commit'] or 'not known')[:12]}"
        yield f"**{label(machine)}**, {when}: {told_of(facts)}. {facts.get('note', '')} Run there:"
        yield ""
        for name, part in facts["parts"].items():
            link = f"[{short(name)}](/{pages[name]}.ipynb)" if name in pages else f"`{name}`"
            told = part.get("told", part["ended"]).replace("`", "'")
            told = told if part["ended"] == "passed" else f"**{told}**"
            failed = "".join(f"; `{test}`" for test in part.get("failed", ()))
            lacks = ", outputs not kept" * (name in app.chapters_run and name not in pages)
            yield f"- {link}: {told}{failed}{lacks}"
        yield ""


def setup(app):
    # The pages change with it; see looks.digest_of_looks.
    app.add_config_value("told_of_runs", "", "env", str)
    # After the contents were read, which excludes everything else.
    app.connect("config-inited", find_runs, priority=900)
    app.connect("source-read", adapt_recorded_page)
    app.connect("doctree-read", keep_out_of_search)
    app.connect("html-page-context", link_runs, priority=400)
    app.add_directive("where-this-was-run", WhereThisWasRun)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
