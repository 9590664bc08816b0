"""`megaspan bench cpu`: one small GLM-5.2 model, read by megaspan, transformers and llama.cpp in turn.

Every measurement has a process of its own. First all systems must give the same logits on a prompt
longer than index_topk: no figures come from systems that compute something else. That check runs
without llama.cpp's flash attention and without our bf16 index keys, since rounding makes other choices
among the positions near the cut; both are timed.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from megaspan.bench.cpu_rows import OURS, Measured, outcome, rows, size
from megaspan.bench.measure import Job, measure_apart
from megaspan.bench.random_checkpoint import CONFIG, write_random_checkpoint
from megaspan.bench.results import FOLDER, Row, machine, today, write_rows
from megaspan.bench.runners import CHUNK, missing
from megaspan.errors import UserError

PEERS = ("transformers", "llama.cpp")
LENGTHS = (1024, 8192, 32768, 131072)
EXACT = {"llama.cpp": "llama.cpp, flash attention off"}  # what stands for a peer in the agreement check
LONGEST_FOR_PEERS = 32768  # a peer's prefill takes time with the square of the length
AGREEMENT_TOKENS, AGREEMENT_STEPS, TOLERANCE = 256, 16, 1e-4
DECODE_STEPS = 64
ABOUT = f"""\
A model with random weights: {CONFIG.num_hidden_layers} layers \
({" ".join(kind[0].upper() for kind in CONFIG.indexer_types)}; F selects, S shares), hidden size \
{CONFIG.hidden_size}, {CONFIG.num_attention_heads} heads, latent rows of {CONFIG.latent_width} values, \
{CONFIG.index_n_heads} index heads of {CONFIG.index_head_dim}, top-k {CONFIG.index_topk}, \
{CONFIG.n_routed_experts} experts of which {CONFIG.num_experts_per_tok} work. \
float32, prefill in chunks of {CHUNK} tokens, then {DECODE_STEPS} decode steps; each measurement in a \
process of its own, one after the other, after a warm-up. Peak memory is the whole process's, Python and \
libraries included. llama.cpp has flash attention on and a float32 cache. Before anything is timed, all \
systems must give the same logits within {TOLERANCE:g} of the largest on {AGREEMENT_TOKENS} tokens and \
{AGREEMENT_STEPS} steps (llama.cpp with flash attention off for this, since its rounding changes which \
positions are chosen). A floor is what the needed matrix products alone would allow at the rate of large \
products in the same dtype; for memory, the cache rows alone."""


def run(
    lengths: Sequence[int] = LENGTHS,
    peers: Sequence[str] = PEERS,
    threads: int = 2,
    limit_s: float = 1800,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure all systems at all lengths; return one JSON-ready object with `rows` in it.

    limit_s: the longest prefill that is waited for. say: called with a line per measurement.
    Raises UserError for an unknown peer, and when two systems disagree on the logits.
    """
    unknown = set(peers) - set(PEERS)
    if unknown:
        raise UserError(f"unknown peer {', '.join(sorted(unknown))}: choose from {', '.join(PEERS)}")
    if not lengths or not 1 <= min(lengths) <= max(lengths) < CONFIG.max_position_embeddings:
        raise UserError(f"lengths must be between 1 and {CONFIG.max_position_embeddings - 1} tokens")
    command = command_line(lengths, peers, threads)
    load = os.getloadavg()[0]
    say(f"{machine()}; load before: {load:.2f}")
    gflops = matmul_gflops(threads)
    measured: Measured = {}
    with tempfile.TemporaryDirectory(prefix="megaspan-bench-") as folder:
        write_random_checkpoint(Path(folder))
        present = [EXACT.get(name, name) for name in ("megaspan", *peers) if missing(name) is None]
        differences = check_agreement(present, folder, threads)
        say("logit differences: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
        for length in sorted(set(lengths)):
            for name in (*OURS, *peers):
                answer = _measure(Job(name, folder, length, DECODE_STEPS, threads, limit_s))
                measured[name, length] = answer
                say(f"{name} at {size(length)}: {outcome(answer, length)}")
    made = rows(measured, gflops, command)
    return {
        "machine": machine(),
        "date": today(),
        "command": command,
        "threads": threads,
        "load_before": load,
        "matmul_gflops": gflops,
        "logit_differences": differences,
        "shape": CONFIG.to_dict(),
        "measured": [{"system": name, "length": at, **answer} for (name, at), answer in measured.items()],
        "rows": [asdict(row) for row in made],
    }


def record(result: dict[str, Any], folder: Path = FOLDER) -> None:
    """Put the rows of a run into docs/results."""
    rates = ", ".join(f"{rate:.0f} in {dtype}" for dtype, rate in result["matmul_gflops"].items())
    load = f"Load average before the run: {result['load_before']:.2f}. "
    about = f"{ABOUT} {load}Large matrix products in the same run: {rates} GFLOP/s."
    write_rows("cpu", [Row(**row) for row in result["rows"]], folder, about)


def render(result: dict[str, Any]) -> Table:
    """A table of the rows of a run for the terminal."""
    table = Table(title=f"{result['machine']}, {result['threads']} threads", title_justify="left")
    for column in ("figure", "value", "target", "", "best peer", "floor"):
        table.add_column(column, justify="left" if column in ("figure", "best peer") else "right")
    for entry in result["rows"]:
        table.add_row(*Row(**entry).cells())
    return table


def command_line(lengths: Sequence[int], peers: Sequence[str], threads: int) -> str:
    """The command that gives such a run."""
    command = "megaspan bench cpu"
    if tuple(lengths) != LENGTHS:
        command += f" --lengths {','.join(map(str, lengths))}"
    if tuple(peers) != PEERS:
        command += f" --peers {','.join(peers)}"
    return command if threads == 2 else f"{command} --threads {threads}"


def check_agreement(names: Sequence[str], checkpoint: str, threads: int) -> dict[str, float]:
    """How far each system's logits are from the first's, over a prefill and some decode steps.

    A difference is the largest, relative to the largest logit. Raises UserError above TOLERANCE.
    """
    differences: dict[str, float] = {}
    expected = None
    for name in names:
        job = Job(name, checkpoint, AGREEMENT_TOKENS, AGREEMENT_STEPS, threads, 300, return_logits=True)
        answer = measure_apart(job)
        if "logits" not in answer:
            raise UserError(f"{name} does not run: {outcome(answer, AGREEMENT_TOKENS)}")
        logits = torch.tensor(answer["logits"])
        expected = logits if expected is None else expected
        differences[name] = float((logits - expected).abs().max() / expected.abs().max())
        if not differences[name] <= TOLERANCE:
            raise UserError(
                f"no figures: {name} and {names[0]} do not compute the same, their logits differ "
                f"by {differences[name]:.1e} of the largest where {TOLERANCE:g} is allowed"
            )
    return differences


def matmul_gflops(threads: int, width: int = 2048) -> dict[str, float]:
    """What this machine's matrix products reach just now, GFLOP/s by dtype: the best of some runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.randn(2, width, width).to(dtype)
        best = float("inf")
        for _ in range(6):
            began = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - began)
        rates[str(dtype).removeprefix("torch.")] = 2 * width**3 / best / 1e9
    torch.set_num_threads(before)
    return rates


def _measure(job: Job) -> dict[str, Any]:
    reason = missing(job.runner)
    if reason is not None:
        return {"error": reason}
    if job.runner in PEERS and job.length > LONGEST_FOR_PEERS:
        return {"error": f"not run beyond {size(LONGEST_FOR_PEERS)}"}
    return measure_apart(job)
