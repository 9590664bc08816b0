"""Teams of threads: who gives his up can have one again, and who has none does not take others' away."""

import threading

import pytest
import torch

from megaspan.ops import threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def long_sum() -> float:
    return float(torch.ones(1 << 20).sum())


def test_there_is_a_runtime_to_speak_to():
    assert threads._openmp() is not None


def test_parallel_loops_work_after_a_team_is_given_back(two_threads):
    for _ in range(3):
        assert long_sum() == 1 << 20
        threads.give_back_team()
    assert torch.get_num_threads() == 2


def test_a_thread_without_a_team_leaves_the_others_theirs(two_threads):
    seen = []

    def work() -> None:
        threads.use_no_team()
        seen.append((long_sum(), torch.get_num_threads()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(1 << 20, 1)]
    assert torch.get_num_threads() == 2


def test_without_the_runtime_nothing_happens(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    threads.give_back_team()
    threads.use_no_team()
    assert torch.get_num_threads() == 2
