"""Links within the site lead somewhere."""

from urllib.parse import unquote, urldefrag, urlsplit

import pytest

# Of HTML and of SVG.
ATTRIBUTES = ("href", "src", "xlink:href", "action", "poster", "data")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def anchors(pages):
    return {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}


def targets(page):
    for attribute in ATTRIBUTES:
        for tag in page.find_all(attrs={attribute: True}):
            yield tag[attribute]
    for tag in page.find_all("meta", {"http-equiv": "refresh"}):
        yield tag["content"].partition("url=")[2]


def leads_nowhere(site, anchors, name, target, root="/"):
    address, anchor = urldefrag(target)
    if urlsplit(address).scheme or address.startswith("//"):
        return False
    path = unquote(urlsplit(address).path)
    top = site if path.startswith("/") else (site / name).parent
    file = (top / path.removeprefix(root).lstrip("/")).resolve() if path else site / name
    if not file.is_file():
        return True
    known = anchors.get(file.relative_to(site).as_posix(), set())
    return bool(anchor) and file.suffix == ".html" and unquote(anchor) not in known


def test_every_internal_link_and_anchor_resolves(site, pages, anchors):
    root = pages["404.html"].html["data-content_root"]  # where the site is on its host
    broken = [
        f"{name}: {target}"
        for name, page in pages.items()
        for target in targets(page)
        if leads_nowhere(site, anchors, name, target, root)
    ]
    assert broken == []


def test_only_the_page_for_dead_links_has_addresses_from_the_top(pages):
    from_top = {name for name, page in pages.items() for link in targets(page) if link[:1] == "/"}
    assert from_top == {"404.html"}
