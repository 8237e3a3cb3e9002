"""Labelled fields of a calculator, and the phrases that its script puts together.

The directive ``controls`` takes YAML: a ``legend``, a list of ``fields``, and ``more``: a list of
folded parts, which have a legend and fields, too. A field has a
``name`` (that of the setting in the page's script and in links), a ``label``, and either
``options``, or ``value`` with the limits ``from`` and ``to``. An option may ``set`` other fields;
``if`` says for which options a field is there. The directive ``phrases`` takes a YAML mapping of
names to sentences with ``{gaps}``.
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
OPTION = '<option value="{value}" data-set="{set}"{chosen}>{text}</option>'
CONTROL = '<div class="control" data-if="{if}"><label id="{id}-label" for="{id}">{label}</label>'
ERROR = '<p class="control-error" id="{id}-error" data-error="{name}" hidden></p></div>'


class Yaml(SphinxDirective):
    has_content = True

    def read(self):
        try:
            return yaml.safe_load("\n".join(self.content))
        except yaml.YAMLError as error:
            raise self.error(f"not YAML: {error}") from error


class Controls(Yaml):
    """``controls``: a fieldset; its argument is the first part of every ``id``."""

    required_arguments = 1

    def run(self):
        form = self.form(self.read(), "legend")
        return [raw(f'<fieldset class="controls" hidden>{form}</fieldset>')]

    def form(self, form, tag):
        html = f"<{tag}>{escape(form['legend'])}</{tag}>"
        for field in form["fields"]:
            html += control({"id": f"{self.arguments[0]}-{field['name']}", "if": "", **field})
        for more in form.get("more", []):
            inside = self.form(more, "summary")
            html += f'<details data-if="{escape(more.get("if", ""))}">{inside}</details>'
        return html


def control(field):
    attributes = escaped(field)
    html = CONTROL.format(**attributes)
    if "options" in field:
        html += SELECT.format(**attributes)
        for option in field["options"]:
            chosen = " selected" if option["value"] == field.get("value") else ""
            settings = json.dumps(option.get("set", {}))
            html += OPTION.format(**escaped(option | {"set": settings}), chosen=chosen)
        html += "</select>"
    else:
        kinds = [f'data-{kind}="yes"' for kind in ("whole", "count") if kind in field]
        html += NUMBER.format(kind=" ".join(kinds), **attributes)
    if "hint" in field:
        html += '<p class="control-hint">{hint}</p>'.format(**attributes)
    return html + ERROR.format(**attributes)


def escaped(values):
    return {key: escape(str(value)) for key, value in values.items()}


class Phrases(Yaml):
    def run(self):
        spans = [
            '<span data-phrase="{}">{}</span>'.format(*map(escape, pair))
            for pair in self.read().items()
        ]
        return [raw(f"<div hidden>{''.join(spans)}</div>")]


def raw(html):
    return nodes.raw("", html, format="html")


def setup(app):
    app.add_directive("controls", Controls)
    app.add_directive("phrases", Phrases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
