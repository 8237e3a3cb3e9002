"""The landing page, read from the repository when the site is built.

The directive ``rungs`` is the ladder: what each rung needs for one model, calculated, and its
program with the lines marked that it adds; radio buttons choose, without a script. ``chapters`` is
the README's table of chapters and questions, ``explained`` a log and what the error clinic says to
it; the role ``count`` counts what the book holds.
"""

import difflib
import json
import re
from html import escape
from pathlib import Path
from typing import NamedTuple

from controls import WithWords, raw
from docutils import nodes
from error_clinic import CATALOGUE, LINK, moved, note_catalogue
from sphinx.util.docutils import SphinxDirective, SphinxRole
from translation import _

from torchclinic import errors, will_it_fit

# GPT-2 XL as the calculator has it, mixed precision, Adam.
MODEL = {"layers": 48, "hidden": 1600, "heads": 25, "sequence": 1024, "vocabulary": 50257}
BATCH = 8
GPU, CPU = 0.3 * 312e12, 1e12  # FLOP/s that training reaches: of an A100's peak; an assumption
# Bytes per second of a GPU: PCIe 3.0 x16, at most; 100 Gbit/s that two GPUs of a machine share.
LINK_BETWEEN = {"latency": 10e-6, "bandwidth": 15.8e9}
NETWORK = {"latency": 20e-6, "bandwidth": 6.25e9}


class Needs(NamedTuple):
    gigabytes: float
    seconds: float


def needs(rung: str) -> Needs:
    """Memory on each GPU (the first, under DP) and time for `BATCH` sequences.

    Two GPUs share them. HSDP has two such machines, each with sequences of its own.
    """
    gpus = 1 if rung in ("cpu", "gpu") else 2
    sharded = rung in ("fsdp", "hsdp")
    cast = "bf16" if sharded else "bf16-mixed"  # FSDP casts also what autocast does not
    model = will_it_fit.transformer(**MODEL, precision=cast, checkpointing=True)
    memory = will_it_fit.memory_per_gpu(
        model.parameters,
        rung="fsdp" if sharded else rung,
        gpus=gpus,
        precision="bf16-mixed",
        optimizer="adam",
        activation_bytes=model.activation_bytes,
        batch=BATCH / gpus,
        largest_block=model.largest_block,
        root=model.root,
    )
    computing = BATCH * model.flops / (CPU if rung == "cpu" else GPU) / gpus
    machines, gradients, hidden = 1, 4 * model.parameters, computing / 2
    if rung == "dp":  # the weights go out and the gradients come back, and nothing hides it
        exchange, hidden = 2 * gradients / LINK_BETWEEN["bandwidth"], 0
    elif sharded:  # see `speed_up`
        sent = 8 / 3 * model.parameters
        exchange = 1.5 * will_it_fit.all_reduce_seconds(sent, gpus, **LINK_BETWEEN)
    else:
        exchange = will_it_fit.all_reduce_seconds(gradients, gpus, **LINK_BETWEEN)
    if rung == "hsdp":  # each GPU averages the gradients of its shard with the other machine
        machines = 2
        exchange += will_it_fit.all_reduce_seconds(gradients / gpus, machines, **NETWORK)
    step = computing + max(0, exchange - hidden)
    return Needs(memory.at_least / 1e9, step / machines)


def new_lines(below: list[str], lines: list[str]) -> list[str]:
    """`lines`, with ``+ `` before those that `below` does not have and two spaces before others."""
    return [line for line in difflib.ndiff(below, lines) if line[:2] in ("+ ", "  ")]


def from_the_data_to_the_step(program: str) -> list[str]:
    *_functions, set_up, loop, _save = program.split("\n\n")
    return f"{set_up}\n\n{loop}".partition("\n        total +=")[0].splitlines()


