"""From what people say that they see to the entries and sections that answer: the nearest question.

``asked.tsv`` has what people ask, with the section that answers; ``also.tsv`` has as what a word
stands in the book. Both are the search's.
"""

import math
import re
from collections import Counter
from functools import cache
from itertools import chain

from torchclinic.errors.cases import about, bullets
from torchclinic.errors.entries import CATALOGUE, Error, catalogue, page
from torchclinic.errors.terminal import without_links

WORD = r"[a-z]+|\d+|[\u4e00-\u9fff]+"
ENDING = r"(?:ing|ed|es|e|y|(?<!s)s)$"  # of a word with more than four letters, else only an s
POOLED, TOLD = 0.5, 0.3  # what words count that other questions have, and that the entry's text has
MORE, LESS = 1.2, 0.9
UNKNOWN = 6  # what a word of a question counts that nothing has
# What the words count, at least, for which a case is told; and first, if they are such a share.
CASE, MOSTLY = 6, 0.25
# What answers is so much like one of its questions, by words that count so much; or else so far
# ahead of all others, the less far the more its words count, and less where nothing else decides.
ALIKE, LEAST = 0.5, 1
AHEAD, MUCH, ENOUGH = 0.6, 5, 4
SURE, BEHIND = 0.6, 0.5  # how close, to a message that no entry has; a share of the best
MESSAGE = r"(?:Error|Exception|error): "
# What somebody says that it is not.
DENIED = r"\b(?:it|this|that)(?:['’]s| is| was)(?: not|n['’]t) an? (?!number)[^.,;:()\n]*"
DENIED += r"|(?:\b(?:not|no|without|rather than|instead of)|n['’]t) (?:an? |the |any )?(?:[a-z]+ )?"
DENIED += r"(?:out of memory|oom|slow(?:er)?|hang(?:s|ing)?|stuck|frozen|leak(?:s|ing)?|nan)\b"
# And what an error of any library says in the same words.
DENIED += r"|\b(?:attribute|type|modulenotfound)error: [^\n]*"
DENIED += r"(?:has no attribute|unexpected keyword|no module named|positional arguments? but)[^\n]*"
# What somebody says is short, of letters; if it has several lines, in sentences; and is no log.
SAYS, LINE, LETTERS, CHINESE = 600, 200, 0.7, 0.5  # whose letters are words
SPEAKS = r"\b(?:the|is|are|my|when|after|but|don?|doesn?|only|i|no|not|why|how|what|with|yet|have"
SPEAKS += r"|it)\b|[\u4e00-\u9fff]{4}"
# In a post, somebody speaks of themselves or of a hang, asks at once, or most is said. So many
# letters are read and kept.
SOMEBODY = r"\b(?:i|my|we|our|hangs|(?:gets?|is|are) stuck|freezes)\b|^(?:why|how)\b"
READ, KEPT = 20_000, 1000
# What nobody says: code, pictures, links, names of people, headings, boxes to tick, tags.
UNSAID = r"```[\s\S]*?(?:```|(?![\s\S]))|!?\[[^\]\n]{0,99}\]\([^)\n]{0,500}\)"
UNSAID += r"|(?<![!-')-~])`[^`\n]{60,500}`"  # not what stands between two pieces of code
UNSAID += r"|^ *[-*] \*\*[^*\n]{1,40}\*\*[^\n]*"
UNSAID += r"|<[^<>\n]{1,300}>|https?:\S+|(?<!\S)@[\w-]+|^#{2,}[^\n]*|^ *[-*] \[.?\][^\n]*"
UNSAID += r"|^\[(?:bug|help|issue|qst|question)[^\]\n]{0,20}\]:?"
UNSAID += r"|(?<![\s\S])\[(?!info|debug|warn|error|rank)[a-z][a-z ./-]{1,20}\](?=[^\n]*\n\n)"
# A place or an address, not cuda:0 and not a time such as 6:40.
LOGGED = r"(?:^|\n)[\[{]|[|@]|[^\W\d](?<!cuda)(?<!gpu)(?<!GPU):\d|\d:(?:\d\d:\d|\d{3})"
LOGGED += r"|(?:\n[*-] [a-z]{2,12}: .*){3}|huggingface/tokenizers"  # of changes; a notice
# Of several lines, one that Python prints of an error.
PRINTED = r"^[^\w\n]*(?:(?:rank\d+|[A-Z]+)[^\w\n]{1,4})?"
PRINTED += r"(?:File [\"']|Traceback |[\w.]{1,99}(?:Error|Exception): )"


def words(text: str, once: bool = True) -> list[str]:
    """The words of a text, each `once`, without their endings; of Chinese, each two signs."""
    found = []
    for word in re.findall(WORD, text.lower()):
        if word > "\u4e00":
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        else:
            found.append(re.sub(ENDING if len(word) > 4 else "(?<!s)s$", "", word))
    return list(dict.fromkeys(found)) if once else found


