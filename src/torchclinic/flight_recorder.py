"""From the dumps of PyTorch's flight recorder to the rank that did not make a call.

A dump holds the last collectives of one rank, as a pickle of plain data. Nearly every hang has one
cause: a rank did not make a call that the others made, or made it with something else. So the calls
of all ranks are compared, group by group, by their number.
"""

import io
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchclinic import UserError, errors, logs, printable
from torchclinic.errors.terminal import filled

KNOWN = errors.page("flight_recorder")


class _Data(pickle.Unpickler):
    """Makes plain data alone: a dump may come from a stranger, and what it imports would run."""

    def find_class(self, module: str, name: str) -> Any:
        raise TypeError


# --- reading ------------------------------------------------------------------------------------


def dumps_in(paths: list[str]) -> list[Path]:
    """The dumps in a folder, or the files; none if they are no dumps."""
    files = [Path(path) for path in paths if path]
    if len(files) == 1 and os.path.isdir(files[0]):  # which words too long for a name are not
        named = [f for f in sorted(files[0].iterdir()) if re.search(KNOWN["rank"], f.name)]
        files = list(filter(_begins_as_dump, named))
    if not any(map(_begins_as_dump, files)):
        return []
    return [logs.checked(file) for file in files]


def _begins_as_dump(file: Path) -> bool:
    if not os.path.isfile(file):
        return False
    with file.open("rb") as opened:
        return _is_dump(opened.read(4096))


def _is_dump(start: bytes) -> bool:
    named = b"version" in start and (b"entries" in start or b"pg_config" in start)
    return start.startswith(b"\x80\x02}") and named


