"""The disk tier across engines: what one has read another finds, and no damage is ever served."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.engine.engines import BOUND, GREEDY, assert_idle, assert_solo, debug_model, prompt

pytestmark = pytest.mark.usefixtures("poisoned_memory")
IDS = prompt(40)
TRAFFIC = """
import itertools, sys
from tests.engine.engines import GREEDY, debug_model, make_engine, prompt
engine = make_engine(debug_model(), pages=40, host_pages=20, disk_folder=sys.argv[1])
for number in itertools.count():
    engine.generate([prompt(40, number % 30), prompt(30, number % 7)], GREEDY)
    print(number, flush=True)
"""


@pytest.fixture
def make(make, tmp_path):
    return partial(make, pages=24, host_pages=40, disk_folder=tmp_path)


def pages_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def test_a_restarted_engine_finds_the_prefix(model, make):
    """Also what had been read just before it was closed."""
    engine = make()
    engine.generate([IDS], GREEDY)
    engine.close()
    again = make()
    assert again.stats().disk_pages_used == 11
    outputs = again.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 36
    assert again.stats().prompt_tokens_total == 4
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(again)


def test_a_damaged_page_is_dropped_and_what_follows_it_computed(model, make, tmp_path):
    """The pages before it are used, its own file goes, and the answer is right."""
    engine = make()
    engine.generate([IDS], GREEDY)
    engine.close()
    again = make()
    damaged = again.memory.tiers.disk.keys()  # in order of their writing: page by page
    path = next(path for path in pages_of(tmp_path) if path.stem == damaged[5].hex())
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    outputs = again.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 20
    assert again.memory.tiers.disk.damaged == 1
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(again)


def test_a_folder_that_vanishes_is_done_without(model, make, tmp_path):
    engine = make()
    engine.generate([IDS], GREEDY)
    engine.close()
    again = make()
    for path in pages_of(tmp_path):
        path.unlink()
    outputs = again.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 0
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(again)


def test_other_weights_find_nothing(make):
    """The folder is shared, the rows are not."""
    engine = make()
    engine.generate([IDS], GREEDY)
    engine.close()
    other = debug_model(seed=1)
    again = make(other)
    outputs = again.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 0
    assert_solo(other, IDS, GREEDY, outputs)
    again.set_weights_version("1")
    assert again.generate([IDS], GREEDY)[0][-1].cached_tokens == 0


def test_a_killed_process_leaves_whole_pages_or_none(model, make, tmp_path):
    """kill -9 in the middle of traffic: what is there is right, and half-written files are removed."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAFFIC, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    try:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(BOUND)
    (folder,) = tmp_path.iterdir()
    (folder / "0.1-1.partial").write_bytes(b"half a page")
    engine, hits = make(), 0
    assert not list(tmp_path.rglob("*partial"))
    for ids in [prompt(length, seed) for seed in range(4) for length in (40, 30)]:
        outputs = engine.generate([ids], replace(GREEDY, max_tokens=2))[0]
        assert_solo(model, ids, GREEDY, outputs)
        hits += outputs[-1].cached_tokens
    assert hits > 0
    assert engine.memory.tiers.disk.damaged == 0
    assert_idle(engine)