def _telling(text: str) -> list[str]:
    return [word for word in words(text) if word not in page("logs")["silent"]]


def _rows(name: str) -> list[list[str]]:
    lines = (CATALOGUE / f"{name}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t") for line in lines if "\t" in line]


@cache
def documents() -> dict[str, tuple[list[list[str]], list[str]]]:
    """By address: the words of each question that an entry or section answers, and of its text."""
    asked: dict[str, list[list[str]]] = {}
    for question, targets in _rows("asked"):
        asked.setdefault(targets.split()[0], []).append(_telling(question))
    texts = {}
    for entry in catalogue().values():
        address = f"notebooks/{entry.page}#{entry.id}"
        names = (entry.title, entry.message, without_links(entry.in_brief[0]))
        asked.setdefault(address, []).extend(map(_telling, names))
        texts[address] = _telling(without_links(f"{entry.cause} {entry.fix}"))
    for address, questions in asked.items():
        questions.append(_telling(re.split("[#/]", address)[-1]))
    return {address: (asked[address], texts.get(address, [])) for address in asked}


@cache
def others() -> list[tuple[list[str], list[str]]]:
    """What stands in the book for words of a question."""
    return [(words(word), _telling(also)) for word, also in _rows("also")]


def weights_of(question: str) -> dict[str, float]:
    """What the words of a question count, and those that stand in the book for them."""
    rare, asked = rarity(), words(question)
    weights = {word: rare[word] for word in asked if word in rare}
    for needed, also in others():
        if all(word in asked for word in needed):
            weights = {word: rare[word] / 2 for word in also if word in rare} | weights
    return weights


def nearest(question: str, most: int = 3) -> list[str]:
    """The addresses of what answers a question best: of its questions one is nearest to it; none,
    if it is a guess. A false one costs more time than none.
    """
    question = re.sub(DENIED, " ", question, flags=re.IGNORECASE)
    found = _scores(question)
    ranked = sorted(found, key=lambda address: -found[address][0])
    if not ranked or not _is_sure(ranked, found, _kind(question)):
        return []
    scores = {address: found[address][0] for address in ranked}
    is_message = "\n" not in question.strip() and re.search(MESSAGE, question)
    if is_message and scores[ranked[0]] <= SURE:
        return []
    near: list[str] = []
    for address in ranked:
        if scores[address] > BEHIND * scores[ranked[0]] and not twins(address).intersection(near):
            near.append(address)
    return near[:most]


def _is_sure(ranked: list[str], found: dict[str, tuple[float, float, float]], kind: str) -> bool:
    """Whether the best is likely: its question is nearly this one, or no other comes close."""
    best, *others = ranked
    score, alike, weight = found[best]
    second = next((found[other][0] for other in others if other not in twins(best)), 0)
    ahead = score * (score / second) ** 2 if second else math.inf
    is_ahead = ahead >= AHEAD and ahead * weight >= (MUCH if kind else ENOUGH)
    # A section that is only ahead says less of a kind of symptom than what decides in it.
    is_ahead = is_ahead and (not kind or "/errors_" in best)
    return is_ahead or (alike >= ALIKE and weight >= LEAST)


def decides(question: str) -> tuple[str, int]:
    """The kind of symptom, of ``deciding.toml``, that a question is about, or ``""``, and which of
    its cases it has most words of, or -1.
    """
    question = re.sub(DENIED, " ", question, flags=re.IGNORECASE)
    said, kind = " ".join(words(question, once=False)), _kind(question)
    cases = kinds()[kind][1] if kind else []
    has = [sum(p.count(" (?:") + 1 for p in of if re.search(p, said)) for of in cases]
    return kind, has.index(max(has)) if any(has) else -1


def _kind(question: str) -> str:
    """The kind of symptom whose words a question, without what it denies, has first; a hang before
    all, files after all.
    """
    said = " ".join(words(question, once=False))
    places = [
        ((kind != "hangs") + (kind == "files"), found.end(), kind)
        for kind, (of, _) in kinds().items()
        for found in (re.search(phrase, said) for phrase in of)
        if found
    ]
    return min(places)[2] if places else ""


@cache
def kinds() -> dict[str, tuple[list[str], list[list[str]]]]:
    """By kind of symptom: the phrases that say it, and those of each of its cases, as regular
    expressions; between two words may be one more.
    """

    def lists(text: str) -> list[str]:
        phrases = [" (?:[^ ]+ )?".join(words(part, once=False)) for part in text.split(",")]
        return [f"(?<![^ ]){phrase}(?![^ ])" for phrase in phrases if phrase]

    told = {}
    for kind, of in page("deciding").items():
        _, *cases = of["ask"].split("\n- ")
        firsts = ([w for head, w in of["first"].items() if case.startswith(head)] for case in cases)
        told[kind] = lists(of["words"]), [lists(*first or [""]) for first in firsts]
    return told


