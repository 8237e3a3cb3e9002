"""The first error of a log that does not follow from another, and where in the program it was."""

import re
from collections.abc import Sequence
from itertools import islice

from torchclinic.errors.entries import KINDS
from torchclinic.errors.finding import Match, find, line_of
from torchclinic.errors.squeezing import excerpt, unprefixed, without_colours
from torchclinic.process_group import PEER_IS_GONE

MOST = 51  # errors that are looked at: all may follow
ABOVE, MESSAGE = 100, 5  # lines of a traceback, of what an error says
# The last line of a traceback; a frame, with its function and code; and what is none of the
# reader's files, such as what pip writes for a command.
FAILURE = r"[\w.]{0,200}(?:Error|Exception)(?:: .{1,300}|:?$)|[\w./-]{1,100}\.py: .{1,300}"
TELLING = "Error", "Exception", ".py: "  # a failure has one in its line; the last, a program's own
FRAME = r"(?:File [\"'](.{1,300}?)[\"']|(Cell In ?\[\d{1,5}\])), line (\d{1,7})"
FRAME += r"(, in [\w.]{1,80}(?![\w.(]))?[^\n]*"
FRAME += r"(?:\n(?:\[rank\d+\]:)? *(?!File |[\w.]{1,99}(?:Error|Exception))(\S[^\r\n]{0,200}))?"
OF_OTHERS = r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python"
OF_OTHERS += r"|<(?:frozen|string|eval_with_key)|[/\\](?:bin|Scripts)[/\\][\w.-]+['\"]"


def first_failure(lines: Sequence[str]) -> tuple[int, str] | None:
    """In which line, from 0, the first error stands that does not follow from another rank's, and
    what it says.
    """
    telling = (n for n, line in enumerate(lines) if any(word in line for word in TELLING))
    texts = ((number, unprefixed(lines[number][:600]).strip()) for number in telling)
    failures = (found for found in texts if re.match(FAILURE, found[1], re.ASCII))
    for number, text in islice(failures, MOST):
        follows = any(match.error.kind == "follows" for match in find(text))
        if not follows and not PEER_IS_GONE.search(text):
            return number, excerpt(text, 0)
    return None


def program_line(lines: Sequence[str], number: int) -> str | None:
    """The last line of the reader's program in the traceback above a line, with its function and
    code; "" if all its frames are of libraries, None if there is no frame.
    """
    frames = False
    for at in range(number - 1, max(0, number - ABOVE) - 1, -1):
        shown = "\n".join(line[:600] for line in lines[at : min(at + 2, number)])
        if found := re.match(f"[^\n]*?{FRAME}", without_colours(shown), re.ASCII):
            frames = True
            if not re.search(OF_OTHERS, found[0].partition("\n")[0]):
                code = f": {found[5]}" if found[1] and found[5] else ""
                return f"{found[1] or found[2]}, line {found[3]}{found[4] or ''}{code}"
        elif "Traceback (most recent" in lines[at]:
            break
    return "" if frames else None


def unknown_root(log: str, found: list[Match]) -> dict:
    """The first error of a log, if no entry knows it and a traceback or the program tells it: its
    ``line``, its ``text``, and where in the ``program`` it came up.
    """
    lines = log.split("\n")
    if any(match.file for match in found) or not (first := first_failure(lines)):
        return {}
    number, text = first
    where = program_line(lines, number)
    where = "" if where is None and ".py: " in text else where
    message = "\n".join(lines[max(0, number - 2) : number + MESSAGE])
    # Handled or wrapped, it gave another error, and that one has an entry.
    known = found if "above exception" in message else find(message)
    if where is None or any(KINDS[match.error.kind] == 0 for match in known):
        return {}
    return {"line": line_of(log, number), "text": text, "program": where}