class Rungs(WithWords):
    """``rungs``: YAML, for each rung its ``rung``, ``name``, ``program`` and ``says``."""

    def run(self):
        rungs = self.read()
        for rung in rungs:
            file = Path(self.env.app.srcdir, "rungs", rung["program"])
            self.env.note_dependency(str(file))
            rung["text"] = file.read_text(encoding="utf-8")
        time = _("Time for {count} sequences").format(count=BATCH)
        words = [_("Rung"), _("New lines"), _("Memory, at least"), time]
        head = "".join(f"<span>{escape(word)}</span>" for word in words)
        head = f'<fieldset class="ladder"><p class="ladder-row" aria-hidden="true">{head}</p>'
        parts = [raw(head), *self.rows(rungs)]
        compare = _("Compare with rung 1, not with the rung before")
        parts.append(raw(f'<label class="since"><input type="checkbox"> {compare}</label>'))
        for number, rung in enumerate(rungs):
            parts += self.panel(rung, {"before": rungs[max(0, number - 1)], "first": rungs[0]})
        return [*parts, raw("</fieldset>")]

    def rows(self, rungs):
        parts, below = [], rungs[0]
        for number, rung in enumerate(rungs, 1):
            name, (gigabytes, seconds) = rung["rung"], needs(rung["rung"])
            memory, time = gigabytes / 40, min(1, seconds / 2)  # of an A100; of two seconds
            shown = f"{seconds:.0f}" if seconds > 9 else f"{seconds:.2g}"
            _title, *lines = rung["text"].splitlines()
            added = sum(line[0] == "+" for line in new_lines(below["text"].splitlines()[1:], lines))
            below = rung
            chosen = " checked" if name == "ddp" else ""
            parts += [
                raw(
                    f'<input type="radio" name="rung" id="rung-{name}"{chosen}>'
                    f'<label class="ladder-row" for="rung-{name}" data-rung="{name}">'
                    f"<span><b>{number}</b> "
                ),
                self.words(rung["name"]),
                raw(
                    f"</span><span>{f'+{added}' if added else len(lines) + 1}</span>"
                    f'<span style="--share: {memory:.3f}">{gigabytes:.0f} GB</span>'
                    f'<span style="--share: {time:.3f}">{shown} s</span></label>'
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
        head = f"| {_('chapter')} | {_('question')} |\n| --- | --- |\n"
        return self.parse_text_to_nodes(head + "\n".join(lines))


class Told(SphinxRole):
    """Text that a function reads from files; the role's own text says which and what."""

    def __init__(self, read):
        self.read = read

    def run(self):
        files, words = self.read(Path(self.env.app.srcdir), self.text)
        for file in files:
            self.env.note_dependency(file)
        return [nodes.Text(words)], []


def outputs_of(file):
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            yield "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))


def count(root, what):
    chapters = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    if what == "errors":
        return CATALOGUE, str(len(errors.catalogue()))
    if what == "chapters":
        return [], str(len(chapters))
    if what == "outputs":
        notebooks = [*chapters, *(root / "notebooks").glob("errors_*.ipynb")]
        return notebooks, f"{sum(len(list(outputs_of(file))) for file in notebooks):,}"
    raise ValueError(f"cannot count {what}")


class Explained(SphinxDirective):
    has_content = True

    def run(self):
        note_catalogue(self.env)
        log = "\n".join(self.content)
        error = errors.find(log)[0].error
        told = _("**Why.** {why}\n\n**What to do.** {fix}")
        why, fix = error.in_brief
        told = told.format(why=why, fix=fix)
        answer = f"[{error.message}]({error.page}.ipynb#{error.id})\n\n{told}"
        answer = LINK.sub(lambda found: moved(found[1]), answer)
        box = nodes.container("", *self.parse_text_to_nodes(answer), classes=["explained"])
        return [nodes.literal_block(log, log, language="ipython-error"), box]


def add_files(app, page, template, context, doctree):
    if page == app.config.root_doc:
        app.add_css_file("landing.css")


def setup(app):
    app.add_role("count", Told(count))
    app.add_directive("rungs", Rungs)
    app.add_directive("chapters", Chapters)
    app.add_directive("explained", Explained)
    app.connect("html-page-context", add_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
