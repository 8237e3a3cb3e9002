"""The words that the site's own extensions add to a page, in the language of the edition.

Every such word goes through `_`, for which Sphinx reads the catalogue ``extensions`` in
``locales/<language>/LC_MESSAGES``. ``make gettext`` collects the words; it does not see a call of
`_` inside an f-string.
"""

from pathlib import Path

from sphinx.addnodes import toctree
from sphinx.locale import get_translation
from sphinx.util.i18n import CatalogRepository

_ = get_translation("extensions")


def translate_contents(app, doctree):
    """sphinx_external_toc brings the names of the parts when Sphinx has translated the page."""
    for node in doctree.findall(toctree):
        if node.get("caption"):
            node["caption"] = get_translation("book")(node["caption"])


def setup(app):
    language = app.config.language
    # Sphinx compiles the catalogues of pages when it builds, which is too late for these.
    for catalogue in CatalogRepository(app.srcdir, ["locales"], language, "utf-8").catalogs:
        if catalogue.is_outdated():
            catalogue.write_mo(language)
    for name in ("extensions", "book"):
        app.add_message_catalog(name, str(Path(app.srcdir, "locales")))
    # After the contents were added to the page, before they are collected for the sidebar.
    app.connect("doctree-read", translate_contents, priority=200)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
