"""What the site's own Sphinx extensions do, each on a small project of its own."""

import json
from types import SimpleNamespace

import chapter_buttons
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from running import parsed, sphinx

from torchladder.showing import Svg


@pytest.mark.slow
def test_diffs_name_their_files_cells_are_coloured_answers_folded(tmp_path):
    (tmp_path / "one.py").write_text("import torch\n\nx = 1 < 2\n")
    (tmp_path / "two.py").write_text("import torch\n\nx = 2 < 3\n")
    source = "# A page\n\n```{literalinclude} two.py\n:diff: one.py\n```\n\n"
    source += "```diff\n--- one.py\n+++ two.py\n```\n\n"  # as a chapter's cell gives it
    source += "**Predict.** What is printed?"
    printed = new_output("stream", text="nothing")
    loop = new_code_cell("for i in range(3):\n    pass", outputs=[printed], execution_count=1)
    python = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    notebook = new_notebook(cells=[new_markdown_cell(source), loop], metadata=python)
    (tmp_path / "index.ipynb").write_text(json.dumps(notebook))
    extensions = ["myst_nb", "code_blocks"]
    assert sphinx(tmp_path, extensions=extensions, nb_execution_mode="off") == (0, "")
    page = parsed(tmp_path / "_build/index.html")
    assert len(page.select(".highlight-udiff")) == 2
    lines = page.select_one(".highlight-udiff pre").text.splitlines()
    assert lines[:2] == ["--- one.py", "+++ two.py"]
    assert lines[-2:] == ["-x = 1 < 2", "+x = 2 < 3"]
    assert [span.text for span in page.select(".cell_input .k")] == ["for", "pass"]
    assert page.select_one("details.hide .cell_output").text.strip() == "nothing"


@pytest.mark.slow
def test_what_is_missing_or_cannot_be_rendered_fails_the_build(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "book/figures").mkdir(parents=True)
    (tmp_path / "book/figures/box.svg").write_text('<svg viewBox="0 0 480 9"></svg>\n')
    (tmp_path / "index.md").write_text(
        "# A page\n\nSee ![this](book/figures/box.svg).\n\n"
        "```{literalinclude} one.py\n:diff: gone.py\n```\n"
    )
    status, warnings = sphinx(tmp_path, extensions=["myst_parser", "code_blocks", "inline_svg"])
    assert status != 0
    for said in (
        "index.md:3: WARNING: a picture needs a paragraph of its own",
        "index.md:5", "gone.py",
    ):  # fmt: skip
        assert said in warnings


@pytest.mark.slow
def test_a_picture_is_part_of_the_page_in_the_frame_of_the_figures_of_cells(tmp_path):
    (tmp_path / "book/figures").mkdir(parents=True)
    picture = tmp_path / "book/figures/box.svg"
    picture.write_text('<svg viewBox="0 0 480 9"><text>First words</text></svg>\n')
    (tmp_path / "index.md").write_text(
        '# A page\n\nText.\n\n![1 < 2 & "two".](book/figures/box.svg)\n'
    )
    settings = {"extensions": ["myst_parser", "inline_svg"]}
    assert sphinx(tmp_path, **settings) == (0, "")
    page = parsed(tmp_path / "_build/index.html")
    figure = page.select_one("section > figure")
    frame = Svg(picture.read_text().strip(), '1 < 2 & "two".')._repr_html_()
    assert figure["class"] == ["torchladder-figure", "mechanism"]
    figure["class"].remove("mechanism")
    assert str(figure) == str(BeautifulSoup(frame, "html.parser"))
    assert not page.select("article img")
    assert not list((tmp_path / "_build").rglob("box.svg"))

    # The page was not touched, and is built again.
    picture.write_text(picture.read_text().replace("First", "Second"))
    assert sphinx(tmp_path, **settings) == (0, "")
    assert "Second words" in (tmp_path / "_build/index.html").read_text()


@pytest.mark.parametrize(
    ("repository", "address"),
    [
        ("https://github.com/someone/book", "someone/book/blob/gh-pages/hosted/a.ipynb"),
        ("https://github.com/someone/book.git/", "someone/book/blob/gh-pages/hosted/a.ipynb"),
        ("https://gitlab.com/someone/book", None),
        ("", None),
    ],
)
def test_kaggle_and_colab_fetch_from_github_and_from_nowhere_else(repository, address):
    options = {"repository_url": repository} if repository else {}
    config = SimpleNamespace(html_theme_options=options, published_branch="gh-pages")
    context = {"pathto": lambda path, resource=False: path, "sourcename": "a", "body": "<h1></h1>"}
    app = SimpleNamespace(config=config, env=SimpleNamespace(found_docs={"book/hosted"}))
    chapter_buttons.add_buttons(app, "notebooks/a", None, context, doctree=True)
    links = [link["href"] for link in BeautifulSoup(context["body"], "html.parser").select("a")]
    fetching = {
        f"https://kaggle.com/kernels/welcome?src=https://github.com/{address}",
        f"https://colab.research.google.com/github/{address}",
    }
    assert {link for link in links if "someone" in link} == (fetching if address else set())
    assert ("https://colab.research.google.com" in links) == (not address)  # where to upload it
