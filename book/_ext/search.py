"""The search: an index of sections, and the page and the dialog that show what it finds.

``search_index.js`` holds the text of every section, and search.js looks through it. Sphinx's own
index knows pages and stems only. The index is a script, since a page that is opened as a file may
not read another file; a browser loads it when somebody is about to search. Recorded runs repeat the
chapters and are left out, as are tables of errors: each error has an entry.

``asked.tsv`` of the catalogue has what people ask, in their words and languages, with the section
that answers: it is found by them. ``also.tsv`` has as what a word stands in the book.
"""

import csv
import json
import re
from html import unescape
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import only, pending_xref, toctree

INDEX = "search_index.js"
ASKED = Path(__file__).parents[2] / "src/torchclinic/catalogue/asked.tsv"
ALSO = ASKED.with_name("also.tsv")
TEXTS = (nodes.paragraph, nodes.math_block, nodes.title, nodes.rubric)
NO_TEXT = (nodes.section, nodes.comment, toctree)
# What a section counts by its page and anchor, the first that fits: some repeat what others say.
WEIGHTS = {
    r"index|book/(api|cheat_sheet|glossary|where_it)|.*#(exercise|summary|next|tidy|all-err)": 0.5,
    r"book/errors#(?!i-have|there-is)": 0.3,  # a group of errors
    r".*/\d\d_rung_": 1.1,
    r".*/errors_": 1.05,
    "": 1,
}
# What the calculators answer at first, for a model that nobody asked for, and what says too little
UNASKED = {"answer", "speed-sent", "memory-table", "speed-table", "serving-says", "serving-table"}
UNASKED |= {"error-index", "minutes"}
# What %load_ext torchclinic writes; how long a chapter takes
UNASKED_TEXT = re.compile("Why, and what to do: |.* to run, .* minutes to read")
# Not to be read, or drawn
HIDDEN = re.compile(r"(?s)<(style|script|svg|select|span(?= data-phrase))\b.*?</\1>|<[^>]*>")
SAID = re.compile(r"(?m)^[A-Za-z_][\w.]*: ")
# Where a search that finds nothing leads, and a dead link
ELSEWHERE = {
    "The chapters and their questions": ("index", "#the-chapters-and-their-questions"),
    "I have an error": ("book/errors", ""),
    "Glossary": ("book/glossary", ""),
}
# What search.js says, with gaps.
WORDS = {
    "empty": "Words, a name from the code, or the message of an error. For example:",
    "examples": "resume with fewer gpus|find_unused_parameters|fsdp vs ddp|two gpus no faster",
    "some": "Found in {count} sections, the best first.",
    "many": "The {most} best sections.",
    "part": "No section has all of these words; with some of them: {count}, the best first.",
    "none": "Nothing has the words “{query}”.",
    "meant": "Nothing has the words “{query}”. This is what has “{meant}”.",
    "fewer": "Try fewer words, or other ones.",
    "paste": "Is it an error? Then {box}: it also knows messages of which parts differ.",
    "box": "paste it, or your whole log, into the error clinic",
    "keys": "Enter opens the first, ↑ and ↓ choose.",
    "all": "All {count} sections",
    "rest": "More",
    "known": "the error clinic knows this message",
    "best": "Best",
    "chapters": "Chapters",
    "errors": "Errors",
    "glossary": "Glossary",
    "tools": "Tools and other pages",
}


def sections(app):
    """For each page its address, its title, and of each section heading, anchor and text."""
    asked = questions()
    for page in sorted(app.env.found_docs - {"search"}):
        if page.startswith("book/runs/") or page not in app.env.titles:
            continue
        document = app.env.get_doctree(page)
        chapter = app.env.toc_secnumbers.get(page, {}).get("", ())
        title = " ".join([*map(str, chapter), app.env.titles[page].astext()])
        found = [
            [
                section.next_node(nodes.title).astext(),
                section["ids"][0],
                weight(f"{page}#{section['ids'][0]}"),
                "\f".join(filter(None, blocks(section, app))) or parts_of(section),
                asked.pop(f"{page}#{section['ids'][0]}", []) + (number == 0) * asked.pop(page, []),
            ]
            for number, section in enumerate(document.findall(nodes.section))
        ]
        yield app.builder.get_target_uri(page), title, found


