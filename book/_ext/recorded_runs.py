"""The pages of recorded runs, and what the book says of where it was run.

``book/record.py`` writes ``runs/<machine>/``. Each notebook there becomes a page outside the
contents and outside the search, linked from its chapter; the directives ``where-this-was-run`` and
``unless-recorded`` turn the ``machine.json`` files into ``book/where_this_was_run``.
"""

import hashlib
import json
import re
from html import escape
from pathlib import Path
from posixpath import dirname, normpath, relpath
from string import Template

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

PARTS = Path(__file__).parent.parent / "parts"
WHERE = "book/where_this_was_run"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+\.(?:ipynb|md))(#[^)\s]*)?\)")


# --- finding the runs ---------------------------------------------------------------------------


def find_runs(app, config):
    """Read what ``runs/`` holds, and let its notebooks be pages though the contents lack them."""
    folder = Path(app.srcdir, "runs")
    files = sorted(folder.glob("[!.]*/machine.json"))
    app.recorded_runs = {file.parent.name: read_json(file) for file in files}
    app.chapters_run = read_json(folder / "chapters.json") if folder.is_dir() else {}
    pages = {f"{path}.ipynb" for name in app.recorded_runs for path in recorded(app, name).values()}
    config.exclude_patterns = [name for name in config.exclude_patterns if name not in pages]
    told = [app.recorded_runs, app.chapters_run, *(p.read_text() for p in sorted(PARTS.glob("*")))]
    config.digest_of_runs = hashlib.sha256(json.dumps(told).encode()).hexdigest()


def read_json(file):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ExtensionError(f"{file} is damaged: {error}") from error


def recorded(app, machine):
    """The pages of a run by the names of their chapters."""
    names = app.recorded_runs[machine].get("notebooks", {})
    paths = {name: f"runs/{machine}/{name}" for name in names}
    return {name: path for name, path in paths.items() if source(app, path).exists()}


def source(app, page):
    return Path(app.srcdir, f"{page}.ipynb")


def run_and_chapter(app, page):
    """``("1xH200", "05_rung_1_cpu")`` for a page of a recorded run, else None."""
    folder, _, rest = page.partition("/")
    machine, _, chapter = rest.partition("/")
    return (machine, chapter) if folder == "runs" and machine in app.recorded_runs else None


def label(machine):
    return "CPU" if machine == "cpu" else re.sub(r"(\d)x", r"\1x ", machine).replace("+", " + ")


# --- the pages ----------------------------------------------------------------------------------


def adapt_recorded_page(app, page, text):
    """Say at the top of a recorded notebook what it is, and make its links lead somewhere."""
    if not (found := run_and_chapter(app, page)):
        return
    machine, chapter = found
    notebook = json.loads(text[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            markdown = LINK.sub(lambda match: moved(app, match, page), joined(cell["source"]))
            cell["source"] = re.sub(r"(?<=[\s(])\.\./(?=rungs/)", "../../", markdown)
    first = notebook["cells"][0]
    title, _, rest = first["source"].partition("\n")
    told = note(app, machine, chapter, title.lstrip("# "))
    first["source"] = f"{title}\n\n{told}\n{rest}"
    text[0] = json.dumps(notebook)


def joined(lines):
    return lines if isinstance(lines, str) else "".join(lines)


def moved(app, match, page):
    """A chapter's link as the recorded page needs it; without what is no longer there."""
    words, target, anchor = match.groups()
    path = normpath(f"notebooks/{target}")
    beside = f"{dirname(page)}/{path.removeprefix('notebooks/')}"
    if Path(app.srcdir, beside).exists():
        path = beside
    if not Path(app.srcdir, path).exists():
        return words
    if anchor and anchor[1:] not in anchors(Path(app.srcdir, path)):
        anchor = None
    return f"[{words}]({relpath(path, dirname(page))}{anchor or ''})"


def anchors(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(joined(c["source"]) for c in cells if c["cell_type"] == "markdown")
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-") for words in headings}


def note(app, machine, chapter, title):
    facts = app.recorded_runs[machine]
    outcome = facts["notebooks"][chapter]
    here = f"runs/{machine}"
    words = {"label": label(machine), "date": facts["date"], "torch": facts["torch"]}
    words["where"] = relpath(f"{WHERE}.md", here)
    words["title"] = title
    if source(app, f"notebooks/{chapter}").exists():
        words["title"] = f"[{title}]({relpath(f'notebooks/{chapter}.ipynb', here)})"
    parts = [part("recorded", words)]
    if not outcome["passed"]:
        failure = {key: inline(outcome[key]) for key in ("code", "error")}
        parts.append(part("recorded_failed", failure))
    if code(source(app, f"{here}/{chapter}")) != code(source(app, f"notebooks/{chapter}")):
        parts.append(part("recorded_changed", {}))
    return "\n".join(parts)


def part(name, words):
    return Template((PARTS / f"{name}.md").read_text(encoding="utf-8")).substitute(words)


def inline(text):
    """Text that can stand between backticks."""
    return text.replace("`", "'").strip() or "..."


def code(file):
    if not file.exists():
        return None
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [joined(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def keep_out_of_search(app, doctree):
    if run_and_chapter(app, app.env.docname):
        app.env.metadata[app.env.docname] |= {"orphan": True, "nosearch": True}


def link_runs(app, page, template, context, doctree):
    """Under a chapter's title, and under that of its recorded runs: where else it was run."""
    found = run_and_chapter(app, page)
    if not doctree or not (found or page.startswith("notebooks/")):
        return
    machine, chapter = found or (None, page.removeprefix("notebooks/"))
    own = app.chapters_run.get(chapter, {}).get("machine", "cpu")
    pages = {f"notebooks/{chapter}": label(own)} | {
        recorded(app, name)[chapter]: label(name) + (f", {facts['date']}" if name == own else "")
        for name, facts in app.recorded_runs.items()
        if chapter in recorded(app, name)
    }
    links = [
        f"{escape(words)} (this page)"
        if target == page
        else f'<a href="{context["pathto"](target)}">{escape(words)}</a>'
        for target, words in pages.items()
        if target in app.env.all_docs
    ]
    links.append(f'<a href="{context["pathto"](WHERE)}">where this was run</a>')
    line = f'<p class="as-run-on">As run on: {" · ".join(links)}</p>'
    context["body"] = context["body"].replace("</h1>", f"</h1>\n{line}", 1)
    if machine:
        context["title"] += f", as run on {label(machine)}"
        context["metatags"] = context.get("metatags", "") + (
            '\n<meta name="robots" content="noindex">\n'
        )


# --- "Where this was run" -----------------------------------------------------------------------


class UnlessRecorded(SphinxDirective):
    """Shows its content as long as no run on the machine that it names is recorded.

    ``gpu`` stands for any machine with one, ``multigpu`` for any with two or more.
    """

    required_arguments = 1
    has_content = True

    def run(self):
        (machine,) = self.arguments
        app = self.env.app
        runs = [*app.recorded_runs.values(), *app.chapters_run.values()]
        gpus = max((len(facts["gpus"]) for facts in runs), default=0)
        there = machine in app.recorded_runs or gpus >= {"gpu": 1, "multigpu": 2}.get(machine, 99)
        return [] if there else self.parsed(self.content)

    def parsed(self, lines):
        parent = nodes.Element()
        source, _ = self.get_source_info()
        self.state.nested_parse(StringList(lines, source), self.content_offset, parent)
        return parent.children


class WhereThisWasRun(UnlessRecorded):
    """``chapters``: what the chapters' own outputs come from; ``machines``: the recorded runs."""

    has_content = False

    def run(self):
        app = self.env.app
        generate = {"chapters": chapters_table, "machines": machines_list}[self.arguments[0]]
        return self.parsed(list(generate(app)))


def chapters_table(app):
    """The chapters, those with the same origin in one row."""
    rows = {}
    chapters = sorted(p.stem for p in Path(app.srcdir, "notebooks").glob("*.ipynb"))
    for chapter in chapters:
        facts = app.chapters_run.get(chapter)
        rows.setdefault(json.dumps(facts), []).append(chapter)
    yield "| Chapters | Machine | Software | Date |"
    yield "| --- | --- | --- | --- |"
    for key, names in rows.items():
        links = ", ".join(f"[{name[:2]}](../notebooks/{name}.ipynb)" for name in names)
        facts = json.loads(key)
        if facts:
            told = f"{hardware(facts)} | {software(facts)} | {facts['date']}"
        else:
            told = "not noted | | "
        yield f"| {links} | {told} |"


def machines_list(app):
    """Every recorded run: the machine, the software, what passed and what failed."""
    for machine, facts in app.recorded_runs.items():
        yield from ["", f"**{label(machine)}**, on {facts['date']}", ""]
        yield f"- Machine: {hardware(facts)}"
        yield f"- Software: {software(facts)}; {facts['system']}"
        data = (f"`{name}`: {where}" for name, where in facts["data"].items())
        yield f"- Data: {', '.join(data)}"
        yield f"- Chapters: {chapters_of(app, machine)}"
        yield f"- GPU tests: {tests_of(facts['gpu_tests'])}"
        state = {True: "", False: " with changes", None: ""}[facts["clean"]]
        yield f"- Commit: {(facts['commit'] or 'not known')[:12]}{state}"
        yield f"- Command: `{facts['command']}`"


def hardware(facts):
    gpus = "; ".join(facts["gpus"]) or "no GPU"
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    return f"{gpus}{driver}; {facts['cpu']}, {facts['cores']} cores"


def software(facts):
    names = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "torchvision": "torchvision"}
    names |= {"torchladder": "torchladder", "python": "Python"}
    return ", ".join(f"{name} {facts[key]}" for key, name in names.items() if facts[key])


def chapters_of(app, machine):
    outcomes, pages = app.recorded_runs[machine]["notebooks"], recorded(app, machine)
    passed = [name for name in outcomes if outcomes[name]["passed"]]
    links = {n: f"[{n[:2]}](../{pages[n]}.ipynb)" if n in pages else n[:2] for n in outcomes}
    text = f"{len(passed)} of {len(outcomes)} ran to their end ({', '.join(links.values())})"
    for name, outcome in outcomes.items():
        if not outcome["passed"]:
            at = f"`{inline(outcome['code'])}`: `{inline(outcome['error'])}`"
            text += f"; {links[name]} stopped at {at}"
        elif quiet := outcome.get("did_not_fail"):
            text += f"; in {links[name]}, cells that show an error and did not fail: {len(quiet)}"
    return text


def tests_of(tests):
    if "error" in tests:
        return f"not run: {tests['error']}"
    failed = ", ".join(f"`{name}`" for name in tests["names_of_failed"])
    return (
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
        f"{': ' + failed if failed else ''}"
    )


def setup(app):
    # The pages change with it; see site_pages.digest_of_looks.
    app.add_config_value("digest_of_runs", "", "env", str)
    # After the contents were read, which excludes everything else.
    app.connect("config-inited", find_runs, priority=900)
    app.connect("source-read", adapt_recorded_page)
    app.connect("doctree-read", keep_out_of_search)
    app.connect("html-page-context", link_runs, priority=400)
    app.add_directive("unless-recorded", UnlessRecorded)
    app.add_directive("where-this-was-run", WhereThisWasRun)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
