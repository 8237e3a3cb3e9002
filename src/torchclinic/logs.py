"""From the logs of several ranks to the rank that failed first.

They are files, one for each rank, or a folder, such as ``torchrun --log-dir=logs --redirects=3``
makes: ``logs/RUN/attempt_N/LOCAL_RANK/stderr.log``.
"""

import codecs
import difflib
import io
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from torchclinic import UserError, errors, printable
from torchclinic.errors.entries import KINDS
from torchclinic.errors.finding import GAP, NEAR
from torchclinic.errors.roots import first_failure, program_line
from torchclinic.errors.squeezing import RANK_OF_FAILURE, TASK, rank_of, without_colours

MOST = 24_000_000  # about so many characters of all logs are held
PART = 2**17  # of which so many are read at a time, or fewer if there are many logs
# Whose a file is, by its name.
WHOSE = re.compile(r"(rank\D?|attempt_\d+[/\\])(\d{1,6})(?:[/\\]\w+\.log|[^/\\]*)$", re.ASCII)
# A time of glog, loggers and the like, by its parts.
TIME = re.compile(r"(?:(\d{4})-?)?(\d\d)-?(\d\d)[ T_](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?", re.ASCII)


class WithoutMiddle(str):
    """What is kept of a long log; `begins`: which line here, from 0, is which there, from 1."""

    begins: Sequence[tuple[int, int]]


