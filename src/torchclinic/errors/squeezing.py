"""A log without what machines put around its words.

A log is a mess: prefixes of ranks, colours, lines that are wrapped anywhere. *Squeezed*, it is only
the letters, digits and signs of each line, without any white space.
"""

import re
from array import array
from functools import lru_cache

from torchclinic.errors.entries import page

# The name of an environment, such as .../envs/torch/lib/python3.12, says nothing of the program.
ENVIRONMENT = r"envs[/\\]{1,2}[\w.-]{1,60}"
COLOUR = r"\x1b\[[0-9;?]*[A-Za-z]|\\u001b|\\x1b|\\033|\^\[(?=\[)"
COLOUR += r"|\[[0-9;]{1,12}m"  # of which only this is left where web pages drop the rest
COLOUR += r"|</?(?:span|font)(?: [^<>\n]{0,200})?>"  # of a page's source
# Of lines. Written so that Python's re.ASCII and JavaScript read them alike: \s would differ.
BLANK = r"[ \t\r\f\v\u00a0\u3000\ufeff]"
END = rf"(?={BLANK}|\n|$)"
# Whose a line is: by its prefix (torch, mpirun), in torchrun's summary, as srun says.
RANK_OF_LINE = re.compile(r"\[rank ?(\d{1,5})\]|\[\d{1,5},(\d{1,5})\]<", re.ASCII)
RANK_OF_FAILURE = re.compile(r"\brank {1,9}: (\d{1,5}) \(local_rank: \d{1,5}\)", re.ASCII)
TASK = re.compile(r"srun: error: ([\w.-]{1,99}): task (\d{1,5}): (.{1,99})", re.ASCII)
LOGS = page("logs")  # what stands there around the words of an error
QUOTES = {mark: plain for plain, marks in LOGS["plain"] for mark in marks}
PREFIXES = "|".join(LOGS["prefixes"]).replace("<END>", END).replace("<BLANK>", BLANK)
PREFIX = rf"{BLANK}*(?:(?:{PREFIXES}){BLANK}*){{0,6}}"


def squeeze(log: str) -> list[str]:
    """Each line without prefixes, colours and white space, in ASCII, with one kind of quotes."""
    # A progress bar writes many times over one line: what follows a carriage return has no prefix.
    return _ascii(unprefixed(log)).split("\n")


def unprefixed(log: str) -> str:
    """A log without prefixes and colours, with one kind of quotes."""
    return re.sub(f"^(?=.){PREFIX}", "", _plain(log), flags=re.MULTILINE | re.ASCII)


def _plain(text: str) -> str:
    text = f"\n{text}\n"
    for mark, plain in QUOTES.items():
        text = text.replace(mark, plain)
    return without_colours(text[1:-1])


def without_colours(text: str) -> str:
    """A text without the codes that colour a terminal, or what a page has left of them."""
    return re.sub(COLOUR, "", text)


def _ascii(text: str) -> str:
    """What is printed and is not a space, 33 to 126, and line ends."""
    others = bytes({*range(33), 127} - {10})
    return text.encode("ascii", "ignore").translate(None, others).decode("ascii")


def rank_of(lines: list[str], number: int) -> str:
    """Whose line it is, if its prefix says so, or torchrun's summary some lines above, or srun."""
    line = without_colours(lines[number][:400])
    prefix = re.match(PREFIX, line, re.ASCII)
    if found := prefix and RANK_OF_LINE.search(prefix[0]):
        return f"rank {found[1] or found[2]}"
    for above in lines[number : max(0, number - 4) : -1]:
        if found := RANK_OF_FAILURE.search(above[:400]):
            return f"rank {found[1]}"
    found = TASK.search(line)
    return f"task {found[2]}" if found else ""


@lru_cache(1)  # a line of megabytes may have hundreds of matches
def _places(line: str) -> tuple[str, array]:
    """A line before it is squeezed, and where in it each squeezed character stands."""
    line = unprefixed(line)
    return line, array("I", (at for at, sign in enumerate(line) if "!" <= sign <= "~"))


def excerpt(line: str, place: int, most: int = 240) -> str:
    """What to show of a line in which a match begins after `place` squeezed characters."""
    line = line if len(line) > 10 * most else without_colours(line)
    start = 0
    if len(line) > most:
        line, places = _places(line)
        start = max(0, places[place] - most // 4 if places else 0)  # with what stands before it
    # A terminal would obey what else is in a log.
    shown = "".join(c if c.isprintable() else " " for c in line[start : start + most])
    shown = " ".join(shown.split())
    return f"{'... ' * (start > 0)}{shown}{' ...' * (start + most < len(line))}"


def signs(log: str) -> list[str]:
    """The lines of a log that may tell of an error."""

    def has_sign(text: str) -> bool:
        return any(sign in text for sign in LOGS["signs"])

    lines = log.split("\n") if has_sign(log.lower()) else []
    lines = [line for line in lines if has_sign(line.lower())]
    others = re.sub("|".join(LOGS["harmless"]), " ", "\n".join(lines).lower(), flags=re.ASCII)
    return [line for line, rest in zip(lines, others.split("\n"), strict=False) if has_sign(rest)]
