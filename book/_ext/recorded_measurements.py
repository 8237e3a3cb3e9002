"""What other machines have measured, in the chapters' own text.

A chapter marks a place with a comment, which Jupyter does not show: ``<!-- recorded: copies -->``
for the table of ``runs/<machine>/copies.json``, as the programs of ``benchmarks/gpu`` write it, and
``<!-- recorded: output -->`` for what the cell before it gave elsewhere. Without a record
nothing stands there. Nothing is typed in: machine, date and numbers are those of the files. What
stands between ``<!-- until a GPU is recorded -->`` and ``<!-- end -->`` goes when a record of the
chapter on a GPU exists.
"""

import json
import re
from functools import partial
from pathlib import Path
from statistics import median

from recorded_runs import inline, joined, label, read_json, recorded, run_and_chapter, source
from translation import _

MARK = re.compile(r"<!-- recorded: ([\w ]+) -->")
OUTPUT = "output"
UNTIL = re.compile(r"<!-- until a GPU is recorded -->(.*?)<!-- end -->", re.DOTALL)


def find_measurements(app, config):
    """All ``runs/<machine>/<measurement>.json``, and what their content adds to the digest."""
    app.measurements = {}
    for file in sorted(Path(app.srcdir, "runs").glob("[!.]*/*.json")):
        content = read_json(file)
        if "measurement" in content:
            app.measurements.setdefault(content["measurement"], []).append(content)
    config.digest_of_measurements = json.dumps(app.measurements, sort_keys=True)


def fill_places(app, page, text):
    """Put into each place of a chapter what there is for it."""
    if not (page.startswith("notebooks/") or run_and_chapter(app, page)) or "<!--" not in text[0]:
        return
    notebook, before = json.loads(text[0]), None
    chapter = page.rpartition("/")[2]
    known = any(
        facts["gpus"] and chapter in recorded(app, machine)
        for machine, facts in app.recorded_runs.items()
    )
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            words = UNTIL.sub("" if known else r"\1", joined(cell["source"]))
            fill = partial(filled, app, page, before)
            cell["source"] = MARK.sub(fill, words).strip("\n")
        else:
            before = cell
    text[0] = json.dumps(notebook)


def filled(app, page, cell, mark):
    if not page.startswith("notebooks/"):
        return ""  # a recorded page shows its own numbers
    if mark[1] == OUTPUT:
        return "\n\n".join(outputs_elsewhere(app, page.removeprefix("notebooks/"), cell))
    return "\n\n".join(measured(content) for content in app.measurements.get(mark[1], []))


# --- outputs of recorded runs -------------------------------------------------------------------


def outputs_elsewhere(app, chapter, cell):
    """For each machine that has run this cell as it is today: its output, and where it stands."""
    own = app.chapters_run.get(chapter, {}).get("machine", "cpu")
    for machine, facts in app.recorded_runs.items():
        if machine == own or chapter not in recorded(app, machine):
            continue
        run = json.loads(source(app, f"runs/{machine}/{chapter}").read_text(encoding="utf-8"))
        same = [c for c in run["cells"] if joined(c["source"]) == joined(cell["source"])]
        told = "\n".join(words for c in same[:1] for words in words_of(c.get("outputs", [])))
        if told:
            where = _("The cell above on **{machine}**, {date} ([its page]({page})):").format(
                machine=label(machine),
                date=facts["date"],
                page=f"../runs/{machine}/{chapter}.ipynb",
            )
            yield f"{where}\n\n```text\n{told}\n```"


def words_of(outputs):
    for output in outputs:
        words = output.get("text") or output.get("data", {}).get("text/plain", "")
        if (words := joined(words).rstrip()) and not words.startswith("<"):
            yield words


# --- tables of measurements ---------------------------------------------------------------------


def measured(content):
    """A file of measurements as Markdown: what, on which machine, when, and the table."""
    facts, rows = content["machine"], content["rows"]
    gpus = "; ".join(facts["gpus"]) or _("no GPU: the CPU, {cpu}").format(cpu=facts["cpu"])
    told = _("Measured on **{machine}** ({gpus}) on {date}, with PyTorch {torch}:").format(
        machine=label(facts["machine"]), gpus=gpus, date=facts["date"], torch=facts["torch"]
    )
    if content["rehearsal"]:
        told += " " + _("a rehearsal with small sizes, whose numbers say nothing about a GPU.")
    run = {name: row for name, row in rows.items() if not ({"failed", "skipped"} & row.keys())}
    lines = TABLES[content["measurement"]](run)
    missing = [
        "- " + _("{row}: not measured, {reason}").format(
            row=name, reason=inline(rows[name].get("failed") or rows[name]["skipped"])
        )
        for name in rows
        if name not in run
    ]  # fmt: skip
    return "\n".join([told, "", *lines, "", *missing]).rstrip("\n")


def table(heads, rows):
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def in_ms(seconds):
    return f"{1e3 * seconds:,.3g}"


