"""What the site's own Sphinx extensions do, each on a small project of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chapter_buttons
import pytest
import yaml
from bs4 import BeautifulSoup

from torchladder.showing import Svg

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "book" / "_ext"


def sphinx(folder, **settings):
    """Build the few files in `folder` as a site of its own; the exit status and the warnings."""
    settings |= {"html_math_renderer": "mathml", "html_theme": "sphinx_book_theme"}
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    (folder / "conf.py").write_text("\n".join(lines))
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", folder, folder / "_build"],
        env=os.environ | {"PYTHONPATH": str(EXTENSIONS)},
        capture_output=True,
        text=True,
    )
    return build.returncode, build.stderr


@pytest.mark.slow
def test_a_diff_names_its_files_without_this_machines_folders(tmp_path):
    (tmp_path / "one.py").write_text("import torch\n\nx = 1 < 2\n")
    (tmp_path / "two.py").write_text("import torch\n\nx = 2 < 3\n")
    (tmp_path / "index.rst").write_text(
        "A page\n======\n\n.. literalinclude:: two.py\n   :diff: one.py\n\n"
        ".. code-block:: diff\n\n   --- one.py\n   +++ two.py\n"  # as a chapter's cell gives it
    )
    assert sphinx(tmp_path, extensions=["code_blocks", "mathml"]) == (0, "")
    page = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser")
    assert len(page.select(".highlight-udiff")) == 2
    lines = page.select_one(".highlight-udiff pre").text.splitlines()
    assert lines[:2] == ["--- one.py", "+++ two.py"]
    assert lines[-2:] == ["-x = 1 < 2", "+x = 2 < 3"]


@pytest.mark.slow
def test_a_diff_of_a_missing_file_and_a_broken_formula_fail_the_build(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "index.rst").write_text(
        "A page\n======\n\n.. literalinclude:: one.py\n   :diff: gone.py\n\n"
        ":math:`\\nosuchcommand` and :math:`\\frac{1}`\n"
    )
    status, warnings = sphinx(tmp_path, extensions=["code_blocks", "mathml"])
    assert status != 0
    for said in ("index.rst:4", "gone.py", "unknown command \\nosuchcommand", "mfrac of 1 parts"):
        assert said in warnings


@pytest.mark.slow
def test_formulas_become_mathml_cells_are_coloured_and_answers_folded(tmp_path):
    source = "# A page\n\n$\\sqrt{\\alpha^2}$\n\n**Predict.** What is printed?"
    output = {"output_type": "stream", "name": "stdout", "text": "nothing"}
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": source},
        {
            "cell_type": "code",
            "metadata": {},
            "source": "for i in range(3):\n    pass",
            "outputs": [output],
            "execution_count": 1,
        },
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "index.ipynb").write_text(json.dumps(notebook))
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    settings = {key: config[key] for key in ("suppress_warnings", "nb_ipywidgets_js")}
    settings |= {"nb_execution_mode": "off", "myst_enable_extensions": ["dollarmath"]}
    extensions = ["myst_nb", "translation", "code_blocks", "mathml"]
    assert sphinx(tmp_path, extensions=extensions, **settings) == (0, "")
    page = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser")
    assert page.select_one("math msqrt msup").text == "α2"
    # The root is at least as high as a line of text: its bar touches no letter.
    assert page.select_one("msqrt > mspace")["height"] == "0.9em"
    assert [span.text for span in page.select(".cell_input .k")] == ["for", "pass"]
    assert page.select_one("details.hide .cell_output").text.strip() == "nothing"


@pytest.fixture
def picture(tmp_path):
    """A picture of a small project, and the page that shows it."""
    (tmp_path / "book/figures").mkdir(parents=True)
    file = tmp_path / "book/figures/box.svg"
    file.write_text('<svg viewBox="0 0 480 9"><text>First words</text></svg>\n')
    page = '# A page\n\nText.\n\n![1 < 2 & "two".](book/figures/box.svg)\n'
    (tmp_path / "index.md").write_text(page)
    return file


@pytest.mark.slow
def test_a_picture_is_part_of_the_page_in_the_frame_of_the_figures_of_cells(picture, tmp_path):
    extensions = ["myst_parser", "mathml", "inline_svg"]
    assert sphinx(tmp_path, extensions=extensions) == (0, "")
    page = BeautifulSoup((tmp_path / "_build/index.html").read_bytes(), "html.parser")
    figure = page.select_one("section > figure")
    frame = Svg(picture.read_text().strip(), '1 < 2 & "two".')._repr_html_()
    assert figure["class"] == ["torchladder-figure", "mechanism"]
    figure["class"].remove("mechanism")
    assert str(figure) == str(BeautifulSoup(frame, "html.parser"))
    assert not page.select("article img")
    assert not list((tmp_path / "_build").rglob("box.svg"))
    assert re.search(r"\bfirst\b", (tmp_path / "_build/searchindex.js").read_text())

    # The page was not touched, and is built again.
    picture.write_text(picture.read_text().replace("First", "Second"))
    assert sphinx(tmp_path, extensions=extensions) == (0, "")
    assert "Second words" in (tmp_path / "_build/index.html").read_text()


@pytest.mark.slow
def test_a_picture_within_a_sentence_and_one_that_is_missing_fail_the_build(picture, tmp_path):
    (tmp_path / "index.md").write_text(
        "# A page\n\nSee ![this](book/figures/box.svg).\n\n![that](book/figures/gone.svg)\n"
    )
    status, warnings = sphinx(tmp_path, extensions=["myst_parser", "mathml", "inline_svg"])
    assert status != 0
    assert "index.md:3: WARNING: a picture needs a paragraph of its own" in warnings
    assert "image file not readable: book/figures/gone.svg" in warnings


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
    app = SimpleNamespace(config=config)
    chapter_buttons.add_buttons(app, "notebooks/a", None, context, doctree=True)
    links = [link["href"] for link in BeautifulSoup(context["body"], "html.parser").select("a")]
    fetching = {
        f"https://kaggle.com/kernels/welcome?src=https://github.com/{address}",
        f"https://colab.research.google.com/github/{address}",
    }
    assert {link for link in links if "someone" in link} == (fetching if address else set())
    assert ("https://colab.research.google.com" in links) == (not address)  # where to upload it
