"""Decoding as CUDA graphs: steps that differ only in numbers are launched as one.

A step's kernels and the addresses that they read are the same for every step of as many sequences, so they
are captured once and replayed. What changes lies at fixed places in GPU memory: token ids, positions, slots,
and the page table. A batch between two captured sizes is filled up with sequences of the scratch slot.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.paged import PagedCache
from megaspan.engine.waits import Waits
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences of a captured step
ALIGNED = 16  # numbers; tensors that begin anywhere else make Triton compile its kernels once more
REACHES = (16_384, 131_072)  # tokens of the longest one; beyond, as many as the page table can hold

Numbers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Decode:
    """A step in which each of S sequences reads Q tokens.

    token_ids: [S * Q], sequence by sequence. past: [S], tokens that each has in the cache. slots: [S], the
    row of the page table that each has.
    """

    token_ids: Numbers
    past: Numbers
    slots: Numbers


class StepBuffers:
    """The numbers of a step's tokens at fixed places in the device's memory, filled by one copy."""

    def __init__(self, cache: PagedCache, most: int, tokens: int):
        if cache.scratch_slot is None:
            raise ValueError(
                "the cache has no scratch slot to fill up batches: make its pools with scratch=True"
            )
        self.cache, self.scratch, self.tokens = cache, cache.scratch_slot, tokens
        on_gpu = cache.starts.is_cuda
        self._host = torch.empty(4 * self._stride(most), dtype=torch.int64, pin_memory=on_gpu)
        self._numbers, self._steps = self._host.numpy(), np.arange(tokens)
        self._device = torch.zeros_like(self._host, device=cache.starts.device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def batch(self, size: int, reach: int) -> Batch:
        """A batch of `size` sequences, none longer than `reach`, with the numbers of the last `fill`.

        As far as the host can tell all of them have the scratch slot, and the greatest length.
        """
        numbers = self._device[: 4 * self._stride(size)].view(4, -1)
        token_ids, positions, sequence_ids, visible = numbers[:, : size * self.tokens].unbind()
        lengths, past = (self.tokens,) * size, (reach - self.tokens,) * size
        batch = Batch(token_ids, lengths, past, slots=(self.scratch,) * size)
        return batch.reading(positions, sequence_ids, visible)

    def fill(self, size: int, step: Decode) -> None:
        """Write the step's numbers, and those of sequences of the scratch slot after them up to `size`."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one may still be reading
        count, tokens, used = len(step.slots), self.tokens, 4 * self._stride(size)
        token_ids, positions, sequence_ids, visible = (
            row[: size * tokens].reshape(size, tokens) for row in self._numbers[:used].reshape(4, -1)
        )
        token_ids[:count] = np.asarray(step.token_ids).reshape(count, tokens)
        token_ids[count:] = 0
        positions[:] = self._steps
        positions[:count] += np.asarray(step.past, dtype=np.int64)[:, None]
        sequence_ids[:count] = np.asarray(step.slots)[:, None]
        sequence_ids[count:] = self.scratch
        np.add(positions, 1, out=visible)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _stride(self, size: int) -> int:
        """Numbers from the first of one kind to the first of the next."""
        return -(-size * self.tokens // ALIGNED) * ALIGNED


class DecodeGraphs:
    """Steps in which every sequence reads `tokens` tokens, up to `most` sequences at a time.

    The cache's pools must have a scratch page. On a CPU, without `capture`, or where an operation cannot be
    captured because it waits for the GPU, the same steps run without graphs. replays: steps that did not.
    The cache is not told (`commit`) that a step ended. A graph reads the weights where they were when it was
    captured, and computes in the mode that the model was in.
    """

    def __init__(
        self, model: Transformer, cache: PagedCache, most: int, tokens: int = 1, capture: bool = True
    ):
        self.model, self.cache, self.tokens = model, cache, tokens
        self.sizes = [size for size in SIZES if size < most] + [min(most, SIZES[-1])]
        self.reaches = [reach for reach in REACHES if tokens <= reach < cache.reach] + [cache.reach]
        self.buffers = StepBuffers(cache, self.sizes[-1], tokens)
        self.replays = 0
        self._captures = capture and cache.starts.is_cuda
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        shape = self.most * tokens, model.config.vocab_size
        self._logits = torch.empty(shape, device=cache.starts.device)
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._stream = torch.cuda.Stream(cache.starts.device) if self._captures else None

    @property
    def most(self) -> int:
        """Sequences of a step at most."""
        return self.sizes[-1]

    @torch.inference_mode()
    def __call__(self, step: Decode) -> Tensor:
        """Run the step: float32 logits [S * Q, V], good until the next call.

        ValueError for more than `most` sequences, or one whose pages cannot hold its new rows.
        """
        count, longest = len(step.slots), int(np.max(step.past)) + self.tokens
        if count > self.most:
            raise ValueError(f"a step of {count} sequences is run, but there may be {self.most}")
        lengths = np.asarray(step.past) + self.tokens
        self.cache.require_room(np.asarray(step.slots).tolist(), lengths.tolist())
        size = next(size for size in self.sizes if size >= count)
        reach = next(reach for reach in self.reaches if reach >= longest)
        self._run(size, reach, step)
        return self._logits[: count * self.tokens]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every graph now, so that no request waits for it."""
        nothing = Decode((), (), ())
        for size in reversed(self.sizes):  # the largest first: the others then fit in its memory
            for reach in self.reaches:
                self._run(size, reach, nothing)
        if self._captures:
            torch.cuda.empty_cache()  # of what only the first runs needed

    def _run(self, size: int, reach: int, step: Decode) -> None:
        if self._captures and (size, reach) not in self._graphs:
            self._capture(size, reach)
        self.buffers.fill(size, step)
        graph = self._graphs.get((size, reach))
        if graph is None:
            return self._forward(self.buffers.batch(size, reach))
        graph.replay()
        self.replays += 1

    def _forward(self, batch: Batch) -> None:
        hidden = self.model(batch, self.cache)
        self.model.unembed(hidden, out=self._logits[: len(hidden)])

    def _capture(self, size: int, reach: int) -> None:
        """Run the step once, on scratch rows, for all that happens the first time, and then record it."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        assert stream is not None
        self.buffers.fill(size, Decode((), (), ()))
        batch = self.buffers.batch(size, reach)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with Waits("cuda") as waits:
                self._forward(batch)
            stream.synchronize()
            if waits.found:
                self._give_up(f"{waits.found[0]} waits for the GPU")
                return
            try:
                # Other threads go on copying pages and filling tables meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    self._forward(batch)
                finally:
                    graph.capture_end()
            except RuntimeError as error:
                self._give_up(str(error.__context__ or error).splitlines()[0])
                return
        self._graphs[size, reach] = graph

    def _give_up(self, reason: str) -> None:
        log.warning("decoding without CUDA graphs, which is slower: %s", reason)
        self._captures = False
