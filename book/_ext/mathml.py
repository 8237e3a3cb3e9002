"""Formulas as MathML, made when the site is built.

Every current browser draws MathML by itself, so a page with formulas needs no script, no font and
no other host. The renderer is chosen by ``html_math_renderer: mathml`` in ``_config.yml``.
"""

import re
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3}


def to_mathml(node, display):
    latex = node.astext().strip()
    try:
        # The converter knows aligned formulas by their other name.
        mathml = convert(latex.replace("{aligned}", "{split}"), display=display)
        problem = problem_in(mathml)
    except Exception as error:
        # The converter has a dozen exception classes of its own without a common base.
        problem = type(error).__name__
    if problem:
        LOGGER.warning("formula not understood (%s): %s", problem, latex, location=node)
        return ""
    # A root's bar touches capital letters where the font has no table for mathematics.
    return mathml.replace("<msqrt>", '<msqrt><mspace width="0" height="0.9em" />')


def problem_in(mathml):
    """What the converter let through without a word: unknown commands, missing parts."""
    if unknown := re.search(r">(\\[a-zA-Z]+)<", mathml):
        return f"unknown command {unknown[1]}"
    for element in ElementTree.fromstring(mathml).iter():
        name = element.tag.rpartition("}")[2]
        if len(element) != PARTS.get(name, len(element)):
            return f"{name} of {len(element)} parts"
    return None


def visit_inline(translator, node):
    translator.body.append(to_mathml(node, "inline"))
    raise nodes.SkipNode


def visit_display(translator, node):
    # A formula wider than a phone scrolls in its own box, which the keyboard must reach too.
    start = translator.starttag(node, "div", CLASS="math-display", TABINDEX="0")
    translator.body.append(f"{start}{to_mathml(node, 'block')}</div>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_display, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
