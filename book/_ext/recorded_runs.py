"""The pages of recorded runs, and what the book says of where it was run.

``tools/record.py`` writes ``runs/<machine>/``. Each notebook there becomes a page outside the
contents and outside the search, linked from its chapter. The directive ``where-this-was-run`` turns
the ``machine.json`` files into ``book/where_this_was_run``; the tags ``gpu_recorded``,
``multigpu_recorded`` and ``kaggle_recorded`` are for Sphinx's ``only``.
"""

import hashlib
import json
import re
from html import escape
from pathlib import Path
from posixpath import dirname, normpath, relpath

from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from translation import _

from torchladder import errors

WHERE = "book/where_this_was_run"
ERRORS = "errors_"  # so begin the names of the notebooks that are no chapters
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+\.(?:ipynb|md|svg))(#[^)\s]*)?\)")


# --- finding the runs ---------------------------------------------------------------------------


def find_runs(app, config):
    """Read what ``runs/`` holds, and let its notebooks be pages though the contents lack them."""
    folder = Path(app.srcdir, "runs")
    files = sorted(folder.glob("[!.]*/machine.json"))
    app.recorded_runs = {file.parent.name: read_json(file) for file in files}
    app.chapters_run = read_json(folder / "chapters.json") if folder.is_dir() else {}
    pages = {f"{path}.ipynb" for name in app.recorded_runs for path in recorded(app, name).values()}
    config.exclude_patterns = [name for name in config.exclude_patterns if name not in pages]
    told = json.dumps([app.recorded_runs, app.chapters_run])
    config.digest_of_runs = hashlib.sha256(told.encode()).hexdigest()
    runs = [*app.recorded_runs.values(), *app.chapters_run.values()]
    gpus = max((len(facts["gpus"]) for facts in runs), default=0)
    here = {"gpu": gpus >= 1, "multigpu": gpus >= 2, "kaggle": "2xT4" in app.recorded_runs}
    for machine in filter(here.get, here):
        app.tags.add(f"{machine}_recorded")


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
    folder, machine, chapter = (*page.split("/", 2), "", "")[:3]
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
            markdown = with_links_moved(app, cell["source"], page)
            cell["source"] = re.sub(r"(?<=[\s(])\.\./(?=rungs/)", "../../", markdown)
        for output in cell.get("outputs", []):
            if table := output.get("data", {}).get("text/markdown"):
                output["data"]["text/markdown"] = with_links_moved(app, table, page)
    first = notebook["cells"][0]
    title, *rest = first["source"].split("\n", 1)
    told = note(app, machine, chapter, title.lstrip("# "))
    first["source"] = "\n".join([title, "", told, *rest])
    text[0] = json.dumps(notebook)


def with_links_moved(app, markdown, page):
    return LINK.sub(lambda match: moved(app, match, page), joined(markdown))


def joined(lines):
    return lines if isinstance(lines, str) else "".join(lines)


def moved(app, match, page):
    """A chapter's link or picture as the recorded page needs it; only its words if it is gone."""
    picture, words, target, anchor = match.groups()
    path = normpath(f"notebooks/{target}")
    beside = f"{dirname(page)}/{path.removeprefix('notebooks/')}"
    is_catalogue = ERRORS in path  # of which the page of today is the best
    if Path(app.srcdir, beside).exists() and not is_catalogue:
        path = beside
    if not Path(app.srcdir, path).exists():
        return words
    if anchor and anchor[1:] not in anchors(Path(app.srcdir, path)):
        anchor = None
    return f"{picture}[{words}]({relpath(path, dirname(page))}{anchor or ''})"


def anchors(file):
    if file.stem.startswith(ERRORS):
        return set(errors.catalogue())
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(joined(c["source"]) for c in cells if c["cell_type"] == "markdown")
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-") for words in headings}


def note(app, machine, chapter, title):
    """What stands at the top of a recorded page, as Markdown."""
    facts = app.recorded_runs[machine]
    outcome = facts["notebooks"][chapter]
    here = f"runs/{machine}"
    if source(app, f"notebooks/{chapter}").exists():
        title = f"[{title}]({relpath(f'notebooks/{chapter}.ipynb', here)})"
    told = _(
        "This is *{title}* as it ran on **{machine}** on {date}, with PyTorch {torch}. The text is "
        "the chapter's, and the numbers in it are those of the chapter's own outputs."
    ).format(title=title, machine=label(machine), date=facts["date"], torch=facts["torch"])
    more = _("[More about this run]({page}).").format(page=relpath(f"{WHERE}.md", here))
    boxes = [box("note", _("A recorded run"), f"{told} {more}")]
    if not outcome["passed"]:
        failed = _(
            "This run did not reach the end of the chapter: the cell that begins with `{code}` "
            "failed, with `{error}`. The cells after it have no outputs."
        ).format(**{key: inline(outcome[key]) for key in ("code", "error")})
        boxes.append(box("warning", _("It stopped"), failed))
    if code(source(app, f"{here}/{chapter}")) != code(source(app, f"notebooks/{chapter}")):
        changed = _("The chapter has other code today than when it was run here.")
        boxes.append(box("warning", _("The chapter has changed"), changed))
    return "\n".join(boxes)


def box(kind, title, text):
    return f":::{{admonition}} {title}\n:class: {kind}\n{text}\n:::"


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
        _("{machine} (this page)").format(machine=escape(words))
        if target == page
        else f'<a href="{context["pathto"](target)}">{escape(words)}</a>'
        for target, words in pages.items()
        if target in app.env.all_docs
    ]
    where = _("where this was run")
    links.append(f'<a href="{context["pathto"](WHERE)}">{where}</a>')
    line = _("As run on: {machines}").format(machines=" · ".join(links))
    line = f'<p class="as-run-on">{line}</p>'
    context["body"] = context["body"].replace("</h1>", f"</h1>\n{line}", 1)
    if machine:
        where = _("as run on {machine}").format(machine=label(machine))
        context["title"] = f"{context['title']}, {where}"
        context["metatags"] = context.get("metatags", "") + (
            '\n<meta name="robots" content="noindex">\n'
        )


