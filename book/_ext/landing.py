"""The landing page, read from the repository when the site is built.

The directive ``rungs`` is the ladder of ``rungs/ladder.toml``: what each rung needs for one model,
and its program with the lines marked that it adds; radio buttons choose, without a script. Its
markup is in landing.html. ``stairs`` draws the same numbers as stairs. ``chapters`` is the README's
table of chapters and questions, by part, with minutes, and routes that leave some of its rows; the
role ``count`` counts the chapters or the errors.
"""

import difflib
import re
import textwrap
import tomllib
from pathlib import Path

import yaml
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
GPUS = 8  # in a machine
GPU, CPU = 0.58 * 312e12, 1e12  # FLOP/s
NVLINK, NETWORK = (6e-6, 200e9), (30e-6, 200e9)  # seconds per message, bytes per second
SENT = {"dp": 8, "ddp": 4, "fsdp": 8 / 3, "hsdp": 8 / 3}  # bytes of a parameter; FSDP three times


def needs(name: str) -> tuple[float, float]:
    """Bytes of memory on a GPU, and seconds for `BATCH` sequences, of a rung in the ladder."""
    gpus = 1 if name in ("cpu", "gpu") else GPUS
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
        pairs = self.pairs()
        parts = [rendered("landing.html", rungs=[row(*pair) for pair in pairs])]
        for pair in pairs:
            parts += self.panel(*pair)
        return [*parts, raw("</fieldset>")]

    def pairs(self):
        """Each rung, its program's text in it, and the rung below, that of the first is itself."""
        rungs = ladder(self.env.app.srcdir)
        self.env.note_dependency(str(Path(self.env.app.srcdir, "rungs/ladder.toml")))
        for rung in rungs:
            file = Path(self.env.app.srcdir, "rungs", rung["program"])
            self.env.note_dependency(str(file))
            rung["text"] = file.read_text(encoding="utf-8")
        return list(zip(rungs, [*rungs[:1], *rungs], strict=False))

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
    time = f"{seconds:.0f} s" if seconds > 9 else f"{seconds:.2g} s"
    numbers = {"added": f"+{added}" if added else len(lines) + 1, "gigabytes": round(nbytes / 1e9)}
    # One process for all GPUs: a cost that no formula has.
    return rung | numbers | {"time": "≥" * (rung["name"] == "dp") + time}


class Stairs(Rungs):
    """The rungs as stairs, each with its time."""

    has_content = True

    def run(self):
        parts = [raw('<div class="steps"><div class="grey">')]
        parts += [*self.parse_content_to_nodes(), raw("</div><ol>")]
        for rung in (row(*pair) for pair in self.pairs()):
            time = rung["time"].replace(" ", "\N{NO-BREAK SPACE}")
            name = f"**{rung['number']}** {rung.get('short', rung['title'])}"
            parts += [raw(f'<li style="--rung: {rung["color"]}; --step: {rung["number"]}">')]
            parts += self.parse_text_to_nodes(
                f"{time}\n\n[{name}](/notebooks/{rung['chapter']}.ipynb)"
            )
            parts += [raw("</li>")]
        return [*parts, raw("</ol></div>")]


class Chapters(SphinxDirective):
    """The chapters by part, in two columns, each of whole parts.

    Lines such as ``I have one GPU: 05 06`` are routes through them.
    """

    has_content = True

    def run(self):
        source = Path(self.env.app.srcdir)
        for file in ("README.md", "_toc.yml"):
            self.env.note_dependency(str(source / file))
        readme = (source / "README.md").read_text("utf-8")
        asked = dict(re.findall(r"^\| \[\d\d\]\((.*)\.ipynb\) \| (.*) \|$", readme, re.M))
        routes = [line.partition(": ")[::2] for line in self.content]
        columns, minutes = [nodes.container(), nodes.container()], {}
        for part in yaml.safe_load((source / "_toc.yml").read_text("utf-8"))["parts"]:
            column = columns[len(minutes) > len(asked) / 2]
            lines = []
            for page in (page for each in part["chapters"] if (page := each["file"]) in asked):
                number = page[10:12]
                minutes[number] = read, tasks = self.minutes(source / f"{page}.ipynb")
                lines += [f"- {number} [](/{page}.ipynb) *{read} + {tasks} min*", ""]
                lines += [f"  {asked[page]}", ""]
            if lines:
                column += raw(f"<details open><summary>{part['caption']}</summary>")
                column += [*self.parse_text_to_nodes("\n".join(lines)), raw("</details>")]
        for n, (name, chapters) in enumerate(routes):
            hours = sum(sum(minutes[c]) for c in chapters.split()) / 60
            routes[n] = {"name": name, "hours": f"{hours:.0f} h", "on": chapters}
        index = nodes.container("", rendered("routes.html", routes=routes), *columns)
        index["classes"] = ["index"]
        for item, number in zip(index.findall(nodes.list_item), minutes, strict=True):
            item["classes"] += [
                f"on-{n}" for n, route in enumerate(routes) if number in route["on"]
            ]
        return [index]

    def minutes(self, file):
        """What the chapter says of itself: minutes to read, and minutes of its exercises."""
        self.env.note_dependency(str(file))
        text = file.read_text("utf-8")
        tasks = re.findall(r"### Exercise .*\((\d+) minutes\)", text)
        return int(re.search(r"(\d+) minutes to read", text)[1]), sum(map(int, tasks))


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
    app.add_directive("stairs", Stairs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
