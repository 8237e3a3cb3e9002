"""Where a rank was or failed, told by the frames of the user's own code: a cell, not a library."""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait

# By the file name in a traceback: how a reader knows the cell, and its lines.
Cells = dict[str, tuple[str, list[str]]]


def cell_sources() -> Cells:
    """The notebook's cells: for each, its file name, its label and its lines."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    cells = {}
    for file, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(file):  # source that is in no file
            label = file
            if shell:
                label = " ".join(shell.compile.format_code_name(file) or [file])
            cells[file] = (label, entry[2])
    return cells


def stack_of(pid: int, answers: Connection | None, cells: Cells) -> list[str]:
    """Where a running process is, as its signal handler tells through `answers`."""
    text = ""
    if answers:
        os.kill(pid, signal.SIGUSR1)
        # It comes in many small writes: read until nothing more does.
        while wait([answers], 0.2 if text else 1.0) and (c := os.read(answers.fileno(), 65536)):
            text += c.decode(errors="replace")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', text)
    lines = []
    for file, line, name in ([f for f in frames if not _of_a_library(f[0])] or frames)[:3]:
        lines.append(f"  {_label(file, cells)}, line {line}, in {name}")
        lines.append(f"    {linecache.getline(file, int(line)).strip()}")
    return lines


def describe(error: BaseException, cells: Cells) -> str:
    """Type, message and the traceback's frames of the user's own code."""
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code}"
    report = traceback.TracebackException.from_exception(error)
    headline = "".join(report.format_exception_only()).strip()
    any_frames, part = False, report
    while part is not None:
        frames = [
            traceback.FrameSummary(_label(f.filename, cells), f.lineno, f.name, line=f.line)
            for f in part.stack
            if not _of_a_library(f.filename)
        ]
        part.stack = traceback.StackSummary.from_list(frames)
        any_frames |= bool(frames)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    if not any_frames:
        return headline
    # The headline is where readers look first; at the traceback's end it would only be repeated.
    frames = "".join(report.format()).rstrip().removesuffix(headline).rstrip()
    return f"{headline}\n\n{frames}"


def _label(file: str, cells: Cells) -> str:
    """How a reader knows `file`: a notebook's cell by its number."""
    return cells[file][0] if file in cells else file


def _of_a_library(file: str) -> bool:
    launching = os.path.join(os.path.dirname(__file__), "launching.py")
    ours = (launching, os.path.dirname(os.__file__), "<frozen", "<string>")
    return "site-packages" in file or file.startswith(ours)
