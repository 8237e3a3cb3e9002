"""Small things that Jupyter Book and its theme leave out of the pages."""

import hashlib
import re
import tomllib
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.util.docutils import SphinxRole


def read_addresses(app, config):
    """Where the book is published: ``[project.urls]`` of pyproject.toml, and nothing else, says so.

    Without an address the site works as well, and makes none up.
    """
    file = Path(app.srcdir, "pyproject.toml")
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.exists() else {}
    urls = {name: url.rstrip("/") for name, url in project.get("urls", {}).items()}
    if repository := urls.get("Repository"):
        config.html_theme_options |= {"repository_url": repository, "use_repository_button": True}
        app.tags.add("repository")  # for Sphinx's `only`
    config.ogp_site_name = config.html_title
    if site := urls.get("Documentation"):
        config.html_baseurl = config.ogp_site_url = f"{site}/"
    # The page for dead links may be asked for at any depth: its own links begin at the top.
    config.notfound_urls_prefix = urlsplit(config.html_baseurl).path or "/"


class Repository(SphinxRole):
    """Words that link to the repository where there is one."""

    def run(self):
        address = self.config.html_theme_options.get("repository_url")
        if not address:
            return [nodes.Text(self.text)], []
        return [nodes.reference("", self.text, refuri=address)], []


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


def add_files(app, page, template, context, doctree):
    """The scripts and style sheets that a page's front matter lists as its ``files``."""
    for file in app.env.metadata[page].get("files", "").split() if doctree else ():
        if file.endswith(".css"):
            app.add_css_file(file)
        else:
            app.add_js_file(file, loading_method="defer")


def lead_past_the_tools(app, page, template, context, doctree):
    """*Next* goes from the set-up to the first chapter: what stands between them is looked up."""
    start, first = "notebooks/both_gpus", "notebooks/01_tensors_on_disk"
    ends = {"book/errors": ("prev", None), "book/cheat_sheet": ("next", None)}
    ends |= {start: ("next", first), first: ("prev", start)}
    if page in ends and {start, first} <= app.env.found_docs:
        way, to = ends[page]
        link = to and app.builder.get_relative_uri(page, to)
        context[way] = to and {"link": link, "title": app.env.titles[to].astext()}


def describe(app, pagename, templatename, context, doctree):
    """Describe the pages that have no text, for search engines. The theme says the viewport."""
    context["metatags"] = re.sub(r'<meta name="viewport".*?>', "", context.get("metatags", ""))
    if '"description"' not in context.get("metatags", ""):
        add_description(context, f"A page of {app.config.html_title}: {pagename}")


def add_description(context, text):
    content = escape(text[:300], quote=True)
    context["metatags"] = context.get("metatags", "") + (
        f'\n<meta name="description" content="{content}">\n'
    )


def keep_description(app, doctree):
    for meta in doctree.findall(nodes.meta):
        app.env.metadata[app.env.docname][meta.get("name")] = meta["content"]


def list_pages(app, exception):
    """``llms.txt``, as https://llmstxt.org has it: for programs, the book and each of its pages."""
    if exception is None and app.builder.name == "html":
        pages, told = [app.config.root_doc], app.env.metadata
        for page in pages:  # which grows
            pages += app.env.toctree_includes.get(page, [])
        lines = [f"# {app.config.html_title}", f"> {told[pages[0]].get('description', '')}", ""]
        for page in pages:
            link = f"- [{app.env.titles[page].astext()}]({app.builder.get_target_uri(page)})"
            lines += [": ".join(filter(None, [link, told[page].get("description")]))]
        Path(app.outdir, "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def colour_at_once(app, exception):
    """A page says ``auto``, which has no colours until the theme's script comes, or none does."""
    dark = '(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")'
    if exception is None and app.builder.name == "html":
        for file in Path(app.outdir).rglob("*.html"):
            text = file.read_text("utf-8")
            if 'data-theme="auto"' in text:
                text = text.replace('data-theme="auto"', 'data-theme="light"', 1)
                chosen = 'localStorage.getItem("theme") || '
                file.write_text(text.replace(f'{chosen}"auto"', chosen + dark, 1), "utf-8")


def define_terms(app, page, template, context, doctree):
    """A link into the glossary brings its definition along: torchladder.js shows it."""
    if doctree:
        context["body"] = re.sub(
            r'(href="[^"]*\bglossary\.html#([\w-]+)")(?=>)',
            lambda link: f'{link[1]} aria-description="{definitions(app.env).get(link[2], "")}"',
            # In docutils' list of references each has a role that a list may not hold.
            context["body"].replace('role="doc-biblioentry"', 'role="listitem"'),
        )


@cache
def definitions(env):
    """The first paragraph of each term, by its anchor."""
    sections = env.get_doctree("book/glossary").findall(nodes.section)
    told = {part["ids"][0]: part.next_node(nodes.paragraph).astext() for part in sections}
    return {name: escape(" ".join(text.split())) for name, text in told.items()}


def digest_of_looks():
    """Changes whenever an extension or a file of the site's own looks changes."""
    root = Path(__file__).parents[2]
    # Sphinx notices a change in only one of the two files of a diff: hence rungs/;
    # and no change of what the numbers of book/_ext/measured.py come from.
    numbers = ("src/torchclinic/will_it_fit.py", "book/will_it_fit.md", "benchmarks/measured_by*")
    looks = ("book/_ext/*.*", "book/_static/*", "book/_templates/*.html", "book/figures/*.html")
    parts = (*looks, "book/search/*", "rungs/*.py", *numbers)
    files = sorted(file for part in parts for file in root.glob(part))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def setup(app):
    # Sphinx rebuilds pages only for changes in their own text, or in a setting such as this one.
    app.add_config_value("digest_of_looks", digest_of_looks(), "env", str)
    app.add_role("repository", Repository())
    app.add_node(ChapterCard, html=(lambda self, node: None, lambda self, node: None))
    app.connect("config-inited", read_addresses, priority=100)  # before those who ask for them
    app.connect("env-get-updated", number_chapters, priority=900)  # after Sphinx has counted them
    for change in (add_files, describe, define_terms, lead_past_the_tools):
        app.connect("html-page-context", change)
    app.connect("doctree-read", gather_card)
    app.connect("doctree-read", keep_description)
    app.connect("build-finished", list_pages)
    app.connect("build-finished", colour_at_once)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
