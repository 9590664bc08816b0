"""kill -9 while pages are written to the disk tier."""

import os
import random
import signal
import subprocess
import sys
import time

from megaspan.cache.disk import DiskTier

WRITER = """
import random, sys
from megaspan.cache.disk import DiskTier
disk = DiskTier(sys.argv[1], 40 * 70_000, b"model", 65_536)
print("ready", flush=True)
for number in range(int(sys.argv[2]), 1_000_000):
    key = (number % 97).to_bytes(16, "big")
    disk.write(key, bytes(256), random.Random(number % 97).randbytes(65_536))
    disk.read((random.randrange(97)).to_bytes(16, "big"), bytes(256))
"""


def test_kill_9_while_writing_leaves_only_whole_pages(tmp_path):
    """Killed at random moments, two writers at a time: all that is listed reads back right."""
    chance, listed = random.Random(0), 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for attempt in range(4):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), str(50 * attempt + 20 * each)],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for each in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.02, 0.2))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        disk = DiskTier(tmp_path, 40 * 70_000, b"model", 65_536)
        assert not list(tmp_path.rglob("*partial"))
        names = disk.keys()
        for each in names:
            expected = random.Random(int.from_bytes(each, "big")).randbytes(65_536)
            assert disk.read(each, bytes(256)) == expected
            listed += 1
        assert disk.damaged == 0
    assert listed > 10
