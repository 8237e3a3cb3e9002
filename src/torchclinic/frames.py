"""Where a call failed, told by frames that a reader knows: a cell, not a library."""

import linecache
import os
import re
import sys
import traceback

STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")

# By the file name in a traceback: how a reader knows the cell, and its lines.
Cells = dict[str, tuple[str, list[str]]]


def cell_sources() -> Cells:
    """The notebook's cells: for each, its file name, its label and its lines."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    # Before IPython 8, as on Colab, a traceback shows the file name itself.
    label_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: [file])
    cells = {}
    for file, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(file):  # source that is in no file
            label = " ".join(label_of(file) or [file])
            cells[file] = (label, entry[2])
    return cells


def places(dump: str, *, hide: str) -> list[str]:
    """The innermost frames of the user's own code in what faulthandler wrote, as lines.

    Not one of the file or folder `hide`, which called the user's function.
    """
    # It writes letters beyond ASCII as \xf3, \u30e2 or \U0001f600.
    escaped = r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))"
    dump = re.sub(escaped, lambda found: chr(int(found[1] or found[2] or found[3], 16)), dump)
    # One stack a thread, the newest thread first: the last stack is the main thread's.
    stacks = re.split("(?i)thread 0x", dump)
    frames = [re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack) for stack in stacks]
    frames = next(filter(None, reversed(frames)), [])
    cells = cell_sources()
    lines = []
    for file, line, name in ([f for f in frames if not _of_a_library(f[0], hide)] or frames)[:3]:
        lines.append(f"  {_label(file, cells)}, line {line}, in {name}")
        lines.append(f"    {linecache.getline(file, int(line)).strip()}")
    return lines


def describe(error: BaseException, cells: Cells, *, hide: str) -> str:
    """Type, message and the traceback's frames of the user's own code, as `places` has them."""
    report = traceback.TracebackException.from_exception(error, compact=True)
    headline = "".join(report.format_exception_only()).strip()
    parts = [report]
    for part in parts:
        part.stack = traceback.StackSummary.from_list(
            traceback.FrameSummary(_label(f.filename, cells), f.lineno, f.name, line=f.line)
            for f in part.stack
            if not _of_a_library(f.filename, hide)
        )
        parts += filter(None, [part.__cause__ or part.__context__])
    text = headline
    if any(part.stack for part in parts):
        # The headline is where readers look first; at the traceback's end it would be repeated.
        frames = "".join(report.format()).rstrip().removesuffix(headline).rstrip()
        text = f"{headline}\n\n{frames}"
    # Nobody reads megabytes, and to look them up in the catalogue takes long.
    return text if len(text) < 10**5 else f"{text[:50_000]}\n[...]\n{text[-50_000:]}"


def _label(file: str, cells: Cells) -> str:
    return cells[file][0] if file in cells else file


def _of_a_library(file: str, hide: str) -> bool:
    # site-packages; dist-packages in Debian
    return "-packages" in file or file.startswith((hide, "<frozen", "<string>", STANDARD_LIBRARY))
