"""The catalogue's Markdown as lines of a terminal."""

import re
import textwrap

WIDTH = 88
LINK = r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]"  # its words


def block(title: str, text: str) -> str:
    """A text below its title, indented; nothing, if there is no text."""
    return text.strip() and textwrap.indent(f"{title}\n{text.strip()}", "    ").strip()


def filled(title: str, text: str) -> str:
    """Paragraphs of Markdown as lines of a terminal's width; links within the book, as words."""
    if not text.strip():
        return ""
    below = "\n\n" if text.startswith("- ") else " "
    paragraphs = re.split(r"\n\s*\n", without_links(f"{title}{below}{text.strip()}"))
    return "\n\n".join(map(_as_lines, paragraphs))


def _as_lines(paragraph: str) -> str:
    if re.search(r"^(\||```|    )", paragraph, re.MULTILINE):
        return paragraph  # a table or a block of code stands as it was written
    cases = re.split(r"\n(?=- )", paragraph)
    return "\n".join(wrapped(case, after="  " * case.startswith("- ")) for case in cases)


def wrapped(text: str, first: str = "", after: str = "") -> str:
    """One paragraph, with `first` before its first line and `after` before the others."""
    text = " ".join(text.split())
    # A short piece of code stays on one line; textwrap breaks no other space than ASCII's.
    text = re.sub("`[^`]*`", _unbroken, text)
    kept = {"break_long_words": False, "break_on_hyphens": False}
    indents = {"initial_indent": first, "subsequent_indent": after}
    return textwrap.fill(text, WIDTH, **indents, **kept).replace("\u00a0", " ")


def _unbroken(code: re.Match) -> str:
    return code[0].replace(" ", "\u00a0") if len(code[0]) <= 42 else code[0]


def without_links(text: str) -> str:
    """Of links within the book, their words alone; others keep their addresses."""
    text = re.sub(rf"{LINK}\((https?:[^)]*)\)", r"\1 (\2)", text)
    return re.sub(rf"{LINK}\([^)]*\)", r"\1", text)