# --- "Where this was run" -----------------------------------------------------------------------


class WhereThisWasRun(SphinxDirective):
    """``chapters``: what the chapters' own outputs come from; ``machines``: the recorded runs."""

    required_arguments = 1

    def run(self):
        lines = {"chapters": chapters_table, "machines": machines_list}[self.arguments[0]]
        return self.parse_text_to_nodes("\n".join(lines(self.env.app)))


def chapters_table(app):
    """The chapters, those with the same origin in one row."""
    rows = {}
    chapters = sorted(p.stem for p in Path(app.srcdir, "notebooks").glob("*.ipynb"))
    for chapter in chapters:
        facts = app.chapters_run.get(chapter)
        rows.setdefault(json.dumps(facts), []).append(chapter)
    heads = [_("Chapters"), _("Machine"), _("Software"), _("Date")]
    yield f"| {' | '.join(heads)} |"
    yield "| --- | --- | --- | --- |"
    for key, names in rows.items():
        links = ", ".join(f"[{short(name)}](../notebooks/{name}.ipynb)" for name in names)
        facts = json.loads(key)
        told = [hardware(facts), software(facts), facts["date"]] if facts else [_("not noted")]
        yield f"| {' | '.join([links, *told])} |"


def short(name):
    """A chapter's number; of the error clinic's notebooks the part."""
    if name.startswith(ERRORS):
        return _("errors: {part}").format(part=name.removeprefix(ERRORS))
    return name[:2]


def machines_list(app):
    """Every recorded run: the machine, the software, what passed and what failed."""
    folders = Path(app.srcdir, "runs").glob("[!.]*/*.json")
    machines = dict.fromkeys(app.recorded_runs) | dict.fromkeys(
        f.parent.name for f in sorted(folders)
    )
    for machine in machines:
        told = measurements_of(app, machine)
        if facts := app.recorded_runs.get(machine):
            head = _("**{machine}**, on {date}").format(machine=label(machine), date=facts["date"])
            told = told_of_run(app, machine, facts) | told
        else:
            head = f"**{label(machine)}**"
        yield from ["", head, "", *(f"- {name}: {value}" for name, value in told.items())]


def told_of_run(app, machine, facts):
    words = words_of_data()
    data = ", ".join(f"`{k}`: {words.get(v, v)}" for k, v in facts["data"].items())
    return {
        _("Machine"): hardware(facts),
        _("Software"): f"{software(facts)}; {facts['system']}",
        _("Data"): data,
        _("Chapters"): chapters_of(app, machine),
        _("GPU tests"): tests_of(facts["gpu_tests"]),
        _("Commit"): "; ".join([commit_of(facts), *later_parts(facts)]),
        _("Command"): f"`{facts['command']}`",
    }


