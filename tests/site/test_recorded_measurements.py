"""Tables of ``runs/<machine>/*.json`` say what was measured, and what was not.

That chapters show them is tested in ``test_recorded_runs.py``.
"""

import pytest
import recorded_measurements as shown


def content(name, rows, **more):
    facts = {"machine": "1xH100", "gpus": ["H100, 79.1 GiB"], "date": "2030-01-02", "torch": "3.0"}
    return {"measurement": name, "rehearsal": False, "machine": facts, "rows": rows} | more


def way(rate, seconds, **more):
    epochs = [4] * len(seconds)
    row = {"reason": "why", "images_per_second": [rate] * 5, "seconds_to_target": seconds}
    row |= {"epochs": epochs, "share_of_peak": 0.25, "peak_in": "bfloat16", "target": 0.92}
    return row | {"first_five_steps": 1.5} | more


def step(flops, cpu, gpu):
    seconds = {"cpu_seconds": [cpu], "one_thread_seconds": [cpu], "gpu_seconds": [gpu]}
    return {"flops": flops, "parameters": 10} | seconds


def test_the_ladder_tells_rates_of_the_first_row_and_how_often_the_target_was_reached():
    rows = {
        "matrix product, bfloat16": {"n": 8192, "flops_per_second": [7e14] * 5},
        "plain": way(1000, [9.0]),
        "fast": way(40_000, [1.0, None, 3.0]),
        "compile": {"skipped": "no C compiler here"},
        "graph": {"failed": "RuntimeError: no"},
    }
    lines = shown.measured(content("speed_ladder", rows)).splitlines()
    assert lines[0] == ("Measured on **1x H100** (H100, 79.1 GiB) on 2030-01-02, with PyTorch 3.0:")
    assert "to 92% of the test images" in lines[2]
    plain, fast = lines[4:6]
    assert plain == (
        "| plain: why | 1,000 | 1.0 | 25.0% (bfloat16) | 9 s (1 of 1 runs, 4 epochs) | 1.5 s |"
    )
    assert "| 40,000 | 40.0 |" in fast
    assert "| 2 s (2 of 3 runs, 4 epochs) |" in fast
    assert "matrix product, bfloat16: 700 TFLOPs a second." in lines[7]
    assert lines[-2:] == [
        "- compile: not measured, no C compiler here",
        "- graph: not measured, RuntimeError: no",
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(1e6, 1.0, 2.0), (2e6, 2.0, 1.0), (3e6, 3.0, 1.0)], "From *1* on, with 2 million"),
        ([(1e6, 2.0, 1.0), (2e6, 1.0, 2.0), (3e6, 3.0, 1.0)], "From *2* on, with 3 million"),
        ([(1e6, 1.0, 2.0), (2e6, 1.0, 2.0), (3e6, 3.0, 4.0)], "is not faster than all cores"),
    ],
)
def test_where_the_gpu_begins_to_win_follows_from_the_rows(rows, told):
    steps = {str(i): step(*row) for i, row in enumerate(rows)}
    steps["whole"] = {"flops": 9e9, "parameters": 10, "gpu_seconds": [1.0]}
    assert told in shown.measured(content("sizes", steps))


def test_copies_are_compared_with_the_bus_if_its_peak_is_known():
    row = {"bytes": 10, "bytes_per_second": [32e9] * 9}
    bus = {"most_generation": 5, "most_lanes": 16, "bytes_per_second": 64e9}
    rows = {"10 bytes to the GPU, pinned memory": row, "within the device": row}
    text = shown.measured(content("copies", {"bus": bus} | rows))
    assert "| 10 bytes to the GPU, pinned memory | 32 | 50% |" in text
    assert "| within the device | 32 |  |" in text
    assert "PCIe 5 with 16 lanes, 64 GB/s" in text
    assert "50%" not in shown.measured(
        content("copies", {"bus": bus | {"bytes_per_second": None}} | rows)
    )


def test_every_program_has_a_table_and_every_place_a_program():
    import json
    import re
    from pathlib import Path

    root = Path(shown.__file__).resolve().parents[2]
    programs = {file.stem for file in (root / "benchmarks/gpu").glob("*.py")} - {"measurement"}
    assert shown.TABLES.keys() == programs
    texts = [file.read_text(encoding="utf-8") for file in (root / "notebooks").glob("*.ipynb")]
    cells = [cell for text in texts for cell in json.loads(text)["cells"]]
    marks = {
        m for c in cells for m in re.findall(r"<!-- recorded: (.*?) -->", "".join(c["source"]))
    }
    assert marks == programs | {shown.OUTPUT}
