"""From a log to the entries of the catalogue whose errors it holds.

A pattern is nothing but pieces of text in their order, looked for in a squeezed log. None is a
regular expression: so none can be slow, and Python and JavaScript agree.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import itemgetter

from torchclinic.errors.entries import KINDS, Error, catalogue, page
from torchclinic.errors.squeezing import ENVIRONMENT, excerpt, rank_of, squeeze

GAP = 200  # squeezed characters for which a * in a pattern may stand
SLICE = 2**18  # squeezed characters in which all patterns are looked for at once
# What stands in a line, squeezed, before an error that a README only names; around one that it
# quotes in a sentence, a line's end between; and before one that somebody has.
PROSE = "^#+$|(?:if|when|case)you|you(?:see|get|runinto|encounter|hit)|toavoid"
PROSE += "|(?<!pre|suf)fixe[sd]|nolonger|usersreport"
PROSE += "|^(?:docs?|feat|added|changed|removed|new|improved)(?:\\(.{1,30}\\))?:"
QUOTED = r"(?:^\*'[^'\n]{0,120}|(?:^|[*-]|error|message|get|see|with)"
QUOTED += r"(?:'|\*\*)(?:[\w.]{0,40}error:)?)"
QUOTED += r"\n.{3,200}?(?:'|\*\*)(?:[:.,|]?[a-z]|[>-]{1,2}[^?]{1,200}$)"
QUOTED += r"|(?:howtofix|whattodo(?:on|if|about))[^\n]*\n[^?]*$"  # nobody asks
# What stands before an error of which somebody says that it is not theirs.
DENIED = "(?:(?:is|was|it's|be|but|and|[,;.(]|^)not|(?:is|was)n't|without"
DENIED += "|(?:get|got|see|is|was|are|were|ha[sd]|have|gives?|shows?"
DENIED += "|with|but|and|then|[^a-z=:_-]|^|'s)no"
DENIED += "(?:more|such)?|(?:do|did|does)n't(?:get|see|have|give|show)|ratherthan|insteadof)"
DENIED += "(?:dueto)?(?:an?|the|any)?$"
HAS = "i(?:get|got|see|saw|have|had|keep|am)|say|gives|shows|throws|raises"
NAMED = r"^\*'.{0,120}$|(?:[\w.]{0,99}(?:error|exception):)+$"  # or a list's item that quotes one
NEAR = 30  # lines around a special entry in which a more general one gives way to it


@dataclass(frozen=True)
class Match:
    """An `error` that a log holds: in which `line`, counted from 1, what stands there, the `rank`
    whose line it is, if the log says so, and of several logs, the `file`. ``place``: the log's
    lines, which of them, from 0, and after how many squeezed letters of it the match begins.
    """

    error: Error
    line: int | None = None
    text: str = ""
    rank: str = ""
    file: str = ""
    place: tuple[list[str], int, int] = field(default=([], 0, 0), compare=False, repr=False)


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
    squeezed = squeeze(log)
    starts = [0, *accumulate(map(len, squeezed))]
    squeezed = "".join(squeezed)
    places = places_by_entry(squeezed)
    for name in list(places):
        if any(places_of(pattern, squeezed) for pattern in patterns_of(name, "unless")):
            del places[name]
    if not places or other_program(log):
        return []
    named = places_of(["Error"], squeezed)
    lines = log.split("\n")

    def is_prose(place: int) -> bool:
        after = bisect_right(starts, place)
        before = squeezed[starts[after - 1] : place].lower()
        around = f"{before[-200:]}\n{squeezed[place : starts[after]].lower()[:300]}"
        if "error:" in re.sub(NAMED, "", before[-200:]):
            return False
        if re.search(DENIED, before[-200:]):
            return True
        quoted = re.search(PROSE, before) or re.search(QUOTED, around)
        return bool(quoted and not re.search(HAS, before))

    firsts = {name: _first(name, places, starts, named, is_prose) for name in places}
    matches, found = [], [(place, name) for name, place in firsts.items() if place is not None]
    for place, name in sorted(found, key=itemgetter(0)):
        line = bisect_right(starts, place) - 1
        text = excerpt(lines[line], place - starts[line])
        whose, at = rank_of(lines, line), (lines, line, place - starts[line])
        matches.append(Match(catalogue()[name], line_of(log, line), text, whose, place=at))
    return sorted(matches, key=lambda match: KINDS[match.error.kind])


def line_of(log: str, number: int) -> int:
    """Which line of the whole log, from 1, is line `number` of what is kept of it, from 0."""
    begins = getattr(log, "begins", [(0, 1)])
    here, there = begins[bisect_right(begins, number, key=itemgetter(0)) - 1]
    return there + number - here


def other_program(log: str) -> str:
    """The program, other than PyTorch, that a log names, if it nowhere names PyTorch; or ``""``."""
    others, ours = page("other_programs")["others"], page("other_programs")["own"]
    named = (name for name, words in others.items() if any(word in log for word in words))
    if other := next(named, ""):
        log = re.sub(ENVIRONMENT, "", log, flags=re.ASCII)
    return "" if any(word in log for word in ours) else other


def _first(
    name: str,
    places: dict[str, list[int]],
    starts: list[int],
    named: list[int],
    is_prose: Callable[[int], bool],
) -> int | None:
    """The first place of an entry, not in prose, whose error no more special one also describes.

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
        follows = special[after : after + 1]
        alike = any(bisect_right(named, place) == bisect_left(named, other) for other in follows)
        if not alike and not is_prose(place):
            return place
    return None


@cache
def patterns_of(name: str, field: str = "patterns") -> list[list[str]]:
    """The patterns of an entry, squeezed, each as the pieces between its gaps."""
    return ["".join(squeeze(p)).split("*") for p in getattr(catalogue()[name], field)]


def places_by_entry(text: str) -> dict[str, list[int]]:
    """Where the patterns of each entry begin in a squeezed text; no entry that has no place.

    To look for each pattern everywhere takes long. Where it begins, its first piece covers whole
    blocks of four letters, wherever these begin; so it is in no slice that lacks one of them.
    """
    places = {name: [] for name in catalogue()}
    for start in range(0, len(text), SLICE):
        blocks = _blocks(text[start : start + SLICE + GAP])
        for name, found in places.items():
            for pattern in patterns_of(name):
                if any(map(blocks.issuperset, _needed(pattern[0]))):
                    found += places_of(pattern, text, start, start + SLICE)
    return {name: sorted(found) for name, found in places.items() if found}


def _blocks(text: str) -> set[int]:
    return {*memoryview(text[: len(text) // 4 * 4].encode()).cast("I")}


@cache
def _needed(piece: str) -> list[set[int]]:
    """The blocks in a piece, for each of the four places in it where the first may begin."""
    return [_blocks(piece[skipped:]) for skipped in range(4)]


def places_of(pattern: list[str], text: str, start: int = 0, stop: int | None = None) -> list[int]:
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