def read(contents: Iterable[tuple[str, bytes]]) -> tuple[dict[int, list[dict]], list[int]]:
    """Each rank's calls, from the dumps' names and contents; and the ranks that have no dump."""
    ranks, names, known = {}, {}, set()
    for name, content in contents:
        if not (found := re.search(KNOWN["rank"], name)):
            raise _error("nameless", name=name)
        if (rank := int(found[1])) in ranks:
            raise _error("twice", name=names[rank], other=name, ranks=_ranks([rank]))
        dump, names[rank] = _load(name, content), name
        try:
            whose = {key: group["ranks"] for key, group in dump["pg_config"].items()}
            ranks[rank] = [_call(entry, whose) for entry in dump["entries"]]
            configs = " ".join({*whose.values()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            version = printable(dump["version"])[:9]
            raise _error("version", name=name, version=version) from error
        known |= {int(other) for other in re.findall("[0-9]{1,6}", configs)}
    known |= set(range(max(ranks)))
    if len(ranks) == 1 and known - set(ranks):
        raise _error("one", name=name)
    _check_run(ranks)
    return dict(sorted(ranks.items())), sorted(known - set(ranks))


def _error(word: str, **gaps: object) -> UserError:
    return UserError(KNOWN["input"][word].format(**gaps))


def _load(name: str, content: bytes) -> dict:
    try:
        dump = _Data(io.BytesIO(content)).load()
        version = printable(dump["version"])
    except Exception as error:  # of whatever kind an unpickler ends with
        unknown = isinstance(error, KeyError | TypeError) or not _is_dump(content[:4096])
        raise _error("none" if unknown else "cut", name=name) from error
    if not version.startswith("2."):
        raise _error("version", name=name, version=version[:9])
    return dump


def _call(entry: dict, whose: dict[str, str]) -> dict:
    """What is compared of an entry; it is alike in NCCL's dumps and gloo's.

    `whose` has the ranks of each group: all groups along one dimension of a mesh have one
    description, and may have one name.
    """
    op = printable(entry["profiling_name"]).partition(":")[2]
    name, description = map(printable, entry["process_group"][:2])
    size = " ".join(map(str, [*entry["input_sizes"], *entry["input_dtypes"]]))
    frames = entry.get("frames", [])
    yours = [f for f in frames if not re.search(KNOWN["not_yours"], f["filename"])] or frames
    place = [f" at {re.split(KNOWN['slash'], f['filename'])[-1]}:{f['line']}" for f in yours[:1]]
    return {
        "op": op, "text": printable(op + "".join(place)), "p2p": entry.get("is_p2p") is True,
        "group": name if description in ("", "undefined") else description,
        "key": (name, description, whose.get(name)),
        "number": int(entry["collective_seq_id"]),
        "size": printable(size) if op in KNOWN["same_size"] else "",
        "seconds": entry["time_created_ns"] / 1e9,
        "limit": entry.get("timeout_ms", 1_800_000) / 1e3,
        "ended": entry["state"] == "completed" or entry.get("retired") is True,
    }  # fmt: skip


def _check_run(ranks: dict[int, list[dict]]) -> None:
    """In one run, no rank comes to a call later than its time limit after another one."""
    first = {}
    for rank, call in ((r, c) for r, calls in ranks.items() for c in calls if not c["p2p"]):
        other, before = first.setdefault((call["key"], call["number"]), (rank, call))
        apart = call["seconds"] - before["seconds"]
        if abs(apart) > (limit := min(call["limit"], before["limit"])):
            late_call = call | {"seconds": round(abs(apart)), "limit": round(limit)}
            late, early = (rank, other) if apart > 0 else (other, rank)
            raise _error("runs", **late_call, ranks=_ranks([late]), other=_ranks([early]))


# --- comparing ----------------------------------------------------------------------------------


def compare(ranks: dict[int, list[dict]]) -> list[dict]:
    """What differs between the ranks: in each group the first thing, and the earliest first.

    A finding has a ``kind``, the ``entry`` of the clinic, ``says``, the ``ranks`` that differ from
    most, and ``lines``, which say where every rank is.
    """
    groups = {}
    for rank, calls in ranks.items():
        for call in (call for call in calls if not call["p2p"]):
            # In the group of all, a rank that made no call is one, too.
            every = {r: {} for r in ranks if call["group"] == "default_pg"}
            made = groups.setdefault(call["key"], every)
            made.setdefault(rank, {}).setdefault(call["number"], call)
    found = {key: finding for key in groups if (finding := _difference(groups[key]))}

    def last_of(rank: int) -> str:
        if not ranks[rank]:
            return KNOWN["line"]["never"]
        call = ranks[rank][-1]
        finding = found.get(call["key"])
        stuck = finding and call["number"] >= finding["number"]
        stuck = not call["ended"] if call["p2p"] else stuck
        return KNOWN["line"]["in" if stuck else "after"].format(**call)

    for key, finding in found.items():
        kind, number = finding["kind"], finding["number"]
        places = {rank: last_of(rank) for rank, made in groups[key].items()}
        for rank, made in groups[key].items():
            if call := made.get(number):
                word = "in" if kind == "skipped" and rank in finding["ranks"] else kind
                then = made.get(number + 1, {}).get("text")
                places[rank] = KNOWN["line"][word].format(**call, then=then)
        gaps = finding | {"ranks": _ranks(finding["ranks"]).capitalize(), "next": number + 1}
        finding["says"] = KNOWN["says"][kind].format(**gaps)
        finding |= {"entry": KNOWN["entry"][kind], "lines": _lines(places)}
    lines = _lines({rank: last_of(rank) for rank in ranks})
    same = {"kind": "same", "says": KNOWN["says"]["same"], "lines": lines}
    return sorted(found.values(), key=lambda finding: finding["seconds"]) or [same]


def _difference(ranks: dict[int, dict[int, dict]]) -> dict | None:
    """The first call that some ranks made and others did not, or with something else."""
    ends = {rank: max(made, default=0) for rank, made in ranks.items()}
    for number in sorted(set().union(*ranks.values())):
        # A dump keeps the last calls alone: what a rank no longer has cannot be compared.
        here = [r for r, made in ranks.items() if number in made or number > ends[r]]
        calls = {rank: ranks[rank].get(number) for rank in here}
        for kind, key in (("skipped", "op"), ("size", "size")):
            usual = Counter(call[key] for call in calls.values() if call).most_common(1)[0][0]
            odd = [rank for rank, call in calls.items() if not call or call[key] != usual]
            if odd:
                swapped = kind == "skipped" and _in_two_orders(ranks.values(), number)
                call = next(call for call in calls.values() if call and call[key] == usual)
                difference = {"kind": "order" if swapped else kind, "number": number, "ranks": odd}
                return difference | {key: call[key] for key in ("op", "seconds", "group")}
    return None


def _in_two_orders(ranks: Iterable[dict[int, dict]], number: int) -> bool:
    """Whether all ranks made the same two calls from `number` on, some the second one first."""
    pairs = {tuple(made.get(n, {}).get("op") for n in (number, number + 1)) for made in ranks}
    first = next(iter(pairs))
    return None not in first and pairs == {first, first[::-1]}


def _lines(texts: dict[int, str]) -> list[str]:
    """``rank 1: ...`` for each rank, and a single line for those that have the same text."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(texts):
        alike.setdefault(texts[rank], []).append(rank)
    return [f"{_ranks(ranks)}: {text}" for text, ranks in alike.items()]


def _ranks(ranks: list[int]) -> str:
    """``rank 1``, or ``ranks 0, 2-7``."""
    runs = []
    for rank in sorted(ranks):
        runs += [] if runs and runs[-1][1] == rank - 1 else [[rank, rank]]
        runs[-1][1] = rank
    text = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
    return f"ranks {text}" if len(ranks) > 1 else f"rank {text}"


# --- showing ------------------------------------------------------------------------------------


def explain(found: list[dict], absent: list[int]) -> str:
    """What `compare` has found, for a terminal, and what the clinic says of the first."""
    paragraphs = [KNOWN["input"]["absent"].format(ranks=_ranks(absent))] if absent else []
    paragraphs += ["\n  ".join([finding["says"], *finding["lines"]]) for finding in found]
    if entry := errors.catalogue().get(found[0].get("entry", "")):
        paragraphs += [filled("Do:", entry.fix), f"More: torchclinic explain {entry.id}"]
    return "\n\n".join(paragraphs)
