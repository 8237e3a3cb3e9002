"""The landing page, read from the repository when the site is built.

The directive ``rungs`` is the ladder: what each rung needs for one model, and its program with the
lines marked that it adds; radio buttons choose, without a script. ``chapters`` is the README's
table of chapters and questions, ``explained`` a log and what the error clinic says to it; the role
``count`` counts the chapters or the errors.
"""

import difflib
import re
from html import escape
from pathlib import Path

from controls import Yaml, raw
from docutils import nodes
from error_clinic import LINK, moved, note_catalogue
from sphinx.util.docutils import SphinxDirective, SphinxRole

from torchclinic import errors

BATCH = 8
SINCE = """<label class="since"><input type="checkbox">
Compare with rung 1, not with the rung before</label>"""


def new_lines(below: list[str], lines: list[str]) -> list[str]:
    """`lines`, with ``+ `` before those that `below` does not have and two spaces before others."""
    return [line for line in difflib.ndiff(below, lines) if line[:2] in ("+ ", "  ")]


def from_the_data_to_the_step(program: str) -> list[str]:
    *_functions, set_up, loop, _save = program.split("\n\n")
    return f"{set_up}\n\n{loop}".partition("\n        total +=")[0].splitlines()


class Rungs(Yaml):
    """``rungs``: YAML, for each rung its ``rung``, ``name``, ``program`` and ``says``.

    ``gigabytes`` and ``seconds`` are what it needs for `BATCH` sequences.
    """

    def run(self):
        rungs = self.read()
        for rung in rungs:
            file = Path(self.env.app.srcdir, "rungs", rung["program"])
            self.env.note_dependency(str(file))
            rung["text"] = file.read_text(encoding="utf-8")
        words = ["Rung", "New lines", "Memory, at least", f"Time for {BATCH} sequences"]
        head = "".join(f"<span>{escape(word)}</span>" for word in words)
        head = f'<fieldset class="ladder"><p class="ladder-row" aria-hidden="true">{head}</p>'
        parts = [raw(head), *self.rows(rungs)]
        parts.append(raw(SINCE))
        for number, rung in enumerate(rungs):
            parts += self.panel(rung, {"before": rungs[max(0, number - 1)], "first": rungs[0]})
        return [*parts, raw("</fieldset>")]

    def rows(self, rungs):
        parts, below = [], rungs[0]
        for number, rung in enumerate(rungs, 1):
            name, gigabytes, seconds = rung["rung"], rung["gigabytes"], rung["seconds"]
            memory, time = gigabytes / 40, min(1, seconds / 2)  # of an A100; of two seconds
            _title, *lines = rung["text"].splitlines()
            added = sum(line[0] == "+" for line in new_lines(below["text"].splitlines()[1:], lines))
            below = rung
            chosen = " checked" if name == "ddp" else ""
            parts += [
                raw(
                    f'<input type="radio" name="rung" id="rung-{name}"{chosen}>'
                    f'<label class="ladder-row" for="rung-{name}" data-rung="{name}">'
                    f"<span><b>{number}</b> "
                    f"{escape(rung['name'])}"
                    f"</span><span>{f'+{added}' if added else len(lines) + 1}</span>"
                    f'<span style="--share: {memory:.3f}">{gigabytes} GB</span>'
                    f'<span style="--share: {time:.3f}">{seconds} s</span></label>'
                ),
            ]
        return parts

    def panel(self, rung, compared):
        says, _messages = self.parse_inline(rung["says"])
        paragraph = nodes.paragraph(rung["says"], "", *says)
        self.set_source_info(paragraph)
        parts = [raw(f'<div class="rung-panel" data-rung="{rung["rung"]}">'), paragraph]
        for since, other in compared.items():
            lines = [from_the_data_to_the_step(program["text"]) for program in (other, rung)]
            code = "\n".join(
                f"<mark>{escape(line[2:])}</mark>" if line[0] == "+" else escape(line[2:])
                for line in new_lines(*lines)
            )
            parts.append(raw(f'<pre class="since-{since}" tabindex="0">{code}</pre>'))
        return [*parts, raw("</div>")]


class Chapters(SphinxDirective):
    def run(self):
        readme = Path(self.env.app.srcdir, "README.md")
        self.env.note_dependency(str(readme))
        rows = re.findall(r"^\| \[\d\d\]\((.*)\) \| (.*) \|$", readme.read_text("utf-8"), re.M)
        lines = [f"| [](../{page}) | {question} |" for page, question in rows]
        head = "| chapter | question |\n| --- | --- |\n"
        return self.parse_text_to_nodes(head + "\n".join(lines))


class Count(SphinxRole):
    def run(self):
        note_catalogue(self.env)
        chapters = Path(self.env.app.srcdir, "notebooks").glob("[0-9]*.ipynb")
        counts = {"chapters": len(list(chapters)), "errors": len(errors.catalogue())}
        return [nodes.Text(str(counts[self.text]))], []


class Explained(SphinxDirective):
    has_content = True

    def run(self):
        note_catalogue(self.env)
        log = "\n".join(self.content)
        error = errors.find(log)[0].error
        why, fix = error.in_brief
        told = f"**Why.** {why}\n\n**What to do.** {fix}"
        answer = f"[{error.message}]({error.page}.ipynb#{error.id})\n\n{told}"
        answer = LINK.sub(lambda found: moved(found[1]), answer)
        box = nodes.container("", *self.parse_text_to_nodes(answer), classes=["explained"])
        return [nodes.literal_block(log, log, language="ipython-error"), box]


def setup(app):
    app.add_role("count", Count())
    app.add_directive("rungs", Rungs)
    app.add_directive("chapters", Chapters)
    app.add_directive("explained", Explained)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
