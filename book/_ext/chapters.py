"""The chapters' numbers, their cards, and which page comes after the set-up."""

import re

from docutils import nodes


class ChapterNumber(int):
    """Written as the text writes it, chapter 06; with the rung, if the chapter is of one."""

    rung = ""

    def __str__(self):
        return f"{self:02}{self.rung}"


def number_chapters(app, env):
    """Chapters are notebooks: the other pages of a part have no number."""
    for page, contents in env.tocs.items():
        titles = [env.titles[page], *contents.findall(nodes.reference)]
        if page.startswith("book/"):
            env.toc_secnumbers.pop(page, None)
            for title in titles:
                title.attributes.pop("secnumber", None)
            continue
        numbers = env.toc_secnumbers.get(page, {})
        numbers.update({name: number_of(page, number) for name, number in numbers.items()})
        for title in titles:
            if "secnumber" in title:
                title["secnumber"] = number_of(page, title["secnumber"])
    return []


def number_of(page, number):
    numbers = [ChapterNumber(part) for part in number or ()]
    if numbers and (found := re.search(r"_rung_(\d)", page)):
        numbers[-1].rung = " · " + f"Rung {found[1]}"
    return number and tuple(numbers)


class ChapterCard(nodes.Admonition, nodes.Element):
    """How long a chapter takes and what it needs: not what it is about, for link previews."""


def gather_card(app, doctree):
    section = next(doctree.findall(nodes.section), None)
    if section and is_italic(section[1]) and any("</details>" in n.astext() for n in section):
        card = ChapterCard()
        while "</details>" not in section[1].astext():
            card += section.pop(1)
        card += section.pop(1)
        section.insert(1, card)


def is_italic(node):
    return isinstance(node, nodes.paragraph) and isinstance(node[0], nodes.emphasis)


def lead_past_the_tools(app, page, template, context, doctree):
    """*Next* goes from the set-up to the first chapter: what stands between them is looked up."""
    start, first = "notebooks/both_gpus", "notebooks/01_tensors_on_disk"
    ends = {"book/errors": ("prev", None), "book/cheat_sheet": ("next", None)}
    ends |= {start: ("next", first), first: ("prev", start)}
    if page in ends and {start, first} <= app.env.found_docs:
        way, to = ends[page]
        link = to and app.builder.get_relative_uri(page, to)
        context[way] = to and {"link": link, "title": app.env.titles[to].astext()}


def setup(app):
    app.add_node(ChapterCard, html=(lambda self, node: None, lambda self, node: None))
    app.connect("doctree-read", gather_card)
    app.connect("env-get-updated", number_chapters, priority=900)  # after Sphinx has counted them
    app.connect("html-page-context", lead_past_the_tools)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
