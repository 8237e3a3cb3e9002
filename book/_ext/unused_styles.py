"""Style sheets keep the rules that some page can use: of the theme's, about a fifth.

A browser asks of each element which rules are for it, so what no page uses makes all of them slow.
"""

import re
from pathlib import Path

import tinycss2

# What gives elements their classes and ids: pages, and the scripts in them and beside them.
IN_PAGES = re.compile(r'(?:class|id)="([^"]*)"|<script[^>]*>(.*?)</script>', re.DOTALL)
NAME = re.compile(r"[\w-]+")
COMMA = tinycss2.parse_component_value_list(",")
TEXTS = ("search_index.js", "error_rules.js")  # hold what pages say, not what they are made of


def drop_unused_rules(app, exception):
    if exception is None and app.builder.name == "html":
        static = Path(app.outdir, "_static")
        names = names_in_use(Path(app.outdir))
        for sheet in static.rglob("*.css"):
            rules = tinycss2.parse_stylesheet(sheet.read_text(encoding="utf-8"))
            sheet.write_text(tinycss2.serialize(list(used(rules, names))), encoding="utf-8")


def names_in_use(site):
    """All that may be a class or an id of an element."""
    names = set()
    for page in site.rglob("*.html"):
        for attribute, script in IN_PAGES.findall(page.read_text(encoding="utf-8")):
            names.update(attribute.split(), NAME.findall(script))
    for script in (site / "_static").rglob("*.js"):
        if script.name not in TEXTS:
            names.update(NAME.findall(script.read_text(encoding="utf-8")))
    return names


def used(rules, names):
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = [part for part in parts(rule.prelude) if can_match(part, names)]
            if not selectors:
                continue
            rule.prelude = [token for part in selectors for token in [*COMMA, *part]][1:]
        elif rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports"):
            rule.content = list(used(tinycss2.parse_rule_list(rule.content), names))
        elif rule.type == "comment" and not rule.value.startswith("!"):  # such are licences
            continue
        yield rule


def parts(tokens):
    """A list of selectors, split at its commas."""
    found = [[]]
    for token in tokens:
        if token == ",":
            found.append([])
        else:
            found[-1].append(token)
    return found


def can_match(selector, names):
    """Whether there may be an element for it: classes and ids are looked up, all else may be."""
    dot = False
    for token in selector:
        if (dot and token.type == "ident") or token.type == "hash":
            if token.value not in names:
                return False
        elif token.type == "function" and token.lower_name in ("is", "where", "has"):
            dead = not any(can_match(part, names) for part in parts(token.arguments))
            if dead:
                return False
        dot = token == "."
    return True


def setup(app):
    app.connect("build-finished", drop_unused_rules, priority=900)  # after the theme was trimmed
    return {"parallel_read_safe": True, "parallel_write_safe": True}
