"""Clocks wait for the device, warm-up is not counted, shares add up."""

import subprocess
import sys
from time import perf_counter

import pytest
import torch

from torchladder import measuring
from torchladder.measuring import (
    Link,
    Stopwatch,
    Timing,
    all_reduce_seconds,
    fit_link,
    measure,
    peak_memory,
    step_seconds,
    synchronize,
)

CPU = torch.device("cpu")


def busy(seconds):
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_warmup_runs_are_made_but_not_counted():
    calls = []
    timing = measure(lambda: calls.append(1), repeats=3, warmup=4)
    assert len(calls) == 7
    assert len(timing.seconds) == 3


def test_a_slow_function_takes_at_least_its_time():
    timing = measure(lambda: busy(0.01), repeats=3, warmup=0)
    assert min(timing.seconds) >= 0.01
    assert max(timing.rates(100)) <= 10_000


def test_the_clock_waits_for_the_device_on_both_sides(monkeypatch):
    order = []
    monkeypatch.setattr(measuring, "synchronize", lambda device: order.append(device.type))
    measure(lambda: order.append("run"), device=torch.device("cuda"), repeats=2, warmup=1)
    assert order == ["run", "cuda", "run", "cuda", "cuda", "run", "cuda"]
    order.clear()
    with Stopwatch(torch.device("cuda"))("part"):
        order.append("run")
    assert order == ["cuda", "run", "cuda"]


def test_each_kind_of_device_is_waited_for_in_its_own_way(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for name in ("cpu", "cuda:1", "mps"):
        synchronize(torch.device(name))
    assert waited == ["cuda:1", "mps"]


def test_a_timing_reads_as_median_and_range():
    assert repr(Timing((0.002, 0.0011, 0.5))) == "2 ms (median of 3 runs, 1.1 ms to 500 ms)"
    assert repr(Timing((2.5, 2.5e-6))).startswith("1.25 s (median of 2 runs, 2.5 us to 2.5 s)")


def test_the_stopwatch_adds_up_parts_even_when_one_fails():
    watch = Stopwatch()
    for _ in range(2):
        with watch("a"):
            busy(0.004)
    with pytest.raises(ZeroDivisionError), watch("b"):
        raise ZeroDivisionError
    assert watch.seconds["a"] >= 0.008
    assert watch.share("a") + watch.share("b") == pytest.approx(1)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="repeats=0"):
        measure(lambda: None, repeats=0)


def test_the_cpus_peak_is_that_of_the_process():
    before = peak_memory(CPU)
    held = torch.ones(100_000_000 // 4)
    assert peak_memory(CPU) >= max(before, 100e6)
    del held
    assert peak_memory(CPU) >= before
    measuring.reset_peak_memory(CPU)


def test_memory_is_asked_of_the_right_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert peak_memory(torch.device("cuda:0")) == 5
    assert peak_memory(torch.device("mps")) == 7
    measuring.reset_peak_memory(torch.device("cuda:0"))
    assert reset == [torch.device("cuda:0")]


def test_a_child_does_not_start_with_its_parents_peak():
    program = "from torchladder.measuring import peak_memory, torch;"
    program += "print(peak_memory(torch.device('cpu')))"
    held = torch.ones(1_000_000_000 // 4)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < held.nbytes < peak_memory(CPU)


def test_without_proc_the_peak_is_asked_of_the_system_or_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "Path", lambda path: tmp_path / "not there")
    assert peak_memory(CPU) > 0
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory(CPU) is None


LINK = Link(latency=20e-6, bandwidth=2e9)


def test_one_rank_has_nobody_to_talk_to():
    assert all_reduce_seconds(1e12, 1, LINK) == 0
    assert step_seconds(0.1, 1e12, 1, LINK) == 0.1


def test_a_ring_sends_each_byte_almost_twice_however_many_ranks_there_are():
    assert all_reduce_seconds(2e9, 2, Link(0, 2e9)) == 1
    assert all_reduce_seconds(2e9, 4, Link(0, 2e9)) == 1.5
    assert all_reduce_seconds(2e9, 10_000, Link(0, 2e9)) == pytest.approx(2, abs=1e-3)


def test_short_messages_cost_latency_and_long_ones_bandwidth():
    assert all_reduce_seconds(0, 8, LINK) == pytest.approx(14 * 20e-6)
    assert all_reduce_seconds(1e12, 8, LINK) == pytest.approx(1.75 * 1e12 / 2e9, rel=1e-6)


def test_overlap_hides_communication_up_to_the_computing_there_is():
    def step(overlap, nbytes=2e8):  # an all-reduce of 0.1 s behind 0.1 s of computing
        return step_seconds(0.1, nbytes, 2, Link(0, 2e9), overlap=overlap)

    assert step(0) == pytest.approx(0.2)
    assert step(0.5) == pytest.approx(0.15)
    assert step(1) == pytest.approx(0.1)
    assert step(1, nbytes=6e8) == pytest.approx(0.3)  # what is left over shows
    assert step(0.5, nbytes=0) == pytest.approx(0.1)  # never shorter than the computing


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_known_link_is_found_again(ranks):
    sizes = [1e3, 1e4, 1e6, 1e8]
    found = fit_link(sizes, [all_reduce_seconds(n, ranks, LINK) for n in sizes], ranks)
    assert found.latency == pytest.approx(LINK.latency)
    assert found.bandwidth == pytest.approx(LINK.bandwidth)


def test_a_fit_minds_the_small_sizes_as_much_as_the_large():
    sizes = [1e3, 1e4, 1e6, 1e8]
    wrong_by_a_tenth = [
        (0.9 if i % 2 else 1.1) * all_reduce_seconds(n, 2, LINK) for i, n in enumerate(sizes)
    ]
    found = fit_link(sizes, wrong_by_a_tenth, 2)
    for n in sizes:
        right = all_reduce_seconds(n, 2, LINK)
        assert all_reduce_seconds(n, 2, found) == pytest.approx(right, rel=0.12)


def test_neither_latency_nor_bandwidth_comes_out_negative():
    faster_than_in_proportion = fit_link([1e6, 2e6], [1e-3, 2.5e-3], 2)
    assert faster_than_in_proportion.latency == 0
    assert 1e6 / 1.25e-3 < faster_than_in_proportion.bandwidth < 1e6 / 1e-3
    shorter_for_more = fit_link([1e3, 1e6], [2e-3, 1e-3], 2)
    assert shorter_for_more.bandwidth == float("inf")
    assert 0.5e-3 <= shorter_for_more.latency <= 1e-3


def test_a_link_reads_as_a_time_and_a_speed():
    assert repr(LINK) == "Link(20 us a message, 2 GB/s)"
    assert repr(Link(0.0, float("inf"))) == "Link(0 us a message, no limit)"


def test_impossible_groups_are_refused():
    with pytest.raises(ValueError, match="ranks=0"):
        all_reduce_seconds(1, 0, LINK)
    with pytest.raises(ValueError, match=r"overlap=1\.5"):
        step_seconds(1, 1, 2, LINK, overlap=1.5)
    for sizes, seconds, ranks in [([1, 2], [1, 2], 1), ([3, 3], [1, 1], 2), ([1, 2], [0, 1], 2)]:
        with pytest.raises(ValueError, match="two ranks, two different sizes"):
            fit_link(sizes, seconds, ranks)
