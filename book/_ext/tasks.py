"""Predictions and exercises as a page shows them; in the notebook they are paragraphs and cells.

A prediction is a paragraph that begins with **Predict.** Its answer is what a cell below puts out,
and the first paragraph after that, which says it in words: both are folded. An exercise is a
heading that ends in its minutes.
"""

import re

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def kind(node):
    return getattr(node, "attributes", {}).get("nb_element")


def shown_by(node):
    """What a cell puts out, if it is a cell that does."""
    output = node[-1] if kind(node) == "cell_code" and len(node) else None
    return output if kind(output) == "cell_code_output" else None


def frame_predictions(app, doctree):
    for strong in [node for node in doctree.findall(nodes.strong) if node.astext() == "Predict."]:
        question, section = strong.parent, strong.parent.parent
        start = section.index(question)
        cell = next(filter(shown_by, section[start:]), None)
        if not (cell and question.astext().startswith("Predict.")):
            LOGGER.warning("a prediction needs a paragraph and a cell", location=question)
            continue
        end = section.index(cell) + 1
        said = said_below(section[end:])
        cell[-1] = fold("the answer", shown_by(cell), *said)
        frame = nodes.container("", *section[start:end], classes=["prediction"])
        section[start : end + len(said)] = [frame]


def fold(name, *parts):
    names = {"prompt_show": f"Show {name}", "prompt_hide": f"Hide {name}"}
    return HideCodeCellNode("", *parts, **names, classes=["below-input"])


def said_below(nodes_below):
    """The first paragraph of text, with the figures before it and the list that it introduces."""
    for i, node in enumerate(nodes_below):
        picture = isinstance(node, nodes.paragraph) and isinstance(node[0], nodes.image)
        if isinstance(node, nodes.paragraph) and not picture:
            introduced = nodes_below[i + 1 : i + 2] if node.astext().endswith(":") else []
            before_cell = any(map(kind, introduced))
            return nodes_below[:i] if before_cell else [*nodes_below[: i + 1], *introduced]
        if not (picture or shown_by(node)):
            return nodes_below[:i]
    return nodes_below


def frame_exercises(app, doctree):
    for section in doctree.findall(nodes.section):
        title = section.next_node(nodes.title)
        if found := re.match(r"Exercise \d+: .*?( \((\d+ minutes)\))$", title.astext()):
            section["classes"].append("exercise")
            title[-1] = nodes.Text(title[-1].astext().removesuffix(found[1]))
            section.insert(1, nodes.paragraph("", found[2], classes=["minutes"]))


def setup(app):
    for change in (frame_predictions, frame_exercises):
        app.connect("doctree-read", change, priority=400)  # before the contents are collected
    return {"parallel_read_safe": True, "parallel_write_safe": True}
