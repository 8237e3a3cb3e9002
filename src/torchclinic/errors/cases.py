"""Which case of an entry a log is about: by the words and numbers of the error's own lines."""

import math
import re
from functools import cache
from itertools import takewhile

from torchclinic.errors.entries import Error, page
from torchclinic.errors.squeezing import ENVIRONMENT, excerpt, squeeze, unprefixed

AROUND = 30  # lines that may belong to an error, above and below
NAME = 6  # letters of a word that counts in code
LONG = 10_000  # letters of a line; of a longer one, only what stands around the match is read
FRAME = "File '|Traceback|$"
NAMED = r"[\w.]*(?:Error|Exception|Warning)(?![a-z])"
BULLETS = re.compile(r"(?:^- .*\n?(?:^  .*\n?)*)+", re.MULTILINE)
DECIDED = page("logs")["decided"]  # by numbers, of entries' cases by how these begin
COUNTED = page("logs")["counted"]  # numbers by name: of what stands in a list
MEASURED = page("logs")["measured"]  # and amounts of memory
NEARBY = page("logs")["around"]  # what the lines around say
MANY = 8  # other cases, beside those that a log is about; more stand only in the entry
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def this_case_first(error: Error, place: tuple[list[str], int, int]) -> str:
    """What to do, before all else the cases that a log is about in which a match is at `place`; of
    `MANY` others, none.
    """
    ours = about(error, *place)
    if not ours or not (found := BULLETS.search(error.fix)):
        return error.fix
    cases = bullets(error)
    first = "\n".join(cases[which] for which in ours)
    rest = [case for which, case in enumerate(cases) if which not in ours]
    others = "\n".join(rest if len(rest) <= MANY else [])
    before, after = error.fix[: found.start()], error.fix[found.end() - 1 :]
    return f"{first}\n\nOtherwise: {before}{others}{after}"


def about(error: Error, lines: list[str], number: int, place: int) -> list[int]:
    """Which of an entry's cases, from 0, a log is about whose match begins in line `number`, from
    0, after `place` squeezed letters.
    """
    if not (cases := cases_of(error)):
        return []
    own, code = own_lines(lines, number, place)
    near = lines[max(0, number - AROUND) : number + AROUND]
    numbers = numbers_of(own, "\n".join(line[:300] for line in near).lower())
    ours = [which for which, (words, _) in enumerate(cases) if _named(words, own)]
    # Else by numbers, and by the traceback, of whose code only longer words tell something.
    return ours or [
        which
        for which, (words, sums) in enumerate(cases)
        if _named(words, code, NAME) or any(_holds(rule, numbers) for rule in sums)
    ]


def bullets(error: Error) -> list[str]:
    """The cases of what an entry says to do, as they are written; if it has none, ""."""
    found = BULLETS.search(error.fix)
    return re.split(r"\n(?=- )", found[0].rstrip("\n") if found else "")


Case = tuple[list[list[str]], list[str]]


def cases_of(error: Error) -> list[Case]:
    """Of each case the words, squeezed, that its head up to the colon quotes, those between two
    commas or *or*s together, and what decides instead, as ``free + unused > wanted``.

    Numbers alone, such as shapes, are examples.
    """
    cases: list[Case] = []
    decided = DECIDED.get(error.id, {})
    for case in filter(None, bullets(error)):
        head = re.match(r"(?:`[^`]*`|:(?!\s)|[^`:])*", case)
        parts = re.findall(r"(?:`[^`]*`|(?!,|\bor\b)[^`])+", head[0] if head else "")
        quoted = [["".join(squeeze(q)) for q in re.findall("`([^`]*)`", part)] for part in parts]
        quoted = [[q for q in part if len(q) > 3 and re.search("[A-Za-z]", q)] for part in quoted]
        rules = next((decided[d] for d in decided if case.startswith(f"- {d}")), [])
        cases.append(([part for part in quoted if part] if not rules else [], rules))
    return cases


def own_lines(lines: list[str], number: int, place: int) -> tuple[str, str]:
    """The lines of an error, from its name to the next frame or blank line, in ASCII, with single
    blanks; and those of code, without the files' names, in the traceback above it, after the rank.
    """
    above, below = lines[max(0, number - AROUND) : number], lines[number + 1 : number + AROUND]
    this = lines[number] if len(lines[number]) <= LONG else excerpt(lines[number], place, 1200)
    texts = [unprefixed(line[:LONG]) for line in (*above, this, *below)]
    texts = [re.sub("[^!-~]+", " ", text).strip() for text in texts]
    here = len(above)
    upward = takewhile(lambda at: not re.match(FRAME, texts[at]), range(here, -1, -1))
    start = next((at for at in upward if re.match(NAMED, texts[at])), here)
    ends = (at for at in range(here + 1, len(texts)) if re.match(FRAME, texts[at]))
    frame = next((n for n in range(start) if texts[n].startswith("File '")), start)  # of a long one
    cut = max(0, frame - (frame < start))  # its first line may be code
    begun = max((n for n in range(start) if texts[n].startswith("Traceback")), default=cut)
    code = re.findall(r"^\[rank[0-9]+\]", lines[number])
    code += [re.sub("^File '.*?'", "", text) for text in texts[begun:start]]
    own = re.sub(ENVIRONMENT, "", " ".join(texts[start : next(ends, None)]), flags=re.ASCII)
    return own, " ".join(code)


def _named(words: list[list[str]], text: str, least: int = 1) -> bool:
    """Whether a text has all of one part's words, as whole ones; ... stands for anything."""
    return any(
        all(len(word) >= least and re.search(_whole(word), text) for word in part) for part in words
    )


@cache
def _whole(word: str) -> str:
    parts = (" ?".join(map(re.escape, part)) for part in word.split("..."))
    before = "(?<![A-Za-z0-9])" * word[0].isalnum()
    return before + ".{0,80}?".join(parts) + "(?![A-Za-z0-9])" * word[-1].isalnum()


def _holds(rule: str, numbers: dict[str, float]) -> bool:
    """Whether ``a + b > c and d > e``; it does not if one of them is not there."""

    def total(text: str) -> float:  # nan, than which nothing is more, without one of them
        return sum(numbers.get(name, math.nan) for name in text.split(" + "))

    sides = (part.split(" > ") for part in rule.split(" and "))
    return all(total(left) > total(right) for left, right in sides)


def numbers_of(own: str, around: str) -> dict[str, float]:
    """The numbers that `DECIDED` compares, of an error's own lines and of those around."""
    text = own.replace(" ", "")
    numbers: dict[str, float] = {"none": 0, "one": 1}
    for name, (before, item) in COUNTED.items():
        lists = re.findall(before + "((?:'[^']*',?)*)", text)
        numbers[name] = sum(len(re.findall(f"'{item}'", names)) for names in lists)
    for name, amount in MEASURED.items():
        if found := re.search(amount, text):
            numbers[name] = float(found[1]) * UNITS[found[2]]
    for name, pattern in NEARBY.items():
        found = re.search(pattern, around, re.ASCII)
        if found or "(\\d" not in pattern:
            numbers[name] = float(found[1] if found and found.re.groups else bool(found))
    return numbers
