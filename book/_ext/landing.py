"""The landing page, read from the repository when the site is built.

The directive ``rungs`` is the ladder of ``rungs/ladder.toml``: what each rung needs for one model,
and its program with the lines marked that it adds; radio buttons choose, without a script. Its
markup is in landing.html. ``chapters`` is the README's table of chapters and questions,
``routes`` a few chapters in an order, with their hours; the role ``count`` counts the chapters or
the errors.
"""

import difflib
import math
import re
import textwrap
import tomllib
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.util.docutils import SphinxDirective, SphinxRole

from book._ext.controls import raw, rendered
from book._ext.error_clinic import note_catalogue
from book._ext.recorded_runs import day
from torchclinic import errors, will_it_fit
from torchladder.showing import COLORS

# What the page calculates with: GPT-2 XL, and A100s with 40 GB as the calculators have them.
MODEL = {"layers": 48, "hidden": 1600, "heads": 25, "sequence": 1024, "vocabulary": 50257}
BATCH = 16
GPU, CPU = 0.58 * 312e12, 1e12  # FLOP/s
NVLINK, NETWORK = (6e-6, 200e9), (30e-6, 12.5e9)  # seconds per message, bytes per second
SENT = {"dp": 8, "ddp": 4, "fsdp": 8 / 3, "hsdp": 8 / 3}  # bytes of a parameter; FSDP three times


def needs(name: str) -> tuple[float, float]:
    """Bytes of memory on a GPU, and seconds for `BATCH` sequences, of a rung in the ladder."""
    gpus = 1 if name in ("cpu", "gpu") else 2
    sharded = name in ("fsdp", "hsdp")
    cast = "bf16" if sharded else "bf16-mixed"  # FSDP casts also what autocast does not
    model = will_it_fit.transformer(**MODEL, precision=cast, checkpointing=True)
    memory = will_it_fit.memory_per_gpu(
        model.parameters, rung="fsdp" if sharded else name, gpus=gpus, precision="bf16-mixed",
        optimizer="adam", activation_bytes=model.activation_bytes, batch=BATCH / gpus,
        largest_block=model.largest_block, root=model.root,
    )  # fmt: skip
    seconds = BATCH * model.flops / (CPU if name == "cpu" else GPU)
    if gpus > 1:
        machines = 2 if name == "hsdp" else 1
        seconds /= will_it_fit.speed_up(
            seconds / gpus, SENT[name] * model.parameters, gpus * machines, *NVLINK,
            rung=name if sharded else "ddp", machines=machines, network=NETWORK,
            gradients=4 * model.parameters,
        )  # fmt: skip
    return memory.at_least, seconds


def ladder(source: str) -> list[dict]:
    """The rungs of ``ladder.toml`` that have a ``chapter``, with their ``number`` and ``color``."""
    file = Path(source, "rungs/ladder.toml")
    rungs = tomllib.loads(file.read_text("utf-8"))["rung"] if file.exists() else []
    for number, rung in enumerate(rungs, 1):
        chapters = sorted(Path(source, "notebooks").glob(f"[0-9][0-9]_rung_{number}_*.ipynb"))
        rung |= {"number": number, "color": COLORS[rung["name"]]}
        rung["chapter"] = chapters[0].stem if chapters else None
    return [rung for rung in rungs if rung["chapter"]]


def new_lines(below: list[str], lines: list[str]) -> list[str]:
    """`lines`, with ``+ `` before those that `below` does not have and two spaces before others."""
    return [line for line in difflib.ndiff(below, lines) if line[:2] in ("+ ", "  ")]


def from_the_data_to_the_step(program: str) -> list[str]:
    main = program.partition("\ndef main():\n")[2].partition("\n\n\n")[0]
    _arguments, set_up, loop, *_save = textwrap.dedent(main).split("\n\n")
    return f"{set_up}\n\n{loop}".partition("\n        total +=")[0].splitlines()


