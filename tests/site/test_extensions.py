"""What the site's own Sphinx extensions do, each on a small project of its own."""

from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from running import parsed, sphinx

from book._ext import chapter_buttons, code_blocks, tasks
from torchladder.showing import Svg


@pytest.mark.slow
def test_a_picture_is_part_of_the_page_in_the_frame_of_the_figures_of_cells_but_not_in_a_sentence(
    tmp_path,
):
    (tmp_path / "book/figures").mkdir(parents=True)
    picture = tmp_path / "book/figures/box.svg"
    picture.write_text('<svg viewBox="0 0 480 9"><text>First words</text></svg>\n')
    settings, index = {"extensions": ["myst_parser", "book._ext.inline_svg"]}, tmp_path / "index.md"
    index.write_text('# A page\n\nText.\n\n![1 < 2 & "two".](book/figures/box.svg)\n')
    assert sphinx(tmp_path, **settings) == (0, "")
    page = parsed(tmp_path / "_build/index.html")
    figure = page.select_one("section > figure")
    frame = Svg(picture.read_text().strip(), '1 < 2 & "two".')._repr_html_()
    assert figure["class"] == ["torchladder-figure", "mechanism"]
    figure["class"].remove("mechanism")
    assert str(figure) == str(BeautifulSoup(frame, "html.parser"))
    assert not page.select("article img")
    assert not list((tmp_path / "_build").rglob("box.svg"))

    index.write_text("# A page\n\nSee ![this](book/figures/box.svg).\n")
    status, warnings = sphinx(tmp_path, **settings)
    assert status != 0
    assert "index.md:3: WARNING: a picture needs a paragraph of its own" in warnings


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


@pytest.mark.parametrize(
    ("code", "prompt"),
    [
        ('<span class="o">!</span>torchrun a.py\nls\n', "!"),
        ('<span class="o">!</span> torchrun a.py\nls\n', "!"),
        ('<span class="o">!</span><span class="w"> </span>torchrun a.py\n', "!"),
        ('<span class="o">%%writefile</span> a.py\nimport os\n', "%%writefile a.py\n"),
        ('<span class="o">%%writefile</span>\nimport os\n', None),
    ],
)
def test_a_prompt_is_what_only_a_notebook_needs_and_no_word_of_the_command(code, prompt):
    context = {"body": f"<pre><span></span>{code}</pre>"}
    code_blocks.name_folds_and_options(None, "notebooks/09_ddp", None, context, doctree=True)
    page = BeautifulSoup(context["body"], "html.parser")
    assert [each.text for each in page.select(".gp")] == ([prompt] if prompt else [])
    assert page.text == BeautifulSoup(code, "html.parser").text


def cell(output):
    return nodes.container(
        "", nodes.container("", output, nb_element="cell_code_output"), nb_element="cell_code"
    )


def said(text):
    return nodes.paragraph("", text)


def test_the_paragraph_below_an_answer_is_folded_with_it_unless_it_introduces_the_next_cell():
    figure, listed, more = cell(said("drawn")), nodes.bullet_list(), said("More.")
    assert tasks.said_below([said("None."), more])[0].astext() == "None."
    assert len(tasks.said_below([said("None."), more])) == 1
    assert len(tasks.said_below([figure, said("Two:"), listed, more])) == 3
    assert tasks.said_below([said("The next shows:"), figure]) == []
    assert tasks.said_below([figure, nodes.section(), more]) == [figure]
