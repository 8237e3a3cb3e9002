"""Labelled fields of a calculator, and the phrases that its script puts together.

The directive ``controls`` takes YAML: a ``legend``, a list of ``fields``, and ``more``: a list of
folded parts, which have a legend and fields, too. A field has a
``name`` (that of the setting in the page's script and in links), a ``label``, and either
``options``, or ``value`` with the limits ``from`` and ``to``. An option may ``set`` other fields;
``if`` says for which options a field is there. The directive ``phrases`` takes a YAML mapping of
names to sentences with ``{gaps}``. Every word is a message for translators, as a paragraph is.
"""

import json
from html import escape

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

NUMBER = """<input type="text" inputmode="decimal" id="{id}" data-name="{name}" {kind}
 data-from="{from}" data-to="{to}" value="{value}" aria-describedby="{id}-error"
 autocomplete="off" spellcheck="false" maxlength="24">
<input type="range" data-slider="{name}" min="0" max="200" aria-labelledby="{id}-label">"""
SELECT = '<select id="{id}" data-name="{name}" aria-describedby="{id}-error">'
ERROR = '<p class="control-error" id="{id}-error" data-error="{name}" hidden></p>'


class Words(nodes.TextElement):
    """Some words between tags: translated as a paragraph is, but without being one."""


class WithWords(SphinxDirective):
    has_content = True

    def read(self):
        try:
            return yaml.safe_load("\n".join(self.content))
        except yaml.YAMLError as error:
            raise self.error(f"not YAML: {error}") from error

    def words(self, text):
        node = Words(text, "", nodes.Text(text))
        self.set_source_info(node)
        return node


class Controls(WithWords):
    """``controls``: a fieldset; its argument is the first part of every ``id``."""

    required_arguments = 1

    def run(self):
        form = self.form(self.read(), "legend")
        return [raw('<fieldset class="controls" hidden>'), *form, raw("</fieldset>")]

    def form(self, form, tag):
        parts = [raw(f"<{tag}>"), self.words(form["legend"]), raw(f"</{tag}>")]
        for field in form["fields"]:
            parts += self.field({"id": f"{self.arguments[0]}-{field['name']}", **field})
        for more in form.get("more", []):
            parts += [raw(f'<details data-if="{more.get("if", "")}">')]
            parts += [*self.form(more, "summary"), raw("</details>")]
        return parts

    def field(self, field):
        attributes = {key: escape(str(value), quote=True) for key, value in field.items()}
        shown = escape(field.get("if", ""), quote=True)
        start = '<div class="control" data-if="{}"><label id="{id}-label" for="{id}">'
        start = raw(start.format(shown, **attributes))
        parts = [start, self.words(field["label"]), raw("</label>")]
        if "options" in field:
            parts += [raw(SELECT.format(**attributes))]
            for option in field["options"]:
                chosen = " selected" if option["value"] == field.get("value") else ""
                settings = escape(json.dumps(option.get("set", {})), quote=True)
                value = escape(str(option["value"]), quote=True)
                parts += [raw(f'<option value="{value}" data-set="{settings}"{chosen}>')]
                parts += [self.words(option["text"]), raw("</option>")]
            parts += [raw("</select>")]
        else:
            kinds = [f'data-{kind}="yes"' for kind in ("whole", "count") if kind in field]
            parts += [raw(NUMBER.format(kind=" ".join(kinds), **attributes))]
        if "hint" in field:
            parts += [raw('<p class="control-hint">'), self.words(field["hint"]), raw("</p>")]
        return [*parts, raw(ERROR.format(**attributes) + "</div>")]


class Phrases(WithWords):
    def run(self):
        parts = [raw("<div hidden>")]
        for name, text in self.read().items():
            parts += [raw(f'<span data-phrase="{escape(name, quote=True)}">'), self.words(text)]
            parts += [raw("</span>")]
        return [*parts, raw("</div>")]


def raw(html):
    return nodes.raw("", html, format="html")


def setup(app):
    app.add_node(Words, html=(lambda self, node: None, lambda self, node: None))
    app.add_directive("controls", Controls)
    app.add_directive("phrases", Phrases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
