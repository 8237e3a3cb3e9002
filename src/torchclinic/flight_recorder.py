"""From the dumps of PyTorch's flight recorder to the rank that did not make a call.

A dump holds the last collectives of one rank: a pickle of plain data, or JSON, which lacks the
stacks. Nearly every hang has one cause: a rank did not make a call that the others made, or made
it with something else. So the calls of all ranks are compared, group by group, by their number.
The site's flight_recorder.js does the same in the browser.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import ClassVar

from torchclinic import UserError, errors

SHARED = errors.page("flight_recorder")  # with flight_recorder.js


class _Data(pickle._Unpickler):
    """An unpickler that knows no step which imports or calls: all it can make is plain data."""

    dispatch: ClassVar = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, step)[0] for step in SHARED["steps"])
    }

    def load_pair(self) -> None:
        """Make a list of what was a tuple: as a key, nested tuples would take for ever to hash."""
        self.stack[-2:] = [self.stack[-2:]]

    dispatch[pickle.TUPLE2[0]] = load_pair


# --- reading ------------------------------------------------------------------------------------


def dumps_in(paths: list[str]) -> dict[str, bytes]:
    """The content by name of the dumps in a folder, or of the files; none if it is no dumps."""
    files, several = [Path(path) for path in paths], len(paths) > 1
    if not several and files and files[0].is_dir():
        files = [f for f in sorted(files[0].iterdir()) if re.search(SHARED["rank"], f.name)]
    files = [file for file in files if several or (file.is_file() and _begins_as_dump(file))]
    return {str(file): file.read_bytes() for file in files}


def _begins_as_dump(file: Path) -> bool:
    with file.open("rb") as opened:
        return is_dump(opened.read(4096))


def is_dump(start: bytes) -> bool:
    """Whether a file that begins so may be a dump."""
    begins = start.startswith(b"\x80\x02}") or start.lstrip().startswith(b"{")
    return begins and b"version" in start and (b"entries" in start or b"pg_config" in start)


def read(contents: dict[str, bytes]) -> tuple[dict[int, list[dict]], list[int]]:
    """Each rank's calls, from the dumps' contents by name; and the ranks that have no dump."""
    ranks, names, known = {}, {}, set()
    for name, content in contents.items():
        if not (found := re.search(SHARED["rank"], name)):
            raise _error("nameless", name=name)
        if (rank := int(found[1])) in ranks:
            raise _error("twice", name=names[rank], other=name, ranks=_ranks([rank]))
        dump, names[rank] = _load(name, content), name
        try:
            ranks[rank] = [_call(entry) for entry in dump["entries"]]
            configs = str([group["ranks"] for group in dump["pg_config"].values()])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _error("version", name=name, version=str(dump["version"])[:9]) from error
        known |= {int(other) for other in re.findall(r"\d{1,6}", configs)}
    known |= set(range(max(ranks)))
    if len(ranks) == 1 and known - set(ranks):
        raise _error("one", name=name)
    _check_run(ranks)
    return dict(sorted(ranks.items())), sorted(known - set(ranks))


def _error(word: str, **gaps: object) -> UserError:
    return UserError(SHARED["input"][word].format(**gaps))


def _load(name: str, content: bytes) -> dict:
    try:
        pickled = content.startswith(b"\x80")
        dump = _Data(io.BytesIO(content)).load() if pickled else json.loads(content)
        version = str(dump["version"])
    except Exception as error:  # of whatever kind an unpickler ends with
        unknown = isinstance(error, KeyError | TypeError) or not is_dump(content[:4096])
        raise _error("none" if unknown else "cut", name=name) from error
    if not version.startswith("2."):
        raise _error("version", name=name, version=version[:9])
    return dump


def _call(entry: dict) -> dict:
    """What is compared of an entry; it is alike in NCCL's dumps and gloo's."""
    op = entry["profiling_name"].partition(":")[2]
    name, description = entry["process_group"]
    size = [*map(str, entry["input_sizes"]), *entry["input_dtypes"]]
    frames = entry.get("frames", [])
    yours = [f for f in frames if not re.search(SHARED["not_yours"], f["filename"])] or frames
    file = [f" at {re.split(SHARED['slash'], f['filename'])[-1]}:{f['line']}" for f in yours[:1]]
    return {
        "op": op,
        "group": name if description in ("", "undefined") else description,
        "number": int(entry["collective_seq_id"]),
        "size": " ".join(size) if op in SHARED["same_size"] else "",
        "text": op + "".join(file),
        "seconds": entry["time_created_ns"] / 1e9,
        "limit": entry.get("timeout_ms", 1_800_000) / 1e3,
        "p2p": entry["is_p2p"],
        "ended": entry["state"] == "completed" or entry.get("retired", False),
    }


def _check_run(ranks: dict[int, list[dict]]) -> None:
    """In one run, no rank comes to a call later than its time limit after another one."""
    first = {}
    for rank, call in ((r, c) for r, calls in ranks.items() for c in calls if not c["p2p"]):
        other, before = first.setdefault((call["group"], call["number"]), (rank, call))
        apart = call["seconds"] - before["seconds"]
        if abs(apart) > (limit := min(call["limit"], before["limit"])):
            told = call | {"seconds": round(abs(apart)), "limit": round(limit)}
            late, early = (rank, other) if apart > 0 else (other, rank)
            raise _error("runs", **told, ranks=_ranks([late]), other=_ranks([early]))


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
            made = groups.setdefault(
                call["group"], {r: {} for r in ranks if call["group"] == "default_pg"}
            )
            made.setdefault(rank, {}).setdefault(call["number"], call)
    found = {name: told for name in groups if (told := _difference(groups[name]))}

    def where(rank: int, call: dict | None = None, word: str = "in") -> str:
        if not call and ranks[rank]:
            call = ranks[rank][-1]
            told = found.get(call["group"])
            stuck = not call["ended"] if call["p2p"] else told and call["number"] >= told["number"]
            word = "in" if stuck else "after"
        return SHARED["line"][word if call else "never"].format(**call or {})

    for name, told in found.items():
        kind, said = told["kind"], {}
        for rank, made in groups[name].items():
            call, then = (made.get(number) for number in (told["number"], told["next"]))
            word = "in" if kind == "skipped" and rank in told["ranks"] else kind
            said[rank] = where(rank, call and call | {"then": then and then["text"]}, word)
        gaps = told | {"group": name, "ranks": _ranks(told["ranks"]).capitalize()}
        told["says"] = SHARED["says"][kind].format(**gaps)
        told |= {"entry": SHARED["entry"][kind], "lines": _lines(said)}
    same = {"kind": "same", "says": SHARED["says"]["same"]}
    same["lines"] = _lines({rank: where(rank) for rank in ranks})
    return sorted(found.values(), key=lambda told: told["seconds"]) or [same]


def _difference(ranks: dict[int, dict[int, dict]]) -> dict | None:
    """The first call that some ranks made and others did not, or with something else."""
    # A dump keeps the last calls alone: what one rank no longer has cannot be compared.
    start = max(min(made, default=0) for made in ranks.values())
    for number in sorted(n for n in set().union(*ranks.values()) if n >= start):
        here = {rank: made.get(number) for rank, made in ranks.items()
                if number in made or number > max(made, default=0)}  # fmt: skip
        for kind, key in (("skipped", "op"), ("size", "size")):
            usual = Counter(call[key] for call in here.values() if call).most_common(1)[0][0]
            first = next(call for call in here.values() if call and call[key] == usual)
            if odd := [rank for rank in here if not here[rank] or here[rank][key] != usual]:
                pairs = [tuple(made.get(n, {}).get("op") for n in (number, number + 1))
                         for made in ranks.values()]  # fmt: skip
                if kind == "skipped" and set(pairs) == {pairs[0], pairs[0][::-1]} and all(pairs[0]):
                    kind = "order"
                told = {"kind": kind, "number": number, "next": number + 1, "ranks": odd}
                return told | {"op": first["op"], "seconds": first["seconds"]}
    return None


def _lines(said: dict[int, str]) -> list[str]:
    """``rank 1: ...`` for each rank, and a single line for those of which the same is said."""
    alike = {text: [rank for rank in sorted(said) if said[rank] == text] for text in said.values()}
    return [f"{_ranks(alike[text])}: {text}" for text in sorted(alike, key=alike.get)]


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
    told = [SHARED["input"]["absent"].format(ranks=_ranks(absent))] if absent else []
    told += ["\n  ".join([finding["says"], *finding["lines"]]) for finding in found]
    if entry := errors.catalogue().get(found[0].get("entry")):
        told += [errors._filled("Do:", entry.fix), errors._more(entry)]
    return "\n\n".join(told)