def measurements_of(app, machine):
    """The files of ``benchmarks/gpu`` beside a run, each with its own date and commit."""
    parts = []
    for file in sorted(Path(app.srcdir, "runs", machine).glob("*.json")):
        content = read_json(file)
        if "measurement" in content:
            facts = content["machine"]
            told = _("`{program}` on {date}, commit {commit}").format(
                program=f"benchmarks/gpu/{content['measurement']}.py",
                date=facts["date"],
                commit=commit_of(facts),
            )
            parts.append(told + (_(" (a rehearsal)") if content["rehearsal"] else ""))
    return {_("Measurements"): "; ".join(parts)} if parts else {}


def words_of_data():
    """What ``tools/record.py`` says of a data set."""
    return {
        "bundled": _("bundled"),
        "cut from the full set": _("cut from the full set"),
        "full": _("full"),
        "not here": _("not here"),
    }


def hardware(facts):
    gpus = "; ".join(facts["gpus"]) or _("no GPU")
    if facts["driver"]:
        gpus = _("{gpus}, driver {version}").format(gpus=gpus, version=facts["driver"])
    cpu = _("{cpu}, {count} cores").format(cpu=facts["cpu"], count=facts["cores"])
    return f"{gpus}; {cpu}"


def software(facts):
    names = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL", "torchvision": "torchvision"}
    names |= {"torchladder": "torchladder", "python": "Python"}
    return ", ".join(f"{name} {facts[key]}" for key, name in names.items() if facts[key])


def commit_of(facts):
    if not facts["commit"]:
        return _("not known")
    commit = facts["commit"][:12]
    return commit if facts["clean"] else _("{commit} with changes").format(commit=commit)


def later_parts(facts):
    """The chapters and tests that were run again, with other code than the rest or another day."""
    for name, outcome in (facts["notebooks"] | facts["gpu_tests"]).items():
        if outcome.keys() & {"commit", "clean", "date"}:
            own = facts | outcome
            told = _("`{part}` on {date} with {commit}")
            yield told.format(part=name, date=own["date"], commit=commit_of(own))


def chapters_of(app, machine):
    outcomes, pages = app.recorded_runs[machine]["notebooks"], recorded(app, machine)
    links = {n: f"[{short(n)}](../{pages[n]}.ipynb)" if n in pages else short(n) for n in outcomes}
    passed = sum(outcome["passed"] for outcome in outcomes.values())
    told = _("{passed} of {all} ran to their end ({links})")
    parts = [told.format(passed=passed, all=len(outcomes), links=", ".join(links.values()))]
    for name, outcome in outcomes.items():
        if not outcome["passed"]:
            stopped = _("{chapter} stopped at {cell}: {error}")
            cell, error = (f"`{inline(outcome[key])}`" for key in ("code", "error"))
            parts.append(stopped.format(chapter=links[name], cell=cell, error=error))
        elif quiet := outcome.get("did_not_fail"):
            silent = _("in {chapter}, cells that show an error and did not fail: {count}")
            parts.append(silent.format(chapter=links[name], count=len(quiet)))
    return "; ".join(parts)


def tests_of(files):
    """The tests of all files together, those that failed, and files that could not be run."""
    counts = [outcome for outcome in files.values() if "error" not in outcome]
    total = {key: sum(c[key] for c in counts) for key in ("passed", "failed", "skipped")}
    parts = [_("{passed} passed, {failed} failed, {skipped} skipped").format(**total)]
    parts += [f"`{name}`" for outcome in counts for name in outcome["names_of_failed"]]
    for file, outcome in files.items():
        if "error" in outcome:
            told = _("`{file}` not run: {error}")
            parts.append(told.format(file=file, error=inline(outcome["error"])))
    return "; ".join(parts) if files else _("not run")


def setup(app):
    # The pages change with it; see site_pages.digest_of_looks.
    app.add_config_value("digest_of_runs", "", "env", str)
    # After the contents were read, which excludes everything else.
    app.connect("config-inited", find_runs, priority=900)
    app.connect("source-read", adapt_recorded_page)
    app.connect("doctree-read", keep_out_of_search)
    app.connect("html-page-context", link_runs, priority=400)
    app.add_directive("where-this-was-run", WhereThisWasRun)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
