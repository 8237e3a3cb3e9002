"""From a log to its cause: the catalogue of errors, and the rules that recognise them.

``catalogue/`` holds the entries: what each error says, why it happens, what to do, and the code
that shows both. The error clinic's notebooks are written from it, ``torchclinic explain`` prints
it, and the paste box of the site applies the same rules (`rules`) in the browser.

A log is a mess: prefixes of ranks, colours, lines that are wrapped anywhere. So both the log and
the patterns are *squeezed* to the letters, digits and signs that they consist of, without any
white space, and a pattern is nothing but pieces of text in their order. No pattern is a regular
expression: none can be slow, and Python and JavaScript agree.
"""

import json
import re
import sys
import textwrap
import tomllib
import traceback
from bisect import bisect_left, bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, metadata
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

# Of the book, in a clone of it; a chapter that runs alone, as on Kaggle, has none beside it.
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CATALOGUE = Path(__file__).with_name("catalogue")
GAP = 200  # squeezed characters for which a * in a pattern may stand
COUNTED = 1000
SLICE = 2**18  # squeezed characters in which all patterns are looked for at once
NEAR = 30  # lines around a special entry in which a more general one gives way to it
# What is shown first: an error, or what a log says of an error that has no message (silent); then
# what follows from an error elsewhere; then warnings.
KINDS = {"error": 0, "silent": 0, "follows": 1, "warning": 2}
COLOUR = r"\x1b\[[0-9;?]*[A-Za-z]|\\u001b|\\x1b|\\033|\^\[(?=\[)"
COLOUR += r"|\[[0-9;]{1,12}m"  # of which only this is left where web pages drop the rest
COLOUR += r"|</?(?:span|font)(?: [^<>\n]{0,200})?>"  # of a page's source
# Of lines. Written so that Python's re.ASCII and JavaScript read them alike: \s would differ.
BLANK = r"[ \t\r\f\v\u00a0\u3000\ufeff]"
END = rf"(?={BLANK}|\n|$)"
# The name of an environment, such as .../envs/torch/lib/python3.12, says nothing of the program.
ENVIRONMENT = r"envs[/\\]{1,2}[\w.-]{1,60}"
# Whose a line is: by its prefix (torch, mpirun), in torchrun's summary, as srun says.
RANK_OF_LINE = re.compile(r"\[rank ?(\d{1,5})\]|\[\d{1,5},(\d{1,5})\]<", re.ASCII)
RANK_OF_FAILURE = re.compile(r"\brank {1,9}: (\d{1,5}) \(local_rank: \d{1,5}\)", re.ASCII)
TASK = re.compile(r"srun: error: ([\w.-]{1,99}): task (\d{1,5}): (.{1,99})", re.ASCII)


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

    def __str__(self) -> str:
        links = [f"{self.page}#{self.id}", *self.chapters]
        links = [*(_published(link) or link for link in links), *self.threads]
        told = [
            _heading(self),
            _wrapped(self.message.replace("`", "")),
            _block(f"In {self.source}:", self.quoted),
            _filled("Why:", self.cause),
            _filled("Do:", self.fix),
            _filled("Avoid it:", self.avoid),
            _filled("Versions:", self.versions),
            _block("Read on:", "\n".join(links)),
        ]
        return "\n\n".join(filter(None, told))


@dataclass(frozen=True)
class Match:
    """An `error` that a log holds: in which `line`, counted from 1, what stands there, the `rank`
    whose line it is, if the log says so, and of several logs, the `file`.
    """

    error: Error
    line: int | None = None
    text: str = ""
    rank: str = ""
    file: str = ""


@cache
def catalogue() -> dict[str, Error]:
    """All entries by id, in the order of the clinic's pages."""
    pages = {part: page(part)["error"] for part in page("pages")["parts"]}
    return {told["id"]: Error(part=part, **told) for part in pages for told in pages[part]}


@cache
def page(name: str) -> dict:
    """A file of the catalogue, such as ``pages``, or one of the `parts` that it names."""
    text = (CATALOGUE / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


LOGS = page("logs")  # what stands there around the words of an error
QUOTES = {mark: plain for plain, marks in LOGS["plain"] for mark in marks}
PREFIXES = "|".join(LOGS["prefixes"]).replace("<END>", END).replace("<BLANK>", BLANK)
PREFIX = rf"{BLANK}*(?:(?:{PREFIXES}){BLANK}*){{0,6}}"

# --- finding ------------------------------------------------------------------------------------


def find(log: str) -> list[Match]:
    """The errors that a log holds, the likeliest cause first.

    An error comes before what only follows from one, such as the other ranks' lost connections,
    and that before warnings. Among alike the first in the log comes first: it cannot follow from
    those after it. An entry gives way to a more special one that matched within `NEAR` lines.
    In a log of an `other_program` nothing is found.

    Parameters
    ----------
    log : str
        A message, a traceback or a whole log; of any length.

    Examples
    --------
    >>> [match.error.id for match in find("KeyError: 'momentum'")]
    []
    """
    squeezed = _squeeze(log)
    starts = [0, *accumulate(map(len, squeezed))]
    squeezed = "".join(squeezed)
    places = _places_of_all(squeezed)
    if not places or other_program(log):
        return []
    named = _places(squeezed, ["Error"])
    lines, begins = log.split("\n"), getattr(log, "begins", [(0, 1)])
    firsts = {name: _first(name, places, starts, named) for name in places}
    matches, found = [], [(place, name) for name, place in firsts.items() if place is not None]
    for place, name in sorted(found, key=itemgetter(0)):
        line = bisect_right(starts, place) - 1
        text = _around(lines[line], place - starts[line])
        here, there = begins[bisect_right(begins, line, key=itemgetter(0)) - 1]
        matches.append(Match(catalogue()[name], there + line - here, text, _rank(lines, line)))
    return sorted(matches, key=lambda match: KINDS[match.error.kind])


def other_program(log: str) -> str:
    """The program, other than PyTorch, that a log names, if it nowhere names PyTorch; or ``""``."""
    others, own = page("other_programs")["others"], page("other_programs")["own"]
    named = (name for name, words in others.items() if any(word in log for word in words))
    if other := next(named, ""):
        log = re.sub(ENVIRONMENT, "", log, flags=re.ASCII)
    return "" if any(word in log for word in own) else other


def _first(
    name: str, places: dict[str, list[int]], starts: list[int], named: list[int]
) -> int | None:
    """The first place of an entry whose error no more special entry also describes.

    One does if it is at most `NEAR` lines away, or follows before another error is `named`: in a
    window of 80 letters, a list of keys has hundreds of lines.
    """
    others = [other for other in places if name in catalogue()[other].over]
    special = sorted(place for other in others for place in places[other])
    lines = [bisect_right(starts, place) for place in special]
    for place in places[name]:
        line = bisect_right(starts, place)
        near = bisect_left(lines, line - NEAR)
        if near < len(lines) and lines[near] <= line + NEAR:
            continue
        after = bisect_left(special, place)
        if after < len(special) and (
            bisect_right(named, place) == bisect_left(named, special[after])
        ):
            continue
        return place
    return None


def _rank(lines: list[str], number: int) -> str:
    """Whose line it is, if its prefix says so, or torchrun's summary some lines above, or srun."""
    line = _without_colours(lines[number][:400])
    prefix = re.match(PREFIX, line, re.ASCII)
    if found := prefix and RANK_OF_LINE.search(prefix[0]):
        return f"rank {found[1] or found[2]}"
    for above in lines[number : max(0, number - 4) : -1]:
        if found := RANK_OF_FAILURE.search(above[:400]):
            return f"rank {found[1]}"
    found = TASK.search(line)
    return f"task {found[2]}" if found else ""


def _first_to_fail(log: str) -> str:
    """What torchrun's summaries or srun say of who failed first."""
    causes = [text[:400] for text in log.split("Root Cause (first observed failure):")[1:]]
    # Of several summaries, as of several hosts, the one with the earliest time.
    for text in sorted(causes, key=lambda text: text.partition("time")[2][:40]):
        if found := RANK_OF_FAILURE.search(text):
            return f"torchrun says that rank {found[1]} failed first."
    if found := TASK.search(log):
        return f"The first that srun names is task {found[2]} on {found[1]}: {found[3].strip()}."
    return ""


def _squeeze(log: str) -> list[str]:
    """Each line without prefixes, colours and white space, in ASCII, with one kind of quotes."""
    # A progress bar writes many times over one line: what follows a carriage return has no prefix.
    return _ascii(_without_prefixes(_plain(log))).split("\n")


def _plain(text: str) -> str:
    text = f"\n{text}\n"
    for mark, plain in QUOTES.items():
        text = text.replace(mark, plain)
    return _without_colours(text[1:-1])


def _without_colours(text: str) -> str:
    return re.sub(COLOUR, "", text)


def _without_prefixes(text: str) -> str:
    return re.sub(f"^(?=.){PREFIX}", "", text, flags=re.MULTILINE | re.ASCII)


def _ascii(text: str) -> str:
    """What is printed and is not a space, 33 to 126, and line ends."""
    others = bytes({*range(33), 127} - {10})
    return text.encode("ascii", "ignore").translate(None, others).decode("ascii")


@cache
def _patterns(name: str) -> list[list[str]]:
    """The patterns of an entry, squeezed, each as the pieces between its gaps."""
    return ["".join(_squeeze(p)).split("*") for p in catalogue()[name].patterns]


def _places_of_all(text: str) -> dict[str, list[int]]:
    """Where the patterns of each entry begin in a squeezed text; no entry that has no place.

    To look for each pattern everywhere takes long. Where it begins, its first piece covers whole
    blocks of four letters, wherever these begin; so it is in no slice that lacks one of them.
    """
    places = {name: [] for name in catalogue()}
    for start in range(0, len(text), SLICE):
        blocks = _blocks(text[start : start + SLICE + GAP])
        for name, found in places.items():
            for pattern in _patterns(name):
                if any(map(blocks.issuperset, _needed(pattern[0]))):
                    found += _places(text, pattern, start, start + SLICE)
    return {name: sorted(found) for name, found in places.items() if found}


def _blocks(text: str) -> set[int]:
    return {*memoryview(text[: len(text) // 4 * 4].encode()).cast("I")}


@cache
def _needed(piece: str) -> list[set[int]]:
    """The blocks in a piece, for each of the four places in it where the first may begin."""
    return [_blocks(piece[skipped:]) for skipped in range(4)]


def _places(text: str, pattern: list[str], start: int = 0, stop: int | None = None) -> list[int]:
    """Where `pattern` begins in `text`: each place from which all pieces follow."""
    first, *others = pattern
    places = []
    stop = len(text) if stop is None else stop + len(first) - 1
    start = text.find(first, start, stop)
    while start >= 0:
        end = start + len(first)
        for piece in others:
            place = text.find(piece, end, end + GAP + len(piece))
            if place < 0:
                break
            end = place + len(piece)
        else:
            places.append(start)
        start = text.find(first, start + 1, stop)
    return places


@lru_cache(1)  # a line of megabytes may have hundreds of matches
def _counted(line: str) -> tuple[str, list[int]]:
    """A line before it is squeezed, and what is left of it before each `COUNTED` characters."""
    line = _without_prefixes(_plain(line))
    parts = (line[start : start + COUNTED] for start in range(0, len(line), COUNTED))
    return line, [0, *accumulate(len(_ascii(part)) for part in parts)]


def _around(line: str, place: int, most: int = 240) -> str:
    """What to show of a line in which a match begins after `place` squeezed characters."""
    line = line if len(line) > 10 * most else _without_colours(line)
    start = 0
    if len(line) > most:
        line, counts = _counted(line)
        start = bisect_right(counts, place) * COUNTED - COUNTED
        place -= counts[start // COUNTED]
        near = line[start : start + COUNTED]
        start += bisect_right(range(len(near)), place, key=lambda end: len(_ascii(near[:end]))) - 1
        start = max(0, start - most // 4)  # with what stands before it
    # A terminal would obey what else is in a log.
    shown = "".join(c if c.isprintable() else " " for c in line[start : start + most])
    shown = " ".join(shown.split())
    return f"{'... ' * (start > 0)}{shown}{' ...' * (start + most < len(line))}"


def rules() -> dict:
    """All that the paste box needs to find what `find` finds, for JSON."""
    told: dict[str, Any] = {"gap": GAP, "near": NEAR, "kinds": KINDS, "quotes": QUOTES}
    told |= {"colour": COLOUR, "prefix": PREFIX, "environment": ENVIRONMENT}
    told |= {**page("other_programs"), "signs": LOGS["signs"], "harmless": LOGS["harmless"]}
    told["errors"] = [
        {"id": e.id, "kind": e.kind, "over": e.over, "patterns": _patterns(e.id)}
        for e in catalogue().values()
    ]
    return told


# --- showing ------------------------------------------------------------------------------------


def explain(log: str, found: list[Match] | None = None) -> str:
    """What `find` finds in a log (or has `found`), for a terminal."""
    found = find(log) if found is None else found
    if other := not found and other_program(log):
        return "\n\n".join([_wrapped(NOT_PYTORCH.format(other)), ASK])
    if not found:
        return f"{UNKNOWN}\n\n{ASK}" if _signs(log) else HEALTHY
    first, *others = found
    error = first.error
    also = "\n".join(["Also in your log:", *map(_also, others)])
    where = f"{first.line}{', of ' * bool(first.rank)}{first.rank}: {first.text}"
    told = [
        NOTICE if _only_notices(log, found) else "",
        _filled(f"In {first.file or 'your log'}, line", where),
        _wrapped(_first_to_fail(_without_colours(log))),
        _heading(error),
        _filled("Why:", error.cause),
        _filled("Do:", _this_case_first(error.fix, log)),
        FOLLOWS.get(error.kind),
        also if others else "",
        f"More: torchclinic explain {error.id}",
    ]
    return "\n\n".join(filter(None, told))


def _only_notices(log: str, found: list[Match]) -> bool:
    """Whether `found` are warnings, and the log has no sign of an error but in their lines."""
    patterns = [pattern for match in found for pattern in _patterns(match.error.id)]
    lines = _signs(log)
    return all(match.error.kind == "warning" for match in found) and all(
        any(_places(line, pattern) for pattern in patterns)
        for line in (_squeeze("\n".join(lines)) if lines else ())
    )


def _signs(log: str) -> list[str]:
    """The lines of a log that may tell of an error."""

    def told(text: str) -> bool:
        return any(sign in text for sign in LOGS["signs"])

    lines = log.split("\n") if told(log.lower()) else []
    lines = [line for line in lines if told(line.lower())]
    others = re.sub("|".join(LOGS["harmless"]), " ", "\n".join(lines).lower(), flags=re.ASCII)
    return [line for line, rest in zip(lines, others.split("\n"), strict=False) if told(rest)]


def _this_case_first(fix: str, log: str) -> str:
    """Before all else those of several cases whose heads, up to the colon, quote the log.

    A comma parts what a log may have; of what stands between two, it has all. Numbers alone, such
    as shapes, are examples.
    """
    if not (found := re.search(r"(?:^- .*\n?(?:^  .*\n?)*)+", fix, re.MULTILINE)):
        return fix
    squeezed = "".join(_squeeze(log))

    def quotes_the_log(case: str) -> bool:
        head = re.match(r"(?:`[^`]*`|:(?!\s)|[^`:])*", case)
        for part in re.findall(r"(?:`[^`]*`|[^`,])+", head[0] if head else ""):
            quoted = [q for q in re.findall("`([^`]{4,})`", part) if re.search("[A-Za-z]", q)]
            if quoted and all("".join(_squeeze(words)) in squeezed for words in quoted):
                return True
        return False

    cases = re.split(r"\n(?=- )", found[0].rstrip("\n"))
    if not (ours := [case for case in cases if quotes_the_log(case)]):
        return fix
    others = "\n".join(case for case in cases if case not in ours)
    before, after = fix[: found.start()], fix[found.end() - 1 :]
    return "\n".join(ours) + f"\n\nOtherwise: {before}{others}{after}"


FOLLOWS = {
    "follows": "It often follows from another error.",
    "warning": "It is a warning: the program goes on after it.",
}
NOT_PYTORCH = """This may not be PyTorch: the log seems to come from {}, and torch is nowhere in
it. If it is PyTorch, give the whole log, from its first line."""
ASK = """To ask others, collect: the whole log from its first line, of every rank; the command that
started it; what `torchclinic doctor` prints; and the smallest program that still fails."""
UNKNOWN = "No entry of the catalogue has these words."
HEALTHY = (
    "There is no error in this log: no traceback, and none of the words that errors begin with."
)
NOTICE = "There is no error in this log, only a notice:"
WIDTH = 88
LINK = r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]"  # its words


def as_json(log: str, found: list[Match], **more: object) -> str:
    """What `explain` says, for programs; entries of `found` that were asked for have no ``line``.

    ``version`` changes only if a field goes or changes its meaning; new ones may come.
    """
    told = {"matches": list(map(_record, found)), "other_program": other_program(log)}
    return json.dumps({"version": 1, **told, **more}, indent=1)


def _record(match: Match) -> dict:
    error = match.error
    told = {name: getattr(match, name) for name in ("line", "text", "rank", "file")}
    told |= {name: getattr(error, name) for name in ("kind", "message")}
    told |= {name: _without_links(getattr(error, name)).strip() for name in ("cause", "fix")}
    url = _published(f"{error.page}#{error.id}")
    return {"id": error.id, "title": error.title, **told, "url": url}


def _also(match: Match) -> str:
    line = f"line {match.line}{f' of {match.file}' if match.file else ''}"
    where = ", ".join(filter(None, [line, match.rank, match.error.id]))
    cause = _without_links(match.error.in_brief[0])
    return _wrapped(f"{where}: {cause} {FOLLOWS.get(match.error.kind, '')}", "  ", "    ")


def _heading(error: Error) -> str:
    return _wrapped(f"{error.id}: {error.title}")


def _block(title: str, text: str) -> str:
    return text.strip() and textwrap.indent(f"{title}\n{text.strip()}", "    ").strip()


def _filled(title: str, text: str) -> str:
    """Paragraphs of Markdown as lines of a terminal's width; links within the book, as words."""
    if not text.strip():
        return ""
    below = "\n\n" if text.startswith("- ") else " "
    paragraphs = re.split(r"\n\s*\n", _without_links(f"{title}{below}{text.strip()}"))
    return "\n\n".join(map(_as_lines, paragraphs))


def _as_lines(paragraph: str) -> str:
    if re.search(r"^(\||```|    )", paragraph, re.MULTILINE):
        return paragraph  # a table or a block of code stands as it was written
    cases = re.split(r"\n(?=- )", paragraph)
    return "\n".join(_wrapped(case, after="  " * case.startswith("- ")) for case in cases)


def _wrapped(text: str, first: str = "", after: str = "") -> str:
    text = " ".join(text.split())
    # A short piece of code stays on one line; textwrap breaks no other space than ASCII's.
    text = re.sub("`[^`]*`", _unbroken, text)
    kept = {"break_long_words": False, "break_on_hyphens": False}
    indents = {"initial_indent": first, "subsequent_indent": after}
    return textwrap.fill(text, WIDTH, **indents, **kept).replace("\u00a0", " ")


def _unbroken(code: re.Match) -> str:
    return code[0].replace(" ", "\u00a0") if len(code[0]) <= 42 else code[0]


def _without_links(text: str) -> str:
    """Of links within the book, their words alone; others keep their addresses."""
    text = re.sub(rf"{LINK}\((https?:[^)]*)\)", r"\1 (\2)", text)
    return re.sub(rf"{LINK}\([^)]*\)", r"\1", text)


def _published(link: str) -> str:
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
            address = here if NOTEBOOKS.is_dir() else _published(f"{error.page}#{error.id}")
            linked = f"[{error.message}]({address})" if address else error.message
            cells = [cell.replace("|", r"\|") for cell in (linked, *error.in_brief)]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(" ".join(row.split()) for row in rows)


def of_chapter(name: str) -> ErrorTable:
    """The entries that lead to a chapter, such as ``'inside_ddp'``, in the catalogue's order."""
    titles = re.compile(rf"\d\d_{name}(#|$)")
    named = [e for e in catalogue().values() if any(map(titles.match, e.chapters))]
    return ErrorTable(named)


# --- under a traceback --------------------------------------------------------------------------

LINE = "Why, and what to do: torchclinic explain"


def note(error: BaseException) -> None:
    """Let the traceback of `error` end by naming its entry, unless a shell does so (`_watch`)."""
    with suppress(Exception):  # whatever happens here, `error` is what the user must see
        shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
        if not hasattr(shell, "torchclinic_watch") and (found := find(_text_of(error))):
            error.add_note(f"{LINE} {found[0].error.id}")


def _text_of(error: BaseException) -> str:
    """What a traceback says, without its frames: of causes, of a group's parts, and in notes.

    Of a longer one, the first million characters and the last: to read 50 takes seconds.
    """
    text = "".join(traceback.format_exception(error, limit=0))
    return f"{text[:1_000_000]}\n{text[1_000_000:][-1_000_000:]}"


def _watch(shell) -> None:
    """Name the entry under each traceback of an IPython shell."""
    folder = Path.cwd()  # of the notebook, until a cell changes it
    # Not the error itself, which would keep all that its frames hold.
    last = id(getattr(sys, "last_value", None))

    def name_entry(result: object) -> None:
        nonlocal last
        error = getattr(sys, "last_value", None)  # also of %run and the like, whose cell succeeds
        new, last = id(error) != last, id(error)
        if new and error is not None and (found := find(_text_of(error))):
            _show(found[0].error, folder)

    if not hasattr(shell, "torchclinic_watch"):  # a module that is reloaded is there already
        shell.torchclinic_watch = name_entry
        shell.events.register("post_run_cell", name_entry)


def _show(error: Error, folder: Path) -> None:
    from IPython.display import display

    command, name = f"`torchclinic explain {error.id}`", f"{error.page}.ipynb"
    here = (folder / name).exists()  # a notebook of this book
    if link := f"{name}#{error.id}" if here else _published(f"{error.page}#{error.id}"):
        command = f"[{error.id}]({link}), or {command}"
    rich = f"Why, and what to do: {command}"
    display({"text/plain": f"{LINE} {error.id}", "text/markdown": rich}, raw=True)
