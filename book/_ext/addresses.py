"""Where the book is published, and links to its repository if there is one."""

import tomllib
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


def setup(app):
    app.add_role("repository", Repository())
    app.connect("config-inited", read_addresses, priority=100)  # before those who ask for them
    return {"parallel_read_safe": True, "parallel_write_safe": True}
