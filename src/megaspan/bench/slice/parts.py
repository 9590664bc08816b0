"""What is measured of one slice: reading a whole context, decoding after it, attention by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from megaspan.bench.device_time import Stopwatch
from megaspan.bench.pairs import Pairs, in_turns
from megaspan.bench.slice.attention import attention_alone
from megaspan.bench.slice.model import Contexts, random_model, read_bytes, tokens
from megaspan.config import ModelConfig
from megaspan.costs.flops import index_flops, prefill_flops
from megaspan.costs.memory import Format
from megaspan.engine.decode_graph import Decode, DecodeGraphs
from megaspan.model.batch import Batch
from megaspan.model.batch_invariance import set_batch_invariant

STEPS = 30


class TooSlow(Exception):
    """Reading the context takes longer than was asked for."""


@dataclass(frozen=True)
class Prefill:
    """peak_bytes: the most memory that was held, weights and caches included (None on a CPU)."""

    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Alone:
    """Seconds of the attention by itself, and those in which it can be done, where that is known."""

    seconds: float
    floor: float | None

    def over(self, other: "Alone") -> tuple[float, float | None]:
        """The ratio of the seconds, and that of the floors."""
        ratio = self.seconds / other.seconds
        return ratio, None if self.floor is None or other.floor is None else self.floor / other.floor


class Slice:
    """A model of some layers and the caches of some sequences of `length` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        rows: Format,
        length: int,
        slots: int,
        distinct: int,
        page_size: int,
        stopwatch: Stopwatch,
    ):
        device = stopwatch.device
        self.config, self.rows, self.length, self.stopwatch = config, rows, length, stopwatch
        self.model = random_model(config, device)
        self.contexts = Contexts(config, length, rows, slots, distinct, device, page_size)
        self.token_ids = tokens(config, length, device)
        self.graphs = DecodeGraphs(self.model, self.contexts.cache, slots)

    def prefill(self, chunk: int, limit_s: float) -> Prefill:
        """Read the whole context, chunk by chunk, after some chunks here and there to compile what is used.

        Raises TooSlow after `limit_s` seconds.
        """
        for start in (*_doubling(chunk, self.length), self.length - chunk):
            self._read(start, chunk)
        if self.stopwatch.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = 0.0
        for start in range(0, self.length, chunk):
            seconds += self.stopwatch.once(lambda start=start: self._read(start, chunk))
            if seconds > limit_s:
                raise TooSlow(f"stopped after {start + chunk:,} of {self.length:,} tokens, {seconds:.0f} s")
        peak = torch.cuda.max_memory_allocated() if self.stopwatch.is_cuda else None
        self.contexts.spread(self.length)
        return Prefill(seconds, peak)

    def prefill_floor(self) -> float | None:
        """Seconds of its matrix products at the data sheet's rates, where these are known."""
        if not self.stopwatch.has_known_peak:
            return None
        flops = prefill_flops(self.config, 0, self.length)
        indexer = self.stopwatch.floor(flops.pop("indexer"), self._index_kind, 0)
        return indexer + self.stopwatch.floor(sum(flops.values()), "bfloat16", 0)

    def decode(self, batch: int, length: int) -> float:
        """Seconds of a decoding step of `batch` sequences of `length` tokens, the logits included."""
        step = self._step(batch, length)
        for _ in range(2):
            self.graphs(step)
        return median(self.stopwatch.once(lambda: self.graphs(step)) for _ in range(STEPS))

    def decode_floor(self, batch: int, length: int) -> float:
        """Seconds in which the weights, the index keys and the selected rows of such a step can be read."""
        nbytes = read_bytes(self.model, batch) + batch * self._cached_bytes(length)
        return self.stopwatch.floor(0, "bfloat16", nbytes)

    def _cached_bytes(self, length: int) -> int:
        """What the attention of a token reads that sees `length` positions."""
        config, formats = self.config, self.contexts.pools.formats
        index = len(config.full_layers) * length * formats["index"].nbytes
        latent = config.num_hidden_layers * min(length, config.index_topk) * formats["latent"].nbytes
        return index + latent

    def decode_attention(self, batch: int) -> Alone:
        """The attention of a decoding step at the end of the context."""
        step = self._step(batch, self.length)
        token_ids = torch.tensor(step.token_ids, device=self.stopwatch.device)
        ones, slots = (1,) * batch, tuple(range(batch))
        ragged = Batch(token_ids, ones, (self.length - 1,) * batch, slots)
        call = attention_alone(self.model, self.contexts.cache, ragged)
        floor = self.stopwatch.floor(0, "bfloat16", batch * self._cached_bytes(self.length))
        return Alone(self.stopwatch.in_graph([call]), floor)

    def prefill_attention(self, chunk: int) -> Alone:
        """The attention of the context's last chunk."""
        before = self.length - chunk
        call = attention_alone(self.model, self.contexts.cache, self._chunk(before, chunk))
        seconds = self.stopwatch.cold([call])
        if not self.stopwatch.has_known_peak:
            return Alone(seconds, None)
        visible = chunk * before + chunk * (chunk + 1) // 2
        scores = len(self.config.full_layers) * index_flops(self.config, visible)
        attention = prefill_flops(self.config, before, self.length)["attention"]
        floor = self.stopwatch.floor(scores, self._index_kind, 0)
        return Alone(seconds, floor + self.stopwatch.floor(attention, "bfloat16", 0))

    @property
    def _index_kind(self) -> str:
        """The arithmetic of the index scores."""
        return "fp8" if self.rows == "fp8" else "bfloat16"

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def invariance(self, batch: int, length: int, say: Callable[[str], None], pairs: int = 3) -> Pairs:
        """Decoding by default and in batch-invariant mode, in turns."""
        default, graphs = self.graphs, DecodeGraphs(self.model, self.contexts.cache, batch)

        def seconds(invariant: bool) -> float:
            set_batch_invariant(self.model, invariant)
            self.graphs = graphs if invariant else default
            try:
                return self.decode(batch, length)
            finally:
                set_batch_invariant(self.model, False)
                self.graphs = default

        return in_turns(lambda: seconds(False), lambda: seconds(True), say, pairs)

    @torch.inference_mode()
    def _read(self, start: int, chunk: int) -> None:
        hidden = self.model(self._chunk(start, chunk), self.contexts.cache)
        self.model.unembed(hidden[-1:])

    def _chunk(self, start: int, chunk: int) -> Batch:
        token_ids = self.token_ids[start : start + chunk]
        return Batch(token_ids, (len(token_ids),), (start,), (0,))

    def _step(self, batch: int, length: int) -> Decode:
        """The first sequence reads its own last token again, so that its rows stay as they are."""
        places = torch.arange(length - 1, length - 1 - batch, -1).clamp(min=0)
        token_ids = self.token_ids[places.to(self.token_ids.device)].tolist()
        return Decode(token_ids, (length - 1,) * batch, tuple(range(batch)))


def _doubling(chunk: int, length: int) -> list[int]:
    """0, one chunk, two, four, and so on below the length."""
    return [0, *(chunk << number for number in range(length.bit_length()) if chunk << number < length)]
