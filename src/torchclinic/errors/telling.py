"""What the catalogue says of a log: for a terminal, and for programs."""

import json
import re
from itertools import islice

from torchclinic import printable
from torchclinic.errors import asking
from torchclinic.errors.cases import this_case_first
from torchclinic.errors.entries import KINDS, catalogue, page, published
from torchclinic.errors.finding import Match, find, line_of, other_program, patterns_of, places_of
from torchclinic.errors.roots import first_failure, program_line, unknown_root
from torchclinic.errors.squeezing import excerpt, signs, squeeze
from torchclinic.errors.terminal import filled, without_links, wrapped

FOLLOWS = {"follows": "It often follows from another error."}
FOLLOWS["warning"] = "It is a warning: the program goes on after it."
NOT_PYTORCH = """This may not be PyTorch: the log seems to come from {}, and torch is nowhere in
it. If it is PyTorch, give the whole log, from its first line."""
ASK = """To narrow it down, try one process, `num_workers=0`, float32 and the CPU: what ends it
names the part. To ask others, collect: the whole log from its first line, of every rank; the
command that started it; what `torchclinic doctor` prints; and the smallest program that still
fails."""
UNKNOWN = "No entry of the catalogue has these words."
HEALTHY = """There is no error in this log: no traceback, and none of the words that errors begin
with. Say what you see instead: torchclinic explain "it hangs after the first epoch"."""
NEAREST = "Guesses, the nearest to what you see first:"
NOT_CLOSE = """Nothing in the book is close to what you say. Which is it: an error, a hang, too
slow, too much memory, or wrong numbers? Say that, and when it begins."""
DECIDES = "No entry fits what you say. This decides:"
NEAREST_MORE = "More of an entry: torchclinic explain, with its name. Sections are the book's."
# What tells a program's sentence from a reader's; and what torchrun says when a rank has failed.
OF_A_PROGRAM = r"(?:^|\s)--\w|\.py: "
OF_TORCHRUN = r"^.*(?:closing signal SIG|failed \(exitcode)"
NOTICE = "This log has no error message, but this notice:"


def explain(log: str, found: list[Match] | None = None) -> str:
    """What `find` finds in a log (or has `found`), for a terminal."""
    found = find(log) if found is None else found
    if other := not found and other_program(log):
        return "\n\n".join([wrapped(NOT_PYTORCH.format(other)), ASK])
    said = "" if found else asking.said_in(log)
    if said and said == log:
        return _answer(log)
    root, near = _root(log, found), _near(said, log)
    kinds = {match.error.kind for match in found}
    fails = first_failure(log.split("\n")) is not None
    is_silent = kinds <= {"follows", "warning"} and kinds != {"warning"}
    if is_silent and (fails or not said) and not (root or near):
        root = _last_words(log)
    if not found:
        if not near and not signs(log):
            return NOT_CLOSE if said else HEALTHY
        parts = [UNKNOWN if fails or (signs(log) and not near) else "", root, *near, ASK]
        return "\n\n".join(part for part in parts if part)
    first, *others = found
    error = first.error
    is_echo = KINDS[error.kind] > 0  # of what no entry knows
    also = "\n".join(filter(None, ["" if is_echo else root, *map(_also, others)]))
    where = f"{first.line}{', of ' * bool(first.rank)}{first.rank}: {first.text}"
    parts = [
        root if is_echo else "",
        NOTICE if _only_notices(log, found) else "",
        filled(f"In {first.file or 'your log'}, line", where),
        _yours(_program(first)),
        error.heading,
        filled("Why:", error.cause),
        filled("Do:", this_case_first(error, first.place)),
        FOLLOWS.get(error.kind),
        also and f"Also in your log:\n{also}",
        f"More: torchclinic explain {error.id}",
    ]
    return "\n\n".join(filter(None, parts))


def _answer(said: str) -> str:
    """The entries and sections that are nearest to what somebody says that they see."""
    near = _near(said, said)
    is_message = first_failure(said.split("\n")) is not None
    unknown = is_message or (signs(said) and not near)
    head, *below = near or ["" if unknown else NOT_CLOSE]
    speaks = re.search(asking.SOMEBODY, said.lower(), re.ASCII)
    words = [_last_words(said)] if not speaks and re.search(OF_A_PROGRAM, said) else []
    return "\n\n".join([*words, f"{UNKNOWN} {head}".strip() if unknown else head, *below, ASK])


def _near(said: str, log: str) -> list[str]:
    """What is nearest to what somebody says, below its title; or what decides; or nothing."""
    near = [wrapped(_brief(address, said), "  ", "    ") for address in asking.nearest(said)]
    if near:
        return [NEAREST, "\n".join(near), NEAREST_MORE]
    kind, first = _decides(said, log)
    if not kind:
        return []
    read = page("deciding")[kind]["read"]
    cases = filled("", "\n- ".join(_cases(kind, first))).strip()
    return [DECIDES, cases, f"More: {published(read) or read}"]


