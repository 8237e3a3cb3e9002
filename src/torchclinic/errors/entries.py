"""The catalogue: what each error says, why it happens, what to do, and the code that shows both."""

import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from torchclinic.errors.terminal import block, filled, wrapped

CATALOGUE = Path(__file__).parents[1] / "catalogue"
# Of the book, in a clone of it; a chapter that runs alone, as on Kaggle, has none beside it.
NOTEBOOKS = CATALOGUE.parents[2] / "notebooks"
# What is shown first: an error, or what a log says of an error that has no message (silent); then
# what follows from an error elsewhere; then warnings.
KINDS = {"error": 0, "silent": 0, "follows": 1, "warning": 2}


@dataclass(frozen=True)
class Error:
    """An entry of the catalogue; texts are Markdown. ``pages.toml`` says what each field holds."""

    id: str
    part: str
    title: str
    message: str
    cause: str
    fix: str
    needs: str = "cpu"
    kind: str = "error"
    patterns: list[str] = field(default_factory=list)
    unless: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    fails: str = ""
    works: str = ""
    raises: bool = True
    stand_in: str = ""
    quoted: str = ""
    source: str = ""
    avoid: str = ""
    versions: str = ""
    chapters: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)

    @property
    def page(self) -> str:
        """The entry's place in the error clinic, without the suffix of the page."""
        return f"errors_{self.part}"

    @property
    def in_brief(self) -> tuple[str, str]:
        """The first sentences of the cause and of the fix, which tables show."""
        sentences = re.compile(r"(?<=[.!?])\s")
        return sentences.split(self.cause.strip())[0], sentences.split(self.fix.strip())[0]

    @property
    def heading(self) -> str:
        """What a terminal shows above what it says of the entry."""
        return wrapped(f"{self.id}: {self.title}")

    def __str__(self) -> str:
        links = [f"{self.page}#{self.id}", *self.chapters]
        links = [*(published(link) or link for link in links), *self.threads]
        parts = [
            self.heading,
            wrapped(self.message.replace("`", "")),
            block(f"In {self.source}:", self.quoted),
            filled("Why:", self.cause),
            filled("Do:", self.fix),
            filled("Avoid it:", self.avoid),
            filled("Versions:", self.versions),
            block("Read on:", "\n".join(links)),
        ]
        return "\n\n".join(filter(None, parts))


@cache
def catalogue() -> dict[str, Error]:
    """All entries by id, in the order of the clinic's pages."""
    pages = {part: page(part)["error"] for part in page("pages")["parts"]}
    return {entry["id"]: Error(part=part, **entry) for part in pages for entry in pages[part]}


@cache
def page(name: str) -> dict:
    """A file of the catalogue, such as ``pages``, or one of the `parts` that it names."""
    text = (CATALOGUE / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def published(link: str) -> str:
    """The address on the web of ``notebook#anchor``, if the installed package says where."""
    with suppress(PackageNotFoundError):
        for url in metadata("torchladder").get_all("Project-URL", []):
            name, address = url.split(", ", 1)
            if name == "Documentation":
                page, hash_sign, anchor = link.partition("#")
                return f"{address.rstrip('/')}/notebooks/{page}.html{hash_sign}{anchor}"
    return ""


@dataclass(frozen=True)
class ErrorTable:
    """Some entries; a table in Markdown, and in a terminal a line for each."""

    errors: list[Error]

    def __repr__(self) -> str:
        return "\n".join(f"{e.id}: {e.message}".replace("`", "") for e in self.errors)

    def _repr_markdown_(self) -> str:
        rows = ["| message | it means | do this |", "| --- | --- | --- |"]
        for error in self.errors:
            here = f"{error.page}.ipynb#{error.id}"
            address = here if NOTEBOOKS.is_dir() else published(f"{error.page}#{error.id}")
            linked = f"[{error.message}]({address})" if address else error.message
            cells = [cell.replace("|", r"\|") for cell in (linked, *error.in_brief)]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(" ".join(row.split()) for row in rows)


def of_chapter(name: str) -> ErrorTable:
    """The entries that lead to a chapter, such as ``'inside_ddp'``, in the catalogue's order."""
    titles = re.compile(rf"\d\d_{name}(#|$)")
    return ErrorTable([e for e in catalogue().values() if any(map(titles.match, e.chapters))])
