"""Times on a device: calls in rotation, medians, floors."""

import time

import pytest
import torch

from megaspan.bench.device_time import PEAK_FLOPS, Stopwatch, require_device
from megaspan.errors import UserError


def test_a_time_is_the_median_of_calls_in_rotation():
    made: list[str] = []

    def sleeping(name: str, seconds: float):
        return lambda: (made.append(name), time.sleep(seconds))

    calls = [sleeping("a", 0.001), sleeping("b", 0.001), sleeping("c", 0.05)]
    seconds = Stopwatch(torch.device("cpu")).cold(calls, budget_s=0.007)
    assert made[:3] == ["a", "b", "c"]
    assert made[4:9] == ["a", "b", "c", "a", "b"]  # after one to see how long it takes
    assert 0.001 <= seconds < 0.05


def test_without_a_gpu_a_graph_is_a_call_and_memory_is_not_known():
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.in_graph([lambda: time.sleep(0.001)]) >= 0.001
    assert stopwatch.working_bytes(lambda: torch.empty(9)) is None
    assert stopwatch.copy_rate > 0
    assert stopwatch.host_rate > 0


@pytest.mark.parametrize("known", [True, False])
def test_the_floor_is_the_longer_of_arithmetic_and_memory(monkeypatch, known):
    monkeypatch.setattr(Stopwatch, "has_known_peak", known)
    monkeypatch.setattr(Stopwatch, "copy_rate", 4e12)
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.floor(1.0, "fp8", 4e12) == pytest.approx(1.0)
    assert stopwatch.floor(2 * PEAK_FLOPS["fp8"], "fp8", 4e12) == pytest.approx(2.0 if known else 1.0)


@pytest.mark.parametrize("name", ["gpu", "cuda:9", "mps", ""])
def test_only_devices_that_can_be_timed_are_taken(name):
    require_device("cpu", without="")
    with pytest.raises(UserError, match=f"--device {name}: figures are taken on cuda and on cpu"):
        require_device(name, without="")


def test_a_gpu_must_be_there_with_room_for_the_copies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device here: use the other"):
        require_device("cuda", without="use the other")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 << 30, 139 << 30))
    require_device("cuda", without="")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 139 << 30))
    with pytest.raises(UserError, match=r"8\.0 GiB of the GPU's memory are free, .* alone take 8\.2 GiB"):
        require_device("cuda", without="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_the_gpu_is_timed_and_its_memory_counted():
    stopwatch, device = Stopwatch(torch.device("cuda")), "cuda"
    large, small = (torch.zeros(count, device=device) for count in (1 << 28, 1 << 20))
    assert stopwatch.cold([large.sum]) > 5 * stopwatch.cold([small.sum])
    assert stopwatch.in_graph([lambda: small.add_(1)]) < stopwatch.once(lambda: small.add_(1))
    assert stopwatch.working_bytes(lambda: small + 1) == small.nbytes
    assert stopwatch.copy_rate > stopwatch.host_rate
