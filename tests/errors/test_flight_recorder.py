"""Dumps of the flight recorder in; which rank did not make which call, out.

They are made of those fields that are read, as PyTorch documents them for the form 2.x. Chapter 19
makes and reads those of real ranks that hang.
"""

import copy
import io
import json
import pickle
import subprocess
import sys
import tracemalloc

import pytest
from test_explaining import WITHOUT_TORCH, explain

from torchclinic import UserError, flight_recorder

__all__ = ["explain"]


def entry(op="all_reduce", number=1, line=10, shape=(3,), group=("0", "default_pg"), **fields):
    frames = [("/opt/site-packages/torch/distributed/c10d.py", 5), ("C:\\me\\train.py", line)]
    return {
        "frames": [{"name": "f", "filename": file, "line": at} for file, at in frames],
        "process_group": group, "collective_seq_id": number, "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_795_392_637_295_560_581 + 1_000_000 * number,
        "input_sizes": [list(shape)], "input_dtypes": ["Float"], "state": "scheduled",
        "timeout_ms": 600_000,
        "is_p2p": False, "retired": False, **fields,
    }  # fmt: skip


def dump(*entries, ranks="[0, 1, 2, 3]", version="2.4"):
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": version, "pg_config": groups, "pg_status": {}, "entries": list(entries)}


def compared(*dumps, **others):
    contents = {f"trace_{rank}": pickle.dumps(dump, 2) for rank, dump in enumerate(dumps)}
    ranks, absent = flight_recorder.read((contents | others).items())
    return flight_recorder.compare(ranks), absent


# --- what is found ------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_and_folders_of_them_are_read_without_torch(explain, tmp_path):
    line = "Rank 1 did not make call 2 of group default_pg, all_reduce."
    waits, other = entry(number=2, line=16), entry("barrier", 2, 18)
    for rank, last in enumerate((waits, other)):
        one = dump(entry(), last, ranks="[0, 1]")
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(one, 2))
    status, out, err = explain(tmp_path / "trace_1", tmp_path / "trace_0")
    assert (status, err) == (0, "")
    said = [line, "  rank 0: waiting in all_reduce at train.py:16"]
    assert out.splitlines()[:3] == [*said, "  rank 1: in barrier at train.py:18"]
    assert out.endswith("torchclinic explain collective-on-one-rank\n")
    told = json.loads(explain(tmp_path, "--json")[1])
    (difference,), (match,) = told["differences"], told["matches"]
    assert (told["version"], told["ranks_without_dump"], match["line"]) == (1, [], None)
    assert (difference["says"], difference["entry"]) == (match["text"], match["id"])
    assert (match["text"], difference["ranks"]) == (line, [1])
    command = [sys.executable, "-c", WITHOUT_TORCH, "explain", tmp_path]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == out


def test_the_first_difference_is_named_with_where_every_rank_is():
    same = [entry(number=1), entry("_all_gather_base", 2, 11)]
    turned = [entry("_all_gather_base", 1, 11), entry(number=2)]
    tps = [entry("broadcast", number, 30, group=("7", "tp")) for number in (1, 2)]
    sent = entry("send 3->0", 0, 40, is_p2p=True)
    waits, entry_3 = "waiting in all_reduce at train.py", entry(number=3, line=37)
    for dumps, says, *lines in [
        ([dump(*same, entry_3)] * 3 + [dump(*same)],
         "Rank 3 did not make call 3 of group default_pg, all_reduce.",
         f"ranks 0-2: {waits}:37",
         "rank 3: after its last collective, _all_gather_base at train.py:11"),
        ([dump(*same), dump(*same), dump(*same, sent), dump()],
         "Rank 3 did not make call 1 of group default_pg, all_reduce.",
         f"ranks 0-2: {waits}:10",
         "rank 3: before its first collective"),
        ([dump(*same, tps[0]), *[dump(*same, entry_3)] * 2, dump(*same, sent)],
         "Ranks 0, 3 did not make call 3 of group default_pg, all_reduce.",
         "rank 0: after its last collective, broadcast at train.py:30",
         f"ranks 1-2: {waits}:37",
         "rank 3: in send 3->0 at train.py:40"),
        ([dump(entry(shape=(3,)))] * 3 + [dump(entry(shape=(5, 2), line=12))],
         "Rank 3 made call 1 of group default_pg, all_reduce, with another size or dtype.",
         "ranks 0-2: [3] Float in all_reduce at train.py:10",
         "rank 3: [5, 2] Float in all_reduce at train.py:12"),
        ([dump(entry("a\x1b[2J\r\nb"))] * 3 + [dump()],
         "Rank 3 did not make call 1 of group default_pg, a?[2J??b.",
         "ranks 0-2: waiting in a?[2J??b at train.py:10",
         "rank 3: before its first collective"),
        ([dump(entry("all_to_all", shape=(rank,))) for rank in range(4)],
         "The dumps show no difference: the same collectives on all ranks, in one order.",
         "ranks 0-3: after its last collective, all_to_all at train.py:10"),
        ([dump(*same), dump(*same), dump(*same), dump(*turned)],
         "Rank 3 made calls 1 and 2 of group default_pg in another order.",
         "ranks 0-2: all_reduce at train.py:10, then _all_gather_base at train.py:11",
         "rank 3: _all_gather_base at train.py:11, then all_reduce at train.py:10"),
        # Of two groups that hang, the one that began to hang first.
        ([dump(*same, entry_3, *tps)] * 3 + [dump(*same, tps[0])],
         "Rank 3 did not make call 2 of group tp, broadcast.",
         "ranks 0-2: waiting in broadcast at train.py:30",
         "rank 3: after its last collective, broadcast at train.py:30"),
    ]:  # fmt: skip
        (found, *_), absent = compared(*dumps)
        assert (found["says"], found["lines"], absent) == (says, lines, [])


