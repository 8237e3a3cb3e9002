"""Clocks wait for the device, warm-up is not counted, shares add up."""

import importlib.util
import subprocess
import sys
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from torchladder import measuring
from torchladder.launching import launch
from torchladder.measuring import (
    Stopwatch,
    Timing,
    measure,
    measure_across_ranks,
    peak_memory,
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


@pytest.mark.slow
def test_a_child_does_not_start_with_its_parents_peak():
    program = "from torchladder.measuring import peak_memory, torch;"
    program += "print(peak_memory(torch.device('cpu')))"
    held = torch.ones(1_000_000_000 // 4)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) < held.nbytes < peak_memory(CPU)


def test_without_proc_the_peak_is_asked_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "Path", lambda path: tmp_path / "not there")
    assert peak_memory(CPU) > 0


@pytest.mark.slow
def test_ranks_agree_on_the_time_of_the_slowest():
    def work():
        calls = []
        pause = 0.05 * dist.get_rank()
        functions = {"wait": lambda: busy(pause), "count": lambda: calls.append(1)}
        return measure_across_ranks(functions, repeats=3), len(calls)

    (first, calls), (second, _) = launch(work)
    assert first == second
    assert calls == 4, "one run is not counted"
    assert len(first["count"].seconds) == 3
    assert min(first["wait"].seconds) >= 0.05


def test_what_windows_lacks_is_not_needed_to_import_it(monkeypatch):
    spec = importlib.util.spec_from_file_location("measuring_on_windows", measuring.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setitem(sys.modules, "resource", None)
    spec.loader.exec_module(module)
    assert len(module.measure(int).seconds) == 5
