"""From what `megaspan bench cpu` measured to rows: rates, memory, targets and floors."""

from itertools import pairwise
from typing import Any

from megaspan.bench.random_checkpoint import CONFIG
from megaspan.bench.results import Row, machine, today
from megaspan.bench.runners import label
from megaspan.costs.flops import flops_per_token, prefill_flops
from megaspan.costs.memory import GIB, Format, cache_bytes_per_token

Measured = dict[tuple[str, int], dict[str, Any]]
"""What `measure` answered, by system and length; a peer's answer may be {"error"} or {"limit_s"}."""

# The systems that have targets, and the dtype of their index keys.
OURS: dict[str, Format] = {"megaspan": "float32", "megaspan, bf16 index": "bfloat16"}
SHORTEST_FOR_MEMORY = 8192  # below it the interpreter and its libraries are all there is to see


def rows(measured: Measured, gflops: dict[str, float], command: str) -> list[Row]:
    """Rows for every system and length, then our memory's growth. gflops: of matrix products, by dtype."""
    origin = {"command": command, "machine": machine(), "date": today()}
    made: list[Row] = []
    for name, length in measured:
        answer = measured[name, length]
        note = "" if "prefill_s" in answer else outcome(answer, length)
        for part in ("prefill", "decode"):
            made.append(Row(
                name=f"{part} at {size(length)}, {name}", value=rate(answer, part, length), unit="tok/s",
                better="higher", note=note, **origin,
                **(_aims(measured, part, length, name, gflops) if name in OURS else {})))  # fmt: skip
        if length >= SHORTEST_FOR_MEMORY:
            peak = answer.get("peak_bytes")
            made.append(Row(
                name=f"peak memory of a {size(length)} prefill, {name}", value=peak and peak / GIB,
                unit="GiB", better="lower", note=note, **origin,
                target=1.5 if name in OURS and length == 131072 else None,
                floor=_cache_gib(name, length) if name in OURS else None))  # fmt: skip
    for name in OURS:
        growth = memory_growth(measured, name)
        if growth is not None:
            made.append(Row(
                name=f"memory per further token, longest step to the one before, {name}", value=growth,
                unit="(1 is linear)", better="lower", target=1.1, floor=1.0, **origin))  # fmt: skip
    return made


def rate(answer: dict[str, Any], part: str, length: int) -> float | None:
    """Tokens per second of a "prefill" or of "decode" after it."""
    if "prefill_s" not in answer:
        return None
    return length / answer["prefill_s"] if part == "prefill" else 1 / answer["step_s"]


def memory_growth(measured: Measured, subject: str) -> float | None:
    """A system's peak bytes per token over the last step between lengths, over those of the step before."""
    peaks = [
        (length, answer["peak_bytes"])
        for (name, length), answer in measured.items()
        if name == subject and "peak_bytes" in answer and length >= SHORTEST_FOR_MEMORY
    ]
    slopes = [(more - less) / (longer - shorter) for (shorter, less), (longer, more) in pairwise(peaks[-3:])]
    return slopes[1] / slopes[0] if len(slopes) == 2 and slopes[0] > 0 else None


def outcome(answer: dict[str, Any], length: int) -> str:
    """An answer in words: the rates, or why there are none."""
    if "error" in answer:
        return answer["error"]
    if "limit_s" in answer:
        return f"did not finish in {answer['limit_s']:g} s"
    rates = ", ".join(f"{part} {rate(answer, part, length):,.0f} tok/s" for part in ("prefill", "decode"))
    return f"{rates}, peak {answer['peak_bytes'] / GIB:.2f} GiB"


def size(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _aims(measured: Measured, part: str, length: int, name: str, gflops: dict[str, float]) -> dict[str, Any]:
    """Target, best peer and floor of one of our rates."""
    peers = {
        peer: reached
        for (peer, at), answer in measured.items()
        if at == length and peer not in OURS and (reached := rate(answer, part, length)) is not None
    }
    best = max(peers, key=lambda peer: peers[peer], default=None)
    return {
        "target": _target(part, length, peers),
        "peer": f"{label(best)}: {peers[best]:,.0f}" if best else None,
        "floor": _floor(part, length, name, gflops),
    }


def _target(part: str, length: int, peers: dict[str, float]) -> float | None:
    """What is asked of ours: fixed rates, or a multiple of what a peer reached in this run."""
    if part == "prefill":
        thrice_best = 3 * max(peers.values()) if peers else None
        return {8192: 1200.0, 32768: thrice_best}.get(length)
    return {8192: max(221.0, 10 * peers.get("transformers", 0.0)), 131072: 40.0}.get(length)


def _floor(part: str, length: int, name: str, gflops: dict[str, float]) -> float:
    """Tokens per second if the needed products ran at the machine's rates and nothing else took time."""
    flops = prefill_flops(CONFIG, 0, length) if part == "prefill" else flops_per_token(CONFIG, length)
    indexer = flops.pop("indexer")
    seconds = indexer / gflops[OURS[name]] / 1e9 + sum(flops.values()) / gflops["float32"] / 1e9
    return (length if part == "prefill" else 1) / seconds


def _cache_gib(name: str, length: int) -> float:
    """GiB of the cached rows alone."""
    return length * cache_bytes_per_token(CONFIG, "float32", OURS[name], mtp=False) / GIB