class Rungs(SphinxDirective):
    def run(self):
        rungs = ladder(self.env.app.srcdir)
        self.env.note_dependency(str(Path(self.env.app.srcdir, "rungs/ladder.toml")))
        for rung in rungs:
            file = Path(self.env.app.srcdir, "rungs", rung["program"])
            self.env.note_dependency(str(file))
            rung["text"] = file.read_text(encoding="utf-8")
        pairs = list(zip(rungs, [rungs[0], *rungs], strict=False))
        parts = [rendered("landing.html", rungs=[row(*pair) for pair in pairs])]
        for pair in pairs:
            parts += self.panel(*pair)
        return [*parts, raw("</fieldset>")]

    def panel(self, rung, below):
        says = f"[](/notebooks/{rung['chapter']}.ipynb). {rung['says']}"
        parts = [raw(f'<div class="rung-panel" data-rung="{rung["name"]}">')]
        parts += self.parse_text_to_nodes(says)
        programs = [from_the_data_to_the_step(program["text"]) for program in (below, rung)]
        lines = new_lines(*programs)
        shown = highlight("\n".join(programs[1]), PythonLexer(), HtmlFormatter(nowrap=True))
        code = "\n".join(
            f"<mark>{html}</mark>" if line[0] == "+" else html
            for line, html in zip(lines, shown.splitlines(), strict=True)
        )
        return [*parts, raw(f'<div class="highlight"><pre tabindex="0">{code}</pre></div></div>')]


def row(rung, below):
    """A rung and its numbers in the ladder."""
    nbytes, seconds = needs(rung["name"])
    _title, *lines = rung["text"].splitlines()
    added = sum(line[0] == "+" for line in new_lines(below["text"].splitlines()[1:], lines))
    numbers = {"lines": f"+{added}" if added else len(lines) + 1, "gigabytes": round(nbytes / 1e9)}
    return rung | numbers | {"seconds": seconds, "share": math.log10(seconds / 0.2) / 3}


class Chapters(SphinxDirective):
    def run(self):
        readme = Path(self.env.app.srcdir, "README.md")
        self.env.note_dependency(str(readme))
        rows = re.findall(r"^\| \[\d\d\]\((.*)\) \| (.*) \|$", readme.read_text("utf-8"), re.M)
        lines = [f"| {page[10:12]} [](/{page}) | {question} |" for page, question in rows]
        head = "| chapter | question |\n| --- | --- |\n"
        return self.parse_text_to_nodes(head + "\n".join(lines))


class Routes(SphinxDirective):
    """Lines such as ``I have one GPU: 05 06``, each a list of chapters."""

    has_content = True

    def run(self):
        lines = []
        for name, _, numbers in (line.partition(": ") for line in self.content):
            files = [
                next(Path(self.env.app.srcdir, "notebooks").glob(f"{n}_*")) for n in numbers.split()
            ]
            texts = [file.read_text("utf-8") for file in files]
            read = sum(int(re.search(r"(\d+) minutes to read", text)[1]) for text in texts)
            tasks = sum(map(int, re.findall(r"### Exercise .*\((\d+) minutes\)", "".join(texts))))
            for file in files:
                self.env.note_dependency(str(file))
            hours = f"{read / 60:.1f} h + {tasks / 60:.1f} h of exercises"
            chapters = [f"- {file.name[:2]} [](/notebooks/{file.name})" for file in files]
            lines += [f"**{name}** ({hours})", "", *chapters, ""]
        routes = self.parse_text_to_nodes("\n".join(lines))
        return [nodes.container("", *routes, classes=["routes"])]


class Count(SphinxRole):
    def run(self):
        note_catalogue(self.env)
        chapters = Path(self.env.app.srcdir, "notebooks").glob("[0-9]*.ipynb")
        counts = {"chapters": len(list(chapters)), "errors": len(errors.catalogue())}
        runs = [run for name, run in self.env.app.chapters_run.items() if name[:2].isdigit()]
        counts["run"] = day(max(runs, key=lambda run: run["date"]))
        return [nodes.Text(str(counts[self.text]))], []


def setup(app):
    app.add_role("count", Count())
    app.add_directive("rungs", Rungs)
    app.add_directive("chapters", Chapters)
    app.add_directive("routes", Routes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
