"""One measurement in a process of its own, so that its memory and its threads are its own.

`python -m megaspan.bench.measure JOB` takes a JSON job and prints a JSON answer on its last line.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megaspan.bench.runners import CHUNK, open_runner

WARM_UP_TOKENS = CHUNK + 100
MARGIN_S = 120


@dataclass(frozen=True)
class Job:
    """Prefill `length` tokens, unless that takes over `limit_s`; then read `steps` tokens one by one."""

    runner: str
    checkpoint: str
    length: int
    steps: int
    threads: int
    limit_s: float
    return_logits: bool = False


class OutOfTime(Exception):
    pass


def prompt(length: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def measure(job: Job, vocab_size: int) -> dict[str, Any]:
    """Run the job here. "prefill_s" is missing when the time limit cut it."""
    token_ids = prompt(job.length + job.steps, vocab_size)
    checkpoint = Path(job.checkpoint)
    if not job.return_logits:
        _warm_up(job, vocab_size)
    runner = open_runner(job.runner, checkpoint, job.length + job.steps, job.threads)
    began = time.perf_counter()

    def check_time(done: int, total: int) -> None:
        if done < total and time.perf_counter() - began > job.limit_s:
            raise OutOfTime

    idle_bytes = peak_bytes()
    try:
        logits = [runner.prefill(token_ids[: job.length], check_time)]
    except OutOfTime:
        return {"limit_s": job.limit_s}
    prefill_s = time.perf_counter() - began
    answer: dict[str, Any] = {"prefill_s": prefill_s, "idle_bytes": idle_bytes, "peak_bytes": peak_bytes()}
    steps_s = []
    for token_id in token_ids[job.length :]:
        began = time.perf_counter()
        logits.append(runner.step(token_id))
        steps_s.append(time.perf_counter() - began)
    answer["step_s"] = sum(steps_s) / max(len(steps_s), 1)
    if job.return_logits:
        answer["logits"] = torch.stack(logits).tolist()
    return answer


def measure_apart(job: Job) -> dict[str, Any]:
    """Run the job in a new process; {"limit_s"} if it did not finish, {"error"} if it broke."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", __name__, json.dumps(asdict(job))]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * job.limit_s + MARGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"limit_s": job.limit_s}
    if ended.returncode != 0:
        return {"error": (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]}
    return json.loads(ended.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """The most memory this process has held so far (its resident set)."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _warm_up(job: Job, vocab_size: int) -> None:
    """Compile, load and allocate what is done once, with a runner that is thrown away."""
    runner = open_runner(job.runner, Path(job.checkpoint), WARM_UP_TOKENS + 2, job.threads)
    token_ids = prompt(WARM_UP_TOKENS + 2, vocab_size, seed=2)
    runner.prefill(token_ids[:-2], lambda done, total: None)
    for token_id in token_ids[-2:]:
        runner.step(token_id)


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[1]))
    config = json.loads((Path(asked.checkpoint) / "config.json").read_text())
    print(json.dumps(measure(asked, config["vocab_size"])))
