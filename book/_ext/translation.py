"""The words that the site's own extensions add to a page, in the language of the edition.

Every such word goes through `_`, for which Sphinx reads the catalogue ``extensions`` in
``locales/<language>/LC_MESSAGES``. ``make gettext`` collects the words.
"""

from pathlib import Path

from sphinx.locale import get_translation
from sphinx.util.i18n import CatalogRepository

CATALOGUE = "extensions"
_ = get_translation(CATALOGUE)


def setup(app):
    language = app.config.language
    # Sphinx compiles the catalogues of pages when it builds, which is too late for this one.
    for catalogue in CatalogRepository(app.srcdir, ["locales"], language, "utf-8").catalogs:
        if catalogue.domain == CATALOGUE and catalogue.is_outdated():
            catalogue.write_mo(language)
    app.add_message_catalog(CATALOGUE, str(Path(app.srcdir, "locales")))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