def test_groups_of_one_description_are_compared_each_for_itself():
    """Along one dimension of a mesh. `split_group` gives them one name, too."""
    dumps = [dump(*(entry(number=n, group=("1", "mesh_tp")) for n in ns)) for ns in ([1], [1, 2])]
    dumps = [copy.deepcopy(dumps[i]) for i in (0, 0, 1, 1)]
    for rank, one in enumerate(dumps):
        one["pg_config"]["1"] = {"name": "1", "ranks": "[2, 3]" if rank > 1 else "[0, 1]"}
    assert compared(*dumps)[0][0]["kind"] == "same"
    dumps[3]["entries"].pop()
    assert (
        compared(*dumps)[0][0]["says"] == "Rank 3 did not make call 2 of group mesh_tp, all_reduce."
    )


def test_of_a_ring_that_is_full_only_what_all_ranks_still_have_is_compared():
    last = [entry(number=n) for n in range(900, 1001)]
    (found,), _ = compared(dump(*last[50:]), dump(*last[:-1]), dump(*last), dump(*last))
    assert found["says"].startswith("Rank 1 did not make call 1000 ")


def test_a_dump_that_is_missing_is_named_and_the_others_are_compared():
    (found,), absent = compared(dump(entry(number=1), entry(number=2)), dump(entry(number=1)))
    assert found["ranks"] == [1]
    assert absent == [2, 3]
    assert "no dump of ranks 2-3" in flight_recorder.explain([found], absent)


def test_of_many_dumps_one_at_a_time_is_in_memory(explain, tmp_path):
    for rank in range(30):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump(entry()), 2) + bytes(1_000_000))
    tracemalloc.start()
    assert "no difference" in explain(tmp_path)[1]
    assert tracemalloc.get_traced_memory()[1] < 15e6
    tracemalloc.stop()


# --- bad input ----------------------------------------------------------------------------------


class Touch:
    def __reduce__(self):
        return io.open, ("ran", "w")


def test_bad_input_gets_one_sentence_and_the_status_2(explain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = dump(entry(), ranks="[0, 1]")
    late = copy.deepcopy(good)
    late["entries"][0]["time_created_ns"] += 3_600_000_000_000
    lacks = copy.deepcopy(good)
    del lacks["entries"][0]["collective_seq_id"]
    whole = pickle.dumps(good, 2)
    for name, content, sentence in [
        ("trace_1", pickle.dumps(good | {"version": "3\x1b[2J"}, 2), "has the form 3?[2J, and"),
        ("\r\nrank 0: fine\x1b_1", whole[:-40], "??rank 0: fine?_1 is cut off"),
        ("trace_1", whole[:-40], "trace_1 is cut off"),
        ("trace_1", pickle.dumps(dump(version="3.0"), 2), "trace_1 has the form 3.0, and only 2.x"),
        ("trace_1", pickle.dumps(lacks, 2), "trace_1 has the form 2.4, and only 2.x"),
        ("trace_1", pickle.dumps(late, 2), "two runs: rank 1 made call 1 of group default_pg 3600"),
        ("trace_0.pkl", whole, "trace_0 and trace_0.pkl are both of rank 0"),
        ("trace", whole, "trace does not end in a rank"),
        ("log_1", b"RuntimeError: no dump", "log_1 is no dump of the flight recorder"),
        ("trace_1", pickle.dumps(good | {"x": Touch()}, 2), "trace_1 is no dump"),
    ]:
        (tmp_path / "trace_0").write_bytes(whole)
        (tmp_path / name).write_bytes(content)
        status, out, err = explain("trace_0", name)
        assert (status, out) == (2, ""), sentence
        assert sentence in err
        assert err[:-1].isprintable()
        (tmp_path / name).unlink()
    (tmp_path / "trace_0").write_bytes(whole)
    assert "trace_0 is the dump of one rank" in explain("trace_0")[2]
    assert not (tmp_path / "ran").exists()


def test_every_cut_of_a_dump_is_refused_or_read():
    whole = pickle.dumps(dump(entry()), 2)
    for end in range(len(whole)):
        with pytest.raises(UserError):
            flight_recorder.read([("trace_0", whole[:end]), ("trace_1", whole)])