def read(names: list[str]) -> dict[str, str]:
    """The text of each log by its name: of files, of folders, of the standard input (``-``)."""
    logs = [log for name in names for log in _logs_in(name)]
    texts = {log: _text(log, MOST // len(logs)) for log in logs}
    if cut := [printable(log) for log in logs if isinstance(texts[log], WithoutMiddle)]:
        more = f" and of {len(cut) - 1} more" * (len(cut) > 1)
        warning = f"of {cut[0]}{more}, too long to be read whole, the middle is left out."
        print(f"torchclinic explain: {warning}", file=sys.stderr)
    if not any(map(str.strip, texts.values())):
        raise UserError("nothing to read there. Errors go to the standard error: add 2>&1.")
    return texts


def said(names: list[str]) -> str:
    """What somebody says instead of naming logs: words, or a message, with blanks or Chinese."""
    text = " ".join(names)
    is_text = len(names) > 2 or re.search(r"\s|[\u4e00-\u9fff]", names[0])
    no_file = not any(map(os.path.exists, names)) and not text.endswith((".log", ".txt", ".out"))
    return text if is_text and no_file and text.strip() else ""


def _logs_in(name: str) -> list[str]:
    """A file, or the logs of a folder; if torchrun made it, of the last run the last attempt."""
    if not os.path.isdir(name):
        return [name]
    logs = {log: log.parent.parent for log in Path(name).rglob("*.log") if not log.is_dir()}
    if not logs:
        raise UserError(f"{name} holds neither logs (*.log) nor dumps of the flight recorder.")
    last = max(logs.values(), key=lambda a: (a.parent.stat().st_mtime, len(a.name), a.name))
    return sorted(str(checked(log, named=False)) for log in logs if logs[log] == last)


def _parts(name: str, size: int) -> Iterator[str]:
    """What a file or the standard input holds, in whatever encoding a shell wrote it: whole lines,
    of about `size` characters together.
    """
    raw: Any = sys.stdin.buffer if name == "-" else checked(name).open("rb", 0)
    file = io.BufferedReader(raw)
    start = file.peek(4)
    if name.endswith((".pt", ".pth", ".ckpt", ".safetensors")) or start.startswith(b"PK\x03\x04"):
        raise UserError(f"{name} holds no text. Of a checkpoint, ask torchclinic inspect.")
    of_windows = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if of_windows else "utf-8-sig"
    with io.TextIOWrapper(file, encoding, "replace", newline="\n") as text:
        while part := text.read(size) + text.readline(size):
            # Without a mark at its start, UTF-16 still is ASCII with a NUL beside each byte.
            yield part.replace("\0", "")


def _text(name: str, most: int) -> str:
    """A log; of one with more than `most` characters, the first half of these and the last."""
    size = min(PART, most // 4)
    half = most // size // 2
    parts = _parts(name, size)
    begun, last = "".join(islice(parts, half)), deque[str]()
    line, cut = 1 + begun.count("\n"), False
    for part in parts:
        last.append(part)
        if len(last) > half:
            line, cut = line + last.popleft().count("\n"), True
    if not cut:
        return begun + "".join(last)
    # No pattern spans the gap.
    log = WithoutMiddle(f"{begun}\n{'.' * (GAP + 1)}\n{''.join(last)}")
    log.begins = ((0, 1), (begun.count("\n") + 2, line))
    return log


def checked(name: str | Path, *, named: bool = True) -> Path:
    """A file, or a pipe that the user has `named`; an error for what may never end."""
    path = Path(name)
    if named and not os.path.exists(name):
        raise UserError(_no_such(str(name)))
    if not (path.is_file() or (named and (path.is_fifo() or path.is_dir()))):
        raise UserError(
            f"{name} is a device, a pipe, a socket or a dead link: give the files of logs, or - "
            "for the standard input."
        )
    if not named and os.path.realpath(path).startswith(("/proc/", "/sys/")):
        raise UserError(f"{name} is a link into /proc or /sys, where files may have no end.")
    return path


def _no_such(name: str) -> str:
    if not name:
        return "give a FILE with a log, pipe one in, or name an entry (see --help)."
    near = difflib.get_close_matches(name, errors.catalogue(), cutoff=0.5)
    advice = f"The nearest entries: {', '.join(near)}" if near else "Give the file of a log."
    return f"no file and no entry is called {name}. {advice}"


def find(texts: dict[str, str], first: dict[str, str]) -> list[errors.Match]:
    """What `errors.find` finds in each log, that of the `first_to_fail` before the others."""
    found = {}
    for name in sorted(texts, key=lambda name: name != first.get("file")):
        file = name if len(texts) > 1 else ""
        for match in errors.find(texts[name]):
            whose = {"rank": match.rank or _whose(name), "file": printable(file)}
            found.setdefault(match.error.id, replace(match, **whose))
    return sorted(found.values(), key=lambda match: KINDS[match.error.kind])


def first_to_fail(texts: dict[str, str]) -> dict[str, str]:
    """Who failed first, and what it ``says`` to a reader; of several logs, the earliest error that
    does not follow from another rank's: its ``text``, its ``rank`` and ``file``.
    """
    several = texts.items() if len(texts) > 1 else ()
    failures = {name: failure for name, text in several if (failure := _failure(text))}
    if not failures:
        return _named_first(without_colours("\n".join(texts.values())))
    times = _in_one_form({name: time for name, (time, *_) in failures.items()})
    evidence = "by the times in the logs"
    if len(failures) == 1:
        evidence = "the only one with an error of its own"
    elif [*times.values()].count(min(times.values(), default=())) != 1:
        times = {name: os.stat(0 if name == "-" else name).st_mtime for name in failures}
        evidence = "by the times of the files"
    name = min(failures, key=lambda name: times.get(name, ()))
    _, rank, text, where = failures[name]
    rank = rank or _whose(name)
    says = f"{rank.capitalize() or 'One'} failed first, {evidence}, in {printable(name)}: {text}"
    says += f" ({printable(where)})" * bool(where)
    return {"rank": rank, "file": name, "text": text, "says": says}


def _in_one_form(times: dict[str, tuple]) -> dict[str, tuple]:
    """The times, so that they can be compared: none if one is lacking.

    Not every log tells years or fractions of seconds. Without years, a log that ends in January
    comes after one that ends in December.
    """
    if not all(times.values()):
        return {}
    years, months, *_, parts = zip(*times.values(), strict=True)
    dated, digits = all(years), min(map(len, parts))
    turned = not dated and {"01", "12"} <= {*months}
    return {
        name: (year * dated, turned and month < "07", month, *rest, part[:digits])
        for name, (year, month, *rest, part) in times.items()
    }


def _named_first(log: str) -> dict[str, str]:
    """Whom torchrun's summaries or srun name first."""
    causes = [text[:400] for text in log.split("Root Cause (first observed failure):")[1:]]
    # Of several summaries, as of several hosts, the one with the earliest time.
    for text in sorted(causes, key=lambda text: text.partition("time")[2][:40]):
        if found := RANK_OF_FAILURE.search(text):
            rank = f"rank {found[1]}"
            return {"rank": rank, "says": f"torchrun says that {rank} failed first."}
    if found := TASK.search(log):
        host, task, outcome = found.groups()
        says = f"The first that srun names is task {task} on {host}: {outcome.strip()}."
        return {"rank": f"task {task}", "says": says}
    return {}


def _failure(log: str) -> tuple[tuple, str, str, str] | None:
    """Time, rank and text of a log's first error that does not follow from another rank's, and
    where in the program it came up.
    """
    lines = log.split("\n")
    if not (first := first_failure(lines)):
        return None
    number, text = first
    near = without_colours("\n".join(lines[max(0, number - NEAR + 1) : number + 1]))
    time = next(iter(TIME.findall(near)[-1:]), ())
    return time, rank_of([lines[number]], 0), text, program_line(lines, number) or ""


def _whose(name: str) -> str:
    found = WHOSE.search(name)
    return f"{'' if found[1].startswith('rank') else 'local '}rank {found[2]}" if found else ""