def _scores(question: str) -> dict[str, tuple[float, float, float]]:
    """Of each address, how much it is like a question in all; how much the question is like that of
    its own that is nearest; and what the words count that these two share, of all that it has.
    """
    rare = rarity()
    said = [word for word in _telling(question) if word in rare or re.match("[a-z]{3}", word)]
    whole = sum(rare.get(word, UNKNOWN) for word in said)
    weights = weights_of(question)
    scores = {}
    for address, (questions, text) in documents().items():
        alike, counts, pooled = 0.0, 0.0, set()
        for words_of in questions:
            if shared := [word for word in words_of if word in weights]:
                pooled.update(shared)
                weight = sum(weights[word] for word in shared)
                size = sum(rare[word] for word in words_of)
                alike = max(alike, min(1, weight / (whole or weight)) * math.sqrt(weight / size))
                counts = max(counts, weight * weight / size)
        told = sum(weights[word] for word in text if word in weights and word not in pooled)
        more = POOLED * sum(weights[word] for word in sorted(pooled)) + TOLD * told
        if alike or told:
            score = (alike + more / (whole or sum(weights.values()))) * weight_of(address)
            scores[address] = (round(score, 9), round(alike, 9), round(counts, 9))
    return scores


def what_to_do(question: str, entry: Error) -> str:
    """Of what an entry says to do, the case that a question is about, as a log would be, or else
    that has most of its words; after the first sentence, if these are few of the question's.
    """
    cases, do = bullets(entry), entry.in_brief[1]
    if ours := about(entry, question.split("\n"), 0, 0):
        return cases[ours[0]].removeprefix("- ")
    head = words(f"{entry.title} {entry.fix.partition(cases[0])[0] if cases[0] else entry.fix}")
    weights = {word: weight for word, weight in weights_of(question).items() if word not in head}

    shares = [sum(weights.get(word, 0) for word in words(case)) for case in cases]
    if (best := max(shares)) <= CASE:
        return do
    case = cases[shares.index(best)].removeprefix("- ")
    return case if best > MOSTLY * sum(weights.values()) else f"{do} Or: {case}"


def weight_of(address: str) -> float:
    """Who says what they see has no message: an entry that has none counts more, others less."""
    entry = catalogue().get(address.rpartition("#")[2])
    return 1 if not entry or "errors_" not in address else MORE if entry.kind == "silent" else LESS


@cache
def twins(address: str) -> set[str]:
    """The addresses beside which this one says nothing new: of a section, the entries that lead to
    it; of an entry, the section that explains most; of either, its page; of a page, all on it.
    """
    on, _, anchor = address.removeprefix("notebooks/").partition("#")
    entry = catalogue().get(anchor) if on.startswith("errors_") else None
    others = {f"notebooks/{chapter}" for chapter in entry.chapters[:1]} if entry else set()
    for other in catalogue().values():
        if f"{on}#{anchor}" in other.chapters:
            others.add(f"notebooks/{other.page}#{other.id}")
    others |= {other for other in documents() if other.startswith(f"{address}#")}
    return others | ({address.partition("#")[0]} - {address})


@cache
def rarity() -> dict[str, float]:
    """How much a word tells: one that few documents have tells most."""
    held = Counter(word for asked, text in documents().values() for word in {*chain(*asked), *text})
    return {word: math.log(1 + len(documents()) / count) for word, count in held.items()}


def said_in(text: str) -> str:
    """What somebody says in a text: all of it, or the lines around code and logs."""
    flags = re.MULTILINE | re.IGNORECASE | re.ASCII
    said = re.sub(UNSAID, " ", text[:READ], flags=flags)
    if said == text and is_said(text):
        return text
    lines = said.strip().split("\n")
    spoken = (line for at, line in enumerate(lines) if _speaks(line, at == 0))
    told = "\n".join(line for line in spoken if not re.match(PRINTED, line, re.ASCII))
    most = 2 * len(told) > len("\n".join(lines))
    if told and (most or re.search(SOMEBODY, told.lower(), re.ASCII)):
        return told[:KEPT]
    return text if is_said(text) else ""


def is_said(text: str) -> bool:
    """Whether a text is what somebody says, and no log."""
    text = text.strip()
    if len(text) >= SAYS:
        return False
    is_line = "\n" not in text
    printed = not is_line and re.search(PRINTED, text, re.MULTILINE | re.ASCII)
    return not printed and _speaks(text, len(text) < LINE and is_line)


def _speaks(text: str, is_title: bool) -> bool:
    """Whether a text, which has no verb if it is a title, is neither code nor a line of a log."""
    letters = len(re.findall(r"[^\W\d_]", text))
    share = letters / max(1, len(re.sub(r"\s", "", text)))
    least = CHINESE if re.search("[\u4e00-\u9fff]{2}", text) else LETTERS
    speaks = is_title or re.search(SPEAKS, text.lower(), re.ASCII)
    return bool(speaks) and share > least and not re.search(LOGGED, text, re.ASCII)