def parts_of(section):
    """What a section that has no text of its own is divided into."""
    return " · ".join(part[0].astext() for part in section if isinstance(part, nodes.section))


def questions():
    """What is asked, by the section that answers best."""
    asked = {}
    for question, targets in rows(ASKED):
        asked.setdefault(targets.split()[0], []).append(question)
    return asked


def rows(file):
    with open(file, encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]


def weight(address):
    return next(weight for pattern, weight in WEIGHTS.items() if re.match(pattern, address))


def blocks(node, app):
    """The paragraphs and blocks of code under a node, less its own title and its subsections."""
    for child in node.children:
        if not isinstance(child, nodes.Element) or isinstance(child, NO_TEXT):
            continue
        if isinstance(child, only) and not app.tags.eval_condition(child["expr"]):
            continue
        if isinstance(child, nodes.title) and isinstance(node, nodes.section):
            continue
        if UNASKED_TEXT.match(child.astext()):
            continue
        if UNASKED & {*child["classes"]} or child.get("language") == "udiff":
            continue
        if node.get("hide_mode") == "input" and child.get("nb_element") == "cell_code_source":
            continue
        if isinstance(child, nodes.raw):
            html = child.astext() * (child["format"] == "html")
            # A table, and the names of fields, are no prose: shown if nothing else has the words.
            prefix = "\t" * bool(re.search("<(table|label)", html))
            yield prefix + text if (text := words(unescape(HIDDEN.sub(" ", html)))) else ""
        elif isinstance(child, nodes.image):
            yield words(child.get("alt", ""))
        elif isinstance(child, nodes.literal_block):
            yield code(child)
        elif isinstance(child, TEXTS):
            yield seen(child)
        elif isinstance(child, nodes.row):
            yield " · ".join(map(seen, child))
        elif child.get("nb_element") == "mime_bundle":
            yield from blocks(next((c for c in child if "html" in c["mime_type"]), child[0]), app)
        elif not is_table_of_errors(child):
            yield from blocks(child, app)


def is_table_of_errors(node):
    return isinstance(node, nodes.table) and any(
        "errors_" in link.get("reftarget", "") for link in node.findall(pending_xref)
    )


def seen(node):
    """What is read of a node, without the tags that stand in its text."""
    within = any(node.findall(nodes.raw))
    return words(HIDDEN.sub("", node.astext()) if within else node.astext())


def words(text):
    return " ".join(text.split())


def code(block):
    """With a tab in front, line by line; of a traceback what the error says."""
    text = block.astext()
    if "traceback" in block["classes"] and (said := SAID.search(text)):
        text = text[said.start() :]
    return "\t" + "\n".join(
        re.sub(r"(?<=\S)\s+", " ", line.rstrip()) for line in text.splitlines() if line.strip()
    )


def write_index(app, exception):
    """As a script; the words that search.js puts around what it finds come with it."""
    if exception is None and app.builder.name == "html":
        also = {word: others.split(", ") for word, others in rows(ALSO)}
        elsewhere = [
            [says, app.builder.get_target_uri(page) + anchor]
            for says, (page, anchor) in ELSEWHERE.items()
            if page in app.env.found_docs
        ]
        index = {"words": WORDS, "also": also, "elsewhere": elsewhere}
        index["pages"] = list(sections(app))
        text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
        Path(app.outdir, "_static", INDEX).write_text(f"const searchIndex = {text};\n", "utf-8")


def without_sphinx(app):
    """No index of Sphinx's own, which takes longer to make than this one."""
    if app.builder.name == "html":
        app.builder.search = False
        app.config.html_context["elsewhere"] = ELSEWHERE
        app.config.html_additional_pages |= {"search": "search.html"}


def setup(app):
    app.add_js_file("search.js", loading_method="defer")
    app.add_css_file("search.css")
    app.connect("builder-inited", without_sphinx)
    app.connect("build-finished", write_index)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