def ladder(rows):
    ways = {name: row for name, row in rows.items() if "images_per_second" in row}
    first, body, target = None, [], ""
    for name, row in ways.items():
        rate = median(row["images_per_second"])
        first = first or rate
        target = _("to {share} of the test images").format(share=f"{row['target']:.0%}")
        reached = [seconds for seconds in row["seconds_to_target"] if seconds is not None]
        all_runs = len(row["seconds_to_target"])
        took = "-"
        if reached:
            took = _("{seconds} s ({reached} of {runs} runs, {epochs} epochs)").format(
                seconds=f"{median(reached):,.3g}",
                reached=len(reached),
                runs=all_runs,
                epochs=f"{median(row['epochs']):.0f}",
            )
        body.append(
            [
                f"{name}: {row['reason']}",
                f"{rate:,.0f}",
                f"{rate / first:,.1f}",
                f"{row['share_of_peak']:.1%} ({row['peak_in']})",
                took,
                f"{row['first_five_steps']:,.3g} s",
            ]
        )
    heads = [_("one change a row"), _("images/s"), _("times the first")]
    heads += [_("of the matrix peak"), target, _("first five steps")]
    peaks = [
        _("{kind}: {rate} TFLOPs a second").format(
            kind=name, rate=f"{median(row['flops_per_second']) / 1e12:,.3g}"
        )
        for name, row in rows.items()
        if "flops_per_second" in row
    ]
    clock = _(
        "The clock counts training alone: it stops for the evaluations, and starts after the first "
        "five steps, in which memory is allocated and code is compiled."
    )
    return [*table(heads, body), "", f"{clock} {'; '.join(peaks)}."]


def sizes(rows):
    body = []
    for name, row in rows.items():
        gpu = median(row["gpu_seconds"])
        cells = [name, f"{row['parameters']:,}", in_ms(gpu)]
        if "cpu_seconds" in row:
            cpu = median(row["cpu_seconds"])
            cells += [in_ms(cpu), in_ms(median(row["one_thread_seconds"])), f"{cpu / gpu:,.1f}"]
        else:
            cells += ["", "", ""]
        body.append([*cells, f"{row['flops'] / gpu / 1e12:,.3g}"])
    heads = [_("a step"), _("parameters"), _("GPU, ms"), _("CPU, all cores, ms")]
    heads += [_("CPU, one thread, ms"), _("all cores / GPU"), _("GPU, TFLOPs a second")]
    return [*table(heads, body), "", where_the_gpu_wins(rows)]


def where_the_gpu_wins(rows):
    """The smallest step from which on the GPU is faster in every larger one, too."""
    first = None
    both = {name: row for name, row in rows.items() if "cpu_seconds" in row}
    for name, row in sorted(both.items(), key=lambda item: -item[1]["flops"]):
        if median(row["gpu_seconds"]) >= median(row["cpu_seconds"]):
            break
        first = name
    if first is None:
        return str(_("In the largest of these steps, the GPU is not faster than all cores."))
    told = _(
        "From *{name}* on, with {flops} million FLOPs a step, the GPU is faster than all cores."
    )
    return told.format(name=first, flops=f"{rows[first]['flops'] / 1e6:,.3g}")


def copies(rows):
    peak = rows.get("bus", {}).get("bytes_per_second")
    body = []
    for name, row in rows.items():
        if name == "bus":
            continue
        rate = median(row["bytes_per_second"])
        of_peak = f"{rate / peak:.0%}" if peak and "GPU" in name else ""
        body.append([name, f"{rate / 1e9:,.3g}", of_peak])
    lines = table([_("copy"), _("GB/s"), _("of the bus's peak")], body)
    if peak:
        facts = rows["bus"]
        lines += ["", _("The bus: PCIe {generation} with {lanes} lanes, {rate} GB/s.").format(
            generation=facts["most_generation"], lanes=facts["most_lanes"], rate=f"{peak / 1e9:.3g}"
        )]  # fmt: skip
    return lines


def answers(rows):
    body = [
        [
            name,
            *(in_ms(row[percentile]) for percentile in ("p50_seconds", "p99_seconds")),
            f"{row['images_per_second']:,.0f}",
        ]
        for name, row in rows.items()
    ]
    return table([_("net and batch"), _("p50, ms"), _("p99, ms"), _("images/s")], body)


def peaks_of_memory(rows):
    columns = ("at_least", "peak_bytes", "total")
    body = [[name, *(f"{row[key] / 1e6:,.1f}" for key in columns)] for name, row in rows.items()]
    heads = [_("training step"), _("`at_least`, MB"), _("peak, MB"), _("`total`, MB")]
    return table(heads, body)


TABLES = {
    "speed_ladder": ladder,
    "sizes": sizes,
    "copies": copies,
    "inference": answers,
    "memory": peaks_of_memory,
}


def setup(app):
    # The pages change with it, as with the recorded runs.
    app.add_config_value("digest_of_measurements", "", "env", str)
    app.connect("config-inited", find_measurements, priority=901)
    app.connect("source-read", fill_places, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
