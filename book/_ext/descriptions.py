"""What a page is about: for search engines, previews and other programs."""

from html import escape
from pathlib import Path

from docutils import nodes


def describe(app, pagename, templatename, context, doctree):
    """Describe the pages that have no text, for search engines."""
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


def setup(app):
    app.connect("doctree-read", keep_description)
    app.connect("html-page-context", describe)
    app.connect("build-finished", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
