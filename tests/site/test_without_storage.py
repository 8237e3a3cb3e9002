"""The site where a browser keeps nothing for it: site data blocked, full, or not there at all."""

import pytest
from test_browser import KINDS

ERROR = "ValueError: optimizer got an empty parameter list"
ENTRY = "#found a[href$='errors_training.html#empty-parameters']"
REFUSE = "Object.defineProperty(window, '%sStorage', {get() { %s }, configurable: true});"
WAYS = {
    way: "".join(REFUSE % (name, what) for name in ("local", "session"))
    for way, what in {
        "blocked": "throw new DOMException('Access is denied', 'SecurityError')",
        "null": "return null",
    }.items()
}
FULL = "throw new DOMException('The quota has been exceeded', 'QuotaExceededError')"
WAYS["full"] = f"Storage.prototype.setItem = () => {{ {FULL}; }}"

pytestmark = pytest.mark.slow


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def root(way, site, address):
    """Where the site is, with a slash at the end."""
    return f"{site.as_uri()}/" if way == "null" else address


@pytest.fixture
def refused(browser, way):
    """A page without storage, and what goes wrong in it."""
    context = browser.new_context(reduced_motion="reduce")
    context.add_init_script(WAYS[way])
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and page.errors.append(said.text))
    yield page
    context.close()


def hits(page):
    page.locator(".search-hits a").first.wait_for()
    return page.locator(".search-hits a").evaluate_all("all => all.map((link) => link.href)")


def test_a_page_of_each_kind_throws_nothing_and_its_buttons_work(refused, root):
    for name in KINDS:
        refused.goto(root + name)
        refused.evaluate("new Promise((done) => setTimeout(done, 100))")
        assert refused.errors == [], name
    refused.goto(root + "notebooks/03_devices.html")
    themes = set()
    for _ in range(3):
        refused.locator(".theme-switch-button").first.click()
        themes.add(refused.evaluate("document.documentElement.dataset.mode"))
    assert themes == {"light", "dark", "auto"}
    refused.goto(root + "book/glossary.html")  # away from a page, which the theme takes note of
    assert refused.errors == []


def test_the_search_finds_what_it_finds_with_storage(refused, root, browser):
    query = "DataLoader workers"
    usual = browser.new_page()
    usual.goto(f"{root}search.html?q={query}")
    refused.goto(f"{root}search.html?q={query}")
    found = hits(refused)
    assert len(found) > 10
    assert found == hits(usual)
    for page in (usual, refused):
        page.goto(f"{root}index.html")
        page.keyboard.press("Control+k")
        page.keyboard.insert_text(query)  # at once: no hits of a part of it
    assert hits(refused) == hits(usual)
    assert refused.errors == []
    usual.close()


def test_a_log_that_is_pasted_on_the_first_page_is_answered(refused, root):
    refused.goto(f"{root}index.html")
    refused.fill("#paste", ERROR)
    refused.get_by_role("button", name="Explain").click()
    refused.wait_for_selector(ENTRY)
    assert refused.input_value("#log") == ERROR
    refused.reload()
    assert refused.input_value("#log") == ""
    assert refused.errors == []
