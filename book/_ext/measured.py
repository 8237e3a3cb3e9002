"""Numbers and tables of what others have measured, by the formulas as they are at this build.

The role ``measured`` writes one number: {measured}`memory: within`. After the kind, "aside" takes
only the rows kept aside, "put back" also those left out because they contradict others; "perfect"
is "within" for perfect scaling. Of one row it writes a field, {measured}`ignite-2: gpus`, or how
many "times" as fast it is as its base. The directive writes the ``figure``, the table of ``kinds``,
or all ``rows``, folded.
"""

from itertools import chain
from math import log2

from docutils import nodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

from benchmarks import measured_by_others as table
from torchladder.showing import in_bytes, show

KINDS = [*chain(*table.PANELS.values()), "FLOPs"]


class Number(SphinxRole):
    def run(self):
        kind, _, what = self.text.partition(": ")
        if row := table.read().get(kind):
            return [nodes.Text(times(row) if what == "times" else f"{row[what]:g}")], []
        return [nodes.Text(numbers(kind)[what])], []


class Part(SphinxDirective):
    required_arguments, has_content = 1, True

    def run(self):
        if self.arguments[0] != "figure":
            return self.parse_text_to_nodes("\n".join(globals()[self.arguments[0]]()))
        html = show(table.figure(), " ".join(self.content))._repr_html_()
        return [nodes.raw("", html, format="html")]


def numbers(kind):
    """What the role writes, by the word that asks for it."""
    name, every = kind.removesuffix(" aside").removesuffix(" put back"), table.read()
    for row in every.values() if "put back" in kind else ():
        row["left_out"] = row["left_out"] * (not row["left_out"].startswith("contradicts"))
    found = [each for each in table.of(name, every) if each[0]["aside"] or "aside" not in kind]
    count, error, share = table.spread(said / got for _, said, got in found)
    error = f"{100 * error:.0f} %" if error >= 0.005 else "below 1 %"
    told = {"rows": f"{count}", "error": error, "within": f"{share * count:.0f} of {count}"}
    if name.startswith("speed-up"):  # as if N GPUs were N times as fast
        perfect = [row["gpus"] / every[row["base"]]["gpus"] / got for row, _, got in found]
        told["perfect"] = f"{table.spread(perfect)[2] * count:.0f} of {count}"
    compared = len({row["id"] for row, *_ in found})
    return told | {"compared": f"{compared}", "all": f"{len(every)}"}


def kinds():
    yield "| | rows | median error | within 20 % | of those aside | furthest away |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for kind in KINDS:
        row, *both = max(table.of(kind), key=lambda each: abs(log2(each[1] / each[2])))
        worst = "{}: {}, measured {}".format(link(row), *table.amounts(kind, both))
        cells = [numbers(kind)[what] for what in ("rows", "error", "within")]
        cells += [numbers(f"{kind} aside")["within"], worst]
        yield f"| {kind[0].upper()}{kind[1:]} | {' | '.join(cells)} |"


def rows():
    """Every row of the table: of each kind, those left out, those only compared with."""
    parts, rest = {kind: [] for kind in KINDS}, table.read()
    for kind, row, *both in table.pairs(table.read()):
        ratio = f"{both[0] / both[1]:.2f}{', aside' * bool(row['aside'])}"
        parts[kind].append([link(row), *table.amounts(kind, both), ratio, what(row)])
        rest.pop(row["id"], None)
    for row in rest.values():
        part = parts.setdefault("left out" if row["left_out"] else "that others refer to", [])
        why = f" **{row['left_out']}**" if row["left_out"] else ""
        part.append([link(row), f"{row['value']:g} {row['unit']}", what(row) + why])
    for title, cells in parts.items():
        head = ["row", "predicted", "measured", "ratio", "what"]
        head = head if len(cells[0]) == 5 else ["row", "measured", "what"]
        yield f":::{{dropdown}} {len(cells)} rows: {title}\n| {' | '.join(head)} |"
        yield "|".join(["", *[" ---: " if word[-1] == "d" else " --- " for word in head], ""])
        yield from (f"| {' | '.join(row)} |" for row in cells)
        yield ":::"


def times(row):
    return f"{table.throughput(row) / table.throughput(table.read()[row['base']]):.2f}"


def link(row):
    return f"[{row['id']}]" + " [and]".join(f"({address})" for address in table.addresses(row))


def what(row):
    gpus = row["gpus"] and f"{row['gpus']:g} × {row['gpu'] or 'GPU'}"
    size = row["bytes"] and in_bytes(int(row["bytes"]))
    parts = [gpus, row["model"], size, row["precision"], row["rung"].upper(), row["measured"]]
    return ", ".join(filter(None, parts))


def setup(app):
    app.add_role("measured", Number())
    app.add_directive("measured", Part)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