def _cases(kind: str, first: int) -> list[str]:
    """What to look at in a kind of symptom, and its cases, one of them before the others."""
    head, *cases = without_links(page("deciding")[kind]["ask"]).strip().split("\n- ")
    return [head, *([cases.pop(first)] if first >= 0 else []), *cases]


def _decides(said: str, log: str) -> tuple[str, int]:
    """What `asking.decides`; nothing where a log has a message, which asks for itself."""
    return ("", 0) if not said or first_failure(log.split("\n")) else asking.decides(said)


def _root(log: str, found: list[Match]) -> str:
    """The first error of a log, if no entry knows it, and where in the program it came up."""
    if not (root := unknown_root(log, found)):
        return ""
    says = f"No entry knows the first error, in line {root['line']}: {root['text']}"
    return "\n".join(filter(None, [wrapped(says, "  ", "    "), _yours(root["program"])]))


def _yours(program: str | None) -> str:
    return wrapped(f"Your line: {printable(program)}", "  ", "    ") if program else ""


def _last_words(log: str) -> str:
    """The error of a program, or else what it said before it, or torchrun of it, was silent."""
    lines = re.split(OF_TORCHRUN, log, maxsplit=1, flags=re.MULTILINE)[0].split("\n")
    own = [i for i, line in enumerate(lines) if line.strip() and "torch/distributed/" not in line]
    says = "Its error" if (told := first_failure(lines)) else "The program's last words"
    if not told and own:
        told = own[-1], excerpt(lines[own[-1]], 0)
    at = f"{says}, in line {line_of(log, told[0])}: {told[1]}" if told else ""
    return wrapped(at, "  ", "    ")


def _brief(address: str, said: str) -> str:
    """A line for an entry, with what to do in the case that is said, or for a section."""
    page, _, anchor = address.removeprefix("notebooks/").partition("#")
    if page.startswith("errors_") and (entry := catalogue().get(anchor)):
        do = asking.what_to_do(said, entry)
        return without_links(f"{anchor}: {entry.title}. {entry.in_brief[0]} What to do: {do}")
    section = f"{page}#{anchor}".rstrip("#")
    leads = [e for e in catalogue().values() if e.chapters[:1] == [section]]
    leads.sort(key=lambda entry: entry.kind != "silent")  # of what one sees, before an error
    more = "; ".join(_brief(f"notebooks/{e.page}#{e.id}", said) for e in islice(leads, 1))
    where = (published(section) if address.startswith("notebooks/") else "") or section
    return f"{where}: {more}" if more else where


def _only_notices(log: str, found: list[Match]) -> bool:
    """Whether `found` are warnings, and the log has no sign of an error but in their lines."""
    if any(match.error.kind != "warning" for match in found):
        return False
    patterns = [pattern for match in found for pattern in patterns_of(match.error.id)]
    lines = squeeze("\n".join(told)) if (told := signs(log)) else []
    return all(any(places_of(pattern, line) for pattern in patterns) for line in lines)


def as_json(log: str, found: list[Match], **more: object) -> str:
    """What `explain` says, for programs; entries of `found` that were asked for have no ``line``.

    ``version`` changes only if a field goes or changes its meaning; new ones may come.
    """
    record = {"matches": list(map(_record, found)), "other_program": other_program(log)}
    said = "" if found or record["other_program"] else asking.said_in(log)
    if said and (near := asking.nearest(said)):
        more["nearest"] = near
    elif (told := _decides(said, log))[0]:
        head, *cases = _cases(*told)
        read = published(read := page("deciding")[told[0]]["read"]) or read
        more |= {"decides": told[0], "deciding": {"ask": head, "cases": cases, "read": read}}
    if root := unknown_root(log, found):
        more["unknown"] = root
    return json.dumps({"version": 1, **record, **more}, indent=1)


def _program(match: Match) -> str:
    """The line of the reader's program that led to an error; a warning has its own."""
    lines, number, _ = match.place
    return (KINDS[match.error.kind] == 0 and program_line(lines, number)) or ""


def _record(match: Match) -> dict:
    error = match.error
    fields = {name: getattr(match, name) for name in ("line", "text", "rank", "file")}
    fields |= {name: getattr(error, name) for name in ("kind", "message")}
    fields |= {name: without_links(getattr(error, name)).strip() for name in ("cause", "fix")}
    fields |= {"program": _program(match), "url": published(f"{error.page}#{error.id}")}
    return {"id": error.id, "title": error.title, **fields}


def _also(match: Match) -> str:
    line = f"line {match.line}{f' of {match.file}' if match.file else ''}"
    where = ", ".join(filter(None, [line, match.rank, match.error.id]))
    cause = without_links(match.error.in_brief[0])
    return wrapped(f"{where}: {cause} {FOLLOWS.get(match.error.kind, '')}", "  ", "    ")
