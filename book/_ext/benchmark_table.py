"""The ``benchmark-table`` directive: one group of ``benchmarks/results.json`` as a reader sees it.

```{benchmark-table} ../benchmarks/results.json launching
```
"""

import json
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

HEADS = ["What", "Measured", "Spread", "Goal", "Met?"]


class BenchmarkTable(SphinxDirective):
    required_arguments = 2

    def run(self):
        file, group = self.arguments
        _, path = self.env.relfn2path(file)
        self.env.note_dependency(path)
        groups = json.loads(Path(path).read_text(encoding="utf-8"))
        return [nodes.raw("", table_html(groups[group]), format="html")]


def table_html(group):
    """A group of results, with the machine they were measured on as its caption."""
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    rows = "".join(f"<tr>{''.join(cells(result))}</tr>" for result in group["results"])
    machine = dict(group["machine"])
    date = machine.pop("date")
    facts = "; ".join(f"{name} {value}" for name, value in machine.items())
    return (
        f'<div class="pst-scrollable-table-container"><table class="table">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p>Measured on {escape(date)}. {escape(facts)}.</p>"
    )


def cells(result):
    detail = f"<br><small>{escape(result['detail'])}</small>" if result["detail"] else ""
    yield f'<td style="min-width: 9rem">{escape(result["what"])}{detail}</td>'
    yield f"<td>{result['ratio']:.2f}</td>"
    yield f"<td>{result['low']:.2f} to {result['high']:.2f}<br>n = {result['runs']}</td>"
    at_most, ratio, goal = result["at_most"], result["ratio"], result["goal"]
    yield f"<td>{'at most' if at_most else 'at least'} {goal:g}</td>"
    yield f"<td>{'yes' if (ratio <= goal if at_most else ratio >= goal) else 'no'}</td>"


def setup(app):
    app.add_directive("benchmark-table", BenchmarkTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
