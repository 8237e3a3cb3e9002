"""The ``rung-diff`` directive: what changes from one file to another.

In a chapter's Markdown cell, paths relative to the notebook::

    ```{rung-diff} ../rungs/1_cpu.py ../rungs/2_gpu.py
    ```

Added and removed lines are told apart by sign, by element (``ins``, ``del``) and by colour.
Longer stretches that both files share are folded away. A missing file is a warning, so it fails
a build with ``-W``.
"""

import difflib
from html import escape
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

LOGGER = logging.getLogger(__name__)
CONTEXT = 3
SIGNS = {"span": " ", "del": "−", "ins": "+"}


class RungDiff(SphinxDirective):
    required_arguments = 2

    def run(self):
        texts = []
        for argument in self.arguments:
            _, path = self.env.relfn2path(argument)
            self.env.note_dependency(path)
            try:
                texts.append(Path(path).read_text(encoding="utf-8"))
            except OSError as error:
                self.warn(f"cannot read {argument}: {error.strerror}")
                return []
        if texts[0] == texts[1]:
            self.warn(f"{self.arguments[0]} and {self.arguments[1]} are the same")
        names = [f"{Path(name).parent.name}/{Path(name).name}" for name in self.arguments]
        return [nodes.raw("", diff_html(*texts, *names), format="html")]

    def warn(self, message):
        LOGGER.warning("rung-diff: %s", message, location=self.get_location())


def diff_html(old, new, old_name, new_name):
    """The differences between two Python programs as an HTML figure."""
    old_html, new_html = lines_of(old), lines_of(new)
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    opcodes = matcher.get_opcodes()
    blocks, added, removed = [], 0, 0
    for position, (kind, i1, i2, j1, j2) in enumerate(opcodes):
        if kind == "equal":
            # Three lines stay beside each change; the rest, if it is worth a click, is folded.
            start = i1 if position == 0 else i1 + CONTEXT
            stop = i2 if position == len(opcodes) - 1 else i2 - CONTEXT
            if stop - start <= 2:
                start = stop = i2
            blocks.append(pre("span", old_html[i1:start]))
            if stop > start:
                summary = f"<summary>{stop - start} unchanged lines</summary>"
                blocks.append(f"<details>{summary}{pre('span', old_html[start:stop])}</details>")
            blocks.append(pre("span", old_html[stop:i2]))
        else:
            removed, added = removed + i2 - i1, added + j2 - j1
            blocks.append(pre("del", old_html[i1:i2]))
            blocks.append(pre("ins", new_html[j1:j2]))
    body = "".join(blocks).replace("</pre><pre>", "")
    old_name, new_name = escape(old_name), escape(new_name)
    return (
        '<figure class="rung-diff"><figcaption>'
        f"<code>{old_name}</code> to <code>{new_name}</code>: "
        f'<span class="removed">−{removed}</span> <span class="added">+{added}</span> '
        "lines</figcaption>"
        f'<div class="highlight" tabindex="0" role="region" '
        f'aria-label="Differences between {old_name} and {new_name}">'
        f'<div class="diff-lines">{body}</div></div></figure>\n'
    )


def lines_of(code):
    html = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return html.splitlines()


def pre(element, lines):
    if not lines:
        return ""
    opening = f'<{element} class="line"><span class="sign">{SIGNS[element]} </span>'
    return "<pre>" + "".join(f"{opening}{line}\n</{element}>" for line in lines) + "</pre>"


def setup(app):
    app.add_directive("rung-diff", RungDiff)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
