"""Clocks wait for the device, warm-up is not counted, shares add up."""

from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from running import ran

from torchladder import measuring
from torchladder.launching import launch
from torchladder.measuring import CPU, Stopwatch, Timing, measure, measure_across_ranks, peak_memory

CUDA1 = torch.device("cuda:1")


def busy(seconds):
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_a_slow_function_takes_at_least_its_time_and_warm_up_is_not_counted():
    calls = []
    timing = measure(lambda: calls.append(busy(0.01)), repeats=3, warmup=4)
    assert len(calls) == 7
    assert len(timing.seconds) == 3
    assert min(timing.seconds) >= 0.01
    assert max(timing.rates(100)) <= 10_000


def test_the_clock_waits_for_the_device_on_both_sides(monkeypatch):
    order = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: order.append(device))
    measure(lambda: order.append("run"), device=CUDA1, repeats=2, warmup=1)
    assert order == ["run", CUDA1, "run", CUDA1, CUDA1, "run", CUDA1]
    order.clear()
    with Stopwatch(CUDA1)("part"):
        order.append("run")
    assert order == [CUDA1, "run", CUDA1]
    order.clear()
    measure(int)
    assert order == [], "the CPU is not waited for"


def test_a_timing_reads_as_median_and_range():
    assert repr(Timing((0.002, 0.0011, 0.5))) == "2 ms (median of 3 runs, 1.1 ms to 500 ms)"
    assert repr(Timing((2.5, 2.5e-6))).startswith("1.25 s (median of 2 runs, 2.5 us to 2.5 s)")
    assert repr(Timing((0.9999, 0.0009999))) == "500 ms (median of 2 runs, 1 ms to 1 s)"


def test_the_stopwatch_adds_up_parts_even_when_one_fails():
    watch = Stopwatch()
    for _ in range(2):
        with watch("a"):
            busy(0.004)
    with pytest.raises(ZeroDivisionError), watch("b"):
        raise ZeroDivisionError
    assert watch.seconds["a"] >= 0.008
    assert watch.share("a") + watch.share("b") == pytest.approx(1)


@pytest.mark.slow
def test_the_cpus_peak_is_that_of_the_process_and_not_of_its_parent(monkeypatch, tmp_path):
    program = "from torchladder.measuring import CPU, peak_memory; print(peak_memory(CPU))"
    held = torch.ones(1_000_000_000 // 4)
    assert int(ran("python", "-c", program)) < held.nbytes < peak_memory(CPU)
    del held
    assert peak_memory(CPU) > 1e9
    monkeypatch.setattr(measuring, "Path", lambda path: tmp_path / "status")
    assert peak_memory(CPU) > 1e9, "asked of the system, as on macOS"
    (tmp_path / "status").write_text("VmRSS:\t1000000 kB\n")  # gVisor's says no more
    assert peak_memory(CPU) > 1e9


@pytest.mark.slow
def test_ranks_agree_on_the_time_of_the_slowest():
    def work():
        calls, rank = [], dist.get_rank()

        def measured(function, **_):
            function()
            return Timing((10 * (1 + rank) + len(calls),))

        measuring.measure = measured
        return measure_across_ranks({"count": lambda: calls.append(1)}, repeats=3)

    slowest = {"count": Timing((22.0, 23.0, 24.0))}  # one run is not counted
    assert launch(work) == [slowest, slowest]
