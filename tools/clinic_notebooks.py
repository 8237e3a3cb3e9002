"""Write the notebooks of the error clinic from the catalogue, ``src/torchclinic/catalogue``.

``make refresh`` calls this before it runs them, and then renews the chapters' tables of errors; a
test fails if one of them differs from the catalogue.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat

from torchclinic import errors
from torchclinic.errors import Error, catalogue

HEAD = errors.page("pages")
PARTS = HEAD["parts"]  # the notebooks
TORCH = HEAD["torch"]  # the version whose source is quoted where no cell can raise an error

NEEDS = ("cpu", "2 processes", "gpu", "2 gpus", "elsewhere")
FOLDED = {  # as the chapters' set-up is
    "jupyter": {"source_hidden": True},
    "mystnb": {
        "code_prompt_hide": "Hide the imports and set-up",
        "code_prompt_show": "Show the imports and set-up",
    },
    "tags": ["hide-input"],
}
TABLE = re.compile(r'errors\.of_chapter\("(\w+)"\)')
CODE = re.compile(r"""[\w./"]*(?:\.[A-Za-z]|_|\(\)|[a-z]=)[^\s,:]*(?: == \S+)?""")  # in a title
GITHUB = re.compile(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull|discussions)/(\d+)")


def clinic_notebook(part: str) -> nbformat.NotebookNode:
    """The notebook of one part of the catalogue, without outputs."""
    about = errors.page(part)
    setup = code(about["setup"])
    setup.metadata = FOLDED
    sections = {part: [markdown(f"# {about['title']}", HEAD["opening"]), setup]}
    sections |= {error.id: entry(error) for error in catalogue().values() if error.part == part}
    for name, cells in sections.items():
        for number, cell in enumerate(cells):
            cell.id = f"{name}-{number}"  # so a new entry changes no other one
    return nbformat.v4.new_notebook(cells=[cell for cells in sections.values() for cell in cells])


def with_new_tables(chapters: Iterable[Path]) -> Iterator[tuple[Path, nbformat.NotebookNode]]:
    """The chapters whose stored table of errors differs from the catalogue, with the right one."""
    for path in chapters:
        book: Any = nbformat.read(path, as_version=4)
        stale = False
        for cell in book.cells:
            if cell.cell_type == "code" and (asked := TABLE.search(cell.source)):
                table = errors.of_chapter(asked[1])
                data = {"text/markdown": table._repr_markdown_(), "text/plain": repr(table)}
                stale |= cell.outputs[0].data != data
                cell.outputs[0].data = data
        if stale:
            yield path, book


def entry(error: Error) -> list[nbformat.NotebookNode]:
    """The message, why, what to do, and folded, code that fails and code that works."""
    quoted = error.quoted and (
        f"Not raised here. PyTorch {TORCH} has in `{error.source}`:",
        f"```text\n{error.quoted.strip()}\n```",
    )
    avoid = error.avoid and f"**Avoid it.** {error.avoid.strip()}"
    versions = error.versions and f"**Versions.** {error.versions.strip()}"
    links = [*map(chapter_link, error.chapters), *map(thread_link, error.threads)]
    read_on = links and f"**Read on.** {', '.join(links)}."
    shows = "that fails" if error.raises else "that shows it"
    tags = ["raises-exception"] * (error.raises and error.kind in ("error", "follows"))
    cells = [
        markdown(f"## {heading(error.title)}", error.message),
        markdown(*quoted),
        markdown(f"**Why.** {error.cause.strip()}", f"**Do.** {error.fix.strip()}"),
        markdown(error.stand_in),
        folded(error.fails, shows, *tags),
        folded(error.works, "that works"),
        markdown(avoid, versions, read_on or ""),
    ]
    return [cell for cell in cells if cell.source]


def heading(title: str) -> str:
    """A title as Markdown, which takes the underscores of bare code for emphasis."""
    return CODE.sub(r"`\g<0>`", title)


def chapter_link(chapter: str) -> str:
    page, _, anchor = chapter.partition("#")
    return f"[chapter {page[:2]}]({page}.ipynb{'#' + anchor if anchor else ''})"


def thread_link(address: str) -> str:
    if of_github := GITHUB.fullmatch(address):
        return f"[{of_github[1]}#{of_github[2]}]({address})"
    return f"[{address.split('/')[2]}]({address})"


def markdown(*paragraphs: str) -> nbformat.NotebookNode:
    text = "\n\n".join(paragraph.strip() for paragraph in paragraphs if paragraph.strip())
    return nbformat.v4.new_markdown_cell(text)


def folded(source: str, what: str, *tags: str) -> nbformat.NotebookNode:
    cell = code(source, "hide-cell", *tags)
    prompts = {"code_prompt_show": f"Show code {what}", "code_prompt_hide": f"Hide code {what}"}
    cell.metadata["mystnb"] = prompts
    return cell


def code(source: str, *tags: str) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell(source.strip())
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell
