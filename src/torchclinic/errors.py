"""From a log to its cause: the catalogue of errors, and the rules that recognise them.

``errors.toml`` holds the catalogue: what each error says, why it happens, what to do, and the code
that shows both. The error clinic's notebooks are written from it, ``torchclinic explain`` prints
it, and the paste box of the site applies the same rules (`rules`) in the browser.

A log is a mess: prefixes of ranks, colours, lines that are wrapped anywhere. So both the log and
the patterns are *squeezed* to the letters, digits and signs that they consist of, without any
white space, and a pattern is nothing but pieces of text in their order. No pattern is a regular
expression: none can be slow, and Python and JavaScript agree.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
import traceback
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from itertools import accumulate
from pathlib import Path

# Of the book, in a clone of it; a chapter that runs alone, as on Kaggle, has none beside it.
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
GAP = 200  # squeezed characters for which a * in a pattern may stand
NEAR = 30  # lines around a special entry in which a more general one gives way to it
# What is shown first: an error, or what a log says of an error that has no message (silent); then
# what follows from an error elsewhere; then warnings.
KINDS = {"error": 0, "silent": 0, "follows": 1, "warning": 2}
# Replaced one after the other: what an input method or a web page makes of ASCII, and the many ways
# to write a quotation mark; the last three are of JSON.
QUOTES = {
    **dict.fromkeys('"`´‘’‚‛“”„‟′″「」『』«»＂＇', "'"),
    **dict(zip("：，；．（）［］＝／！", ":,;.()[]=/!", strict=True)),
    "…": "...",
    "\\'": "'",
    "\\n": "",
    "\\t": "",
}
COLOURS = [r"\x1b\[[0-9;?]*[A-Za-z]", r"\\u001b", r"\\x1b", r"\\033", r"\^\[(?=\[)"]
COLOURS += [r"\[[0-9;]{1,12}m"]  # of which only this is left where web pages drop the rest
# Of lines. Written so that Python's re.ASCII and JavaScript read them alike: \s would differ.
BLANK = r"[ \t\r\f\v\u00a0\u3000\ufeff]"
PREFIXES = [
    r"\[(?:rank|default) ?\d{1,5}\]:?",  # torch, torchrun
    r"\[\d{1,5}(?:,\d{1,5})?\](?:<\w{1,6}>)?:?",  # mpirun --tag-output
    rf"\d{{1,5}}:(?={BLANK}|$)",  # srun --label
    r"\((?:[\w.]{1,60} )?pid=\d{1,9}(?:, ip=[\d.]{1,40})?\)",  # Ray
    r"\[?[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} +(?:\d{1,9} )?[\w./-]{1,200}:\d{1,6}\]",  # glog
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?",  # loggers
    r"\[?\d\d:\d\d:\d\d\]?",
    rf"\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?:?(?={BLANK}|$)",
    rf"[\w./-]{{1,100}} {{0,9}}\|(?={BLANK}|$)",  # docker compose
    r"\[pod/[\w./-]{1,200}\]",  # kubectl logs --prefix
    rf"E(?={BLANK}{{3}})",  # pytest
    rf"(?:[>|]{{1,9}}|-)(?={BLANK}|$)",  # quotations, exception groups
]
PREFIX = rf"{BLANK}*(?:(?:{'|'.join(PREFIXES)}){BLANK}*){{0,6}}"
# Lines that say what is wrong, if no pattern does; and their words, without the names of modules.
TELLING = re.compile(
    r"(?:[Ee]rror|Exception|Warning|what\(\))(?:\(s\))?[^ ]{0,12}: "
    r"|Missing|Unexpected|[Mm]ismatch|annot |must ",
    re.ASCII,
)
WORD = re.compile(r"\b[A-Za-z_]{4,40}\b(?!\.\w)", re.ASCII)
# Whose a line is: by its prefix (torch, mpirun), in torchrun's summary, as srun says.
RANK_OF_LINE = re.compile(r"\[rank ?(\d{1,5})\]|\[\d{1,5},(\d{1,5})\]<", re.ASCII)
RANK_OF_FAILURE = re.compile(r"\brank {1,9}: (\d{1,5}) \(local_rank: \d{1,5}\)", re.ASCII)
TASK = re.compile(r"srun: error: ([\w.-]{1,99}): task (\d{1,5}): (.{1,99})", re.ASCII)


@dataclass(frozen=True)
class Error:
    """An entry of the catalogue; texts are Markdown. ``errors.toml`` says what each field holds."""

    id: str
    part: str
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

    def __str__(self) -> str:
        return _in_a_terminal(self)


@dataclass(frozen=True)
class Match:
    """An `error` that a log holds: in which `line`, counted from 1, what stands there, and the
    `rank` whose line it is, if the log says so.
    """

    error: Error
    line: int
    text: str
    rank: str = ""


@cache
def _read() -> dict:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def catalogue() -> dict[str, Error]:
    """All entries by id, in the order of the clinic's pages."""
    return {entry["id"]: Error(**entry) for entry in _read()["error"]}


def parts() -> dict[str, dict[str, str]]:
    """The clinic's notebooks: for each part its ``title``, ``opening`` and ``setup``."""
    return {
        name: {"opening": _read()["opening"], **about} for name, about in _read()["parts"].items()
    }


def quoted_torch() -> str:
    """The version of PyTorch whose source is quoted where no cell can raise an error."""
    return _read()["torch"]


# --- finding ------------------------------------------------------------------------------------


def find(log: str) -> list[Match]:
    """The errors that a log holds, the likeliest cause first.

    An error comes before what only follows from one, such as the other ranks' lost connections,
    and that before warnings. Among alike the first in the log comes first: it cannot follow from
    those after it. An entry gives way to a more special one that matched within `NEAR` lines.

    Parameters
    ----------
    log : str
        A message, a traceback or a whole log; of any length.

    Examples
    --------
    >>> [match.error.id for match in find("KeyError: 'momentum'")]
    []
    """
    pieces = squeeze(log)
    starts = [0, *accumulate(map(len, pieces))]
    squeezed = b"".join(pieces)
    places = {}
    for error in catalogue().values():
        patterns = _squeezed_patterns(error.id)
        if found := sorted(place for p in patterns for place in _places(squeezed, p)):
            places[error.id] = found
    named = list(_places(squeezed, [b"Error"])) if places else []
    first = {name: _first(name, places, starts, named) for name in places}
    lines = log.split("\n") if places else []
    matches = []
    for name in sorted(first, key=lambda name: (KINDS[catalogue()[name].kind], first[name])):
        if (place := first[name]) < len(squeezed):
            line = bisect_right(starts, place) - 1
            text = _around(lines[line], place - starts[line])
            matches.append(Match(catalogue()[name], line + 1, text, _rank(lines, line)))
    return matches


def _first(name: str, places: dict[str, list[int]], starts: list[int], named: list[int]) -> int:
    """The first place of an entry whose error no more special entry also describes; or the end.

    One does if it is at most `NEAR` lines away, or follows before another error is `named`: in a
    window of 80 letters, a list of keys has hundreds of lines.
    """
    special = sorted(
        p for other in places if name in catalogue()[other].over for p in places[other]
    )
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
    return starts[-1]


def _rank(lines: list[str], number: int) -> str:
    """Whose line it is, if its prefix says so, or torchrun's summary some lines above, or srun."""
    line = _without_colours(lines[number][:400])
    if found := RANK_OF_LINE.search(line[: re.match(PREFIX, line, re.ASCII).end()]):
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


def squeeze(log: str) -> list[bytes]:
    """Each line without prefixes, colours and white space, in ASCII, with one kind of quotes."""
    # A progress bar writes many times over one line: what follows a carriage return has no prefix.
    return _ascii(_without_prefixes(_plain(log))).split(b"\n")


def _plain(text: str) -> str:
    for mark, plain in QUOTES.items():
        text = text.replace(mark, plain)
    return _without_colours(text)


def _without_colours(text: str) -> str:
    for colour in COLOURS:
        text = re.sub(colour, "", text)
    return text


def _without_prefixes(text: str) -> str:
    return re.sub(f"^{PREFIX}", "", text, flags=re.MULTILINE | re.ASCII)


def _ascii(text: str) -> bytes:
    """What is printed and is not a space, 33 to 126, and line ends."""
    return text.encode("ascii", "ignore").translate(None, bytes({*range(33), 127} - {10}))


@cache
def _squeezed_patterns(name: str) -> list[list[bytes]]:
    """The patterns of an entry, each as the pieces between its gaps."""
    return [b"".join(squeeze(p)).split(b"*") for p in catalogue()[name].patterns]


def _places(text: bytes, pattern: list[bytes]) -> Iterator[int]:
    """Where `pattern` begins in `text`: each place from which all pieces follow."""
    first, *others = pattern
    start = text.find(first)
    while start >= 0:
        end = start + len(first)
        for piece in others:
            place = text.find(piece, end, end + GAP + len(piece))
            if place < 0:
                break
            end = place + len(piece)
        else:
            yield start
        start = text.find(first, start + 1)


def _around(line: str, place: int, most: int = 240) -> str:
    """What to show of a line in which a match begins after `place` squeezed characters."""
    line = _without_colours(line)
    start = 0
    if len(line) > most:
        line = _without_prefixes(_plain(line))
        start = bisect_right(range(len(line)), place, key=lambda end: len(_ascii(line[:end]))) - 1
        start = max(0, start - most // 4)  # with what stands before it
    # A terminal would obey what else is in a log.
    shown = "".join(c if c.isprintable() else " " for c in line[start : start + most])
    shown = " ".join(shown.split())
    return f"{'... ' * (start > 0)}{shown}{' ...' * (start + most < len(line))}"


# --- when nothing is found ----------------------------------------------------------------------


def nearest(log: str, most: int = 3) -> list[Error]:
    """Entries that share rare words with the lines of a log that speak of an error; the best first.

    They are a guess for a reader whose error is not in the catalogue: none may be right.
    """
    lines = log.split("\n")
    telling = [line for line in lines if TELLING.search(line)][-50:] or lines[-20:]
    words = set(WORD.findall("\n".join(line[:2000] for line in telling)))
    weights = _weights()
    scores = {}
    for name, own in _words().items():
        shared = own & words
        if len(shared) >= 2:
            scores[name] = sum(weights[word] for word in shared)
    order = list(scores)
    best = sorted(order, key=lambda name: (-scores[name], order.index(name)))
    return [catalogue()[name] for name in best[:most]]


@cache
def _words() -> dict[str, set[str]]:
    """For each entry the words of its message and patterns."""
    return {
        e.id: set(WORD.findall(" ".join([e.message, *e.patterns]))) for e in catalogue().values()
    }


@cache
def _weights() -> dict[str, int]:
    """How rare a word is: in how many entries it is not, for each in which it is."""
    counts = Counter(word for words in _words().values() for word in words)
    return {word: len(_words()) // count for word, count in sorted(counts.items())}


def rules() -> dict:
    """All that the paste box needs to find what `find` and `nearest` find, for JSON."""
    return {
        "gap": GAP,
        "near": NEAR,
        "kinds": KINDS,
        "quotes": QUOTES,
        "colours": COLOURS,
        "prefix": PREFIX,
        "telling": TELLING.pattern,
        "word": WORD.pattern,
        "weights": _weights(),
        "errors": [
            {
                "id": error.id,
                "kind": error.kind,
                "over": error.over,
                "patterns": [[p.decode() for p in each] for each in _squeezed_patterns(error.id)],
                "words": sorted(_words()[error.id]),
            }
            for error in catalogue().values()
        ],
    }


# --- showing ------------------------------------------------------------------------------------


def explain(log: str, found: list[Match] | None = None) -> str:
    """What `find` finds in a log (or has `found`), or `nearest`, for a terminal."""
    found = find(log) if found is None else found
    if not found:
        return _not_found(nearest(log))
    first, *others = found
    where = f"{first.line}{', of ' * bool(first.rank)}{first.rank}: {first.text}"
    parts = [_heading(first.error), _filled("In your log, line", where)]
    parts += filter(None, [_wrapped(_first_to_fail(_without_colours(log)))])
    parts += [_filled("Why:", first.error.cause), _filled("Do:", first.error.fix)]
    parts += filter(None, [FOLLOWS.get(first.error.kind)])
    if others:
        parts += ["Also in your log:\n" + "\n".join(map(_also, others))]
    more = f"More, with code that fails and code that works: torchclinic explain {first.error.id}"
    return "\n\n".join([*parts, more])


FOLLOWS = {
    "follows": "It often follows from an error of another process.",
    "warning": "It is a warning: the program goes on after it.",
}


def _also(match: Match) -> str:
    error = match.error
    text = f"{error.id}: {first_sentence(error.cause)} {FOLLOWS.get(error.kind, '')}"
    rank = f"{match.rank}, " if match.rank else ""
    return _wrapped(_without_links(text), f"  line {match.line}, {rank}", " " * 4)


def _not_found(guesses: list[Error]) -> str:
    parts = ["No entry of the catalogue has these words."]
    if guesses:
        names = [_wrapped(_without_marks(f"{e.id}: {e.message}"), "  ", " " * 4) for e in guesses]
        parts += ["\n".join(["The nearest, which may all be about something else:", *names])]
    return "\n\n".join([*parts, ASK])


ASK = """To ask others, collect: the whole log from its first line, of every rank; the command that
started it; what `torchclinic doctor` prints; and the smallest program that still fails."""
WIDTH = 88


def _in_a_terminal(error: Error) -> str:
    parts = [_heading(error), _filled("Why:", error.cause)]
    parts += [_block("This fails:" if error.raises else "This shows it:", error.fails)]
    parts += [_block(f"In {error.source}:", error.quoted)]
    parts += [_filled("Do:", error.fix), _block("This works:", error.works)]
    parts += [_filled("Avoid it:", error.avoid), _filled("Versions:", error.versions)]
    links = [f"{error.page}#{error.id}", *error.chapters]
    links = [*(_published(link) or link for link in links), *error.threads]
    return "\n\n".join(filter(None, [*parts, _block("Read on:", "\n".join(links))]))


def _published(link: str) -> str:
    """The address on the web of ``notebook#anchor``, if the installed package says where."""
    with suppress(PackageNotFoundError):
        for url in metadata("torchladder").get_all("Project-URL", []):
            name, address = url.split(", ", 1)
            if name == "Documentation":
                page, hash_sign, anchor = link.partition("#")
                return f"{address.rstrip('/')}/notebooks/{page}.html{hash_sign}{anchor}"
    return ""


def _heading(error: Error) -> str:
    return _wrapped(_without_marks(f"{error.id}: {error.message}"))


def _block(title: str, text: str) -> str:
    return text.strip() and textwrap.indent(f"{title}\n{text.strip()}", "    ").strip()


def _filled(title: str, text: str) -> str:
    """Paragraphs of Markdown as lines of a terminal's width; links keep their words alone."""
    paragraphs = re.split(r"\n\s*\n", _without_links(f"{title} {text.strip()}"))
    filled = [
        # A list or a block of code stands as it was written.
        p if re.search(r"^(- |\||```|\d+\. |    )", p, re.M) else _wrapped(p)
        for p in paragraphs
    ]
    return "\n\n".join(filled) if text.strip() else ""


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    text = " ".join(text.split())
    # A short piece of code stays on one line; textwrap breaks no other space than ASCII's.
    text = re.sub("`[^`]{1,40}`", lambda code: code[0].replace(" ", "\u00a0"), text)
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\u00a0", " ")


def _without_links(text: str) -> str:
    return re.sub(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^)]*\)", r"\1", text)


def _without_marks(text: str) -> str:
    return text.replace("`", "")


def first_sentence(text: str) -> str:
    """What the tables of the chapters show of a cause or a fix."""
    return re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0]


def of_chapter(number: str) -> ErrorTable:
    """The entries that name the chapter ``'01'`` to ``'17'``, in the catalogue's order."""
    return ErrorTable(
        [error for error in catalogue().values() if any(c[:2] == number for c in error.chapters)]
    )


@dataclass(frozen=True)
class ErrorTable:
    """Some entries; a table in Markdown, and in a terminal a line for each."""

    errors: list[Error]

    def __repr__(self) -> str:
        return "\n".join(f"{e.id}: {_without_marks(e.message)}" for e in self.errors)

    def _repr_markdown_(self) -> str:
        rows = ["| message | it means | do this |", "| --- | --- | --- |"]
        for error in self.errors:
            here = f"{error.page}.ipynb#{error.id}"
            address = here if NOTEBOOKS.is_dir() else _published(f"{error.page}#{error.id}")
            cells = [f"[{error.message}]({address})" if address else error.message]
            cells += map(first_sentence, (error.cause, error.fix))
            rows += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"]
        return "\n".join(" ".join(row.split()) for row in rows)


# --- under a traceback --------------------------------------------------------------------------

LINE = "Why, and what to do: torchclinic explain"


def note(error: BaseException) -> None:
    """Let the traceback of `error` end by naming its entry, unless a shell does so (`watch`)."""
    with suppress(Exception):  # whatever happens here, `error` is what the user must see
        shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
        if not getattr(shell, "torchclinic_watch", None) and (found := find(text_of(error))):
            error.add_note(f"{LINE} {found[0].error.id}")


def text_of(error: BaseException) -> str:
    """What a traceback says, without its frames: of causes, of a group's parts, and in notes."""
    return "".join(traceback.format_exception(error, limit=0))


def watch(shell) -> None:
    """Name the entry under each traceback of an IPython shell: ``%load_ext torchclinic``."""
    unwatch(shell)  # there may be one of a module that was reloaded
    shell.torchclinic_watch = _Watch()
    for event, function in shell.torchclinic_watch.events():
        shell.events.register(event, function)


def unwatch(shell) -> None:
    """Undo `watch`: ``%unload_ext torchclinic``."""
    if watching := getattr(shell, "torchclinic_watch", None):
        for event, function in watching.events():
            shell.events.unregister(event, function)
        shell.torchclinic_watch = None


class _Watch:
    def __init__(self) -> None:
        self.folder = Path.cwd()  # of the notebook, until a cell changes it
        self.last = 0
        self.complained = False

    def events(self) -> list[tuple]:
        return [("pre_run_cell", self.before), ("post_run_cell", self.after)]

    def before(self, info: object = None) -> None:
        # Not the error itself, which would keep all that its frames hold.
        self.last = id(getattr(sys, "last_value", None))

    def after(self, result) -> None:
        try:
            error = result.error_in_exec or result.error_before_exec
            # %run and the like show a traceback, but their cell succeeds.
            shown = getattr(sys, "last_value", None)
            if error is None and id(shown) != self.last:
                error = shown
            if error is not None and (found := find(text_of(error))):
                self.show(found[0].error)
        except Exception as problem:  # never the user's
            if not self.complained:
                self.complained = True
                print(f"torchclinic cannot name entries here: {type(problem).__name__}: {problem}")

    def show(self, error: Error) -> None:
        from IPython.display import display

        command, name = f"`torchclinic explain {error.id}`", f"{error.page}.ipynb"
        here = (self.folder / name).exists()  # a notebook of this book
        if link := f"{name}#{error.id}" if here else _published(f"{error.page}#{error.id}"):
            command = f"[{error.id}]({link}), or {command}"
        rich = f"Why, and what to do: {command}"
        display({"text/plain": f"{LINE} {error.id}", "text/markdown": rich}, raw=True)
