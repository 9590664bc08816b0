"""megaspan itself, in float32."""

from pathlib import Path

import torch
from torch import Tensor

from megaspan.bench.runners import CHUNK, Progress
from megaspan.engine.generation import Generation
from megaspan.pretrained import load

PACKAGES: tuple[str, ...] = ()


class Runner:
    index_dtype = torch.float32

    def __init__(self, checkpoint: Path, capacity: int, threads: int):
        torch.set_num_threads(threads)
        model = load(checkpoint, dtype="float32")
        self.generation = Generation(model, capacity, CHUNK, self.index_dtype)

    def prefill(self, token_ids: list[int], on_progress: Progress) -> Tensor:
        return self.generation.prefill(token_ids, on_progress)

    def step(self, token_id: int) -> Tensor:
        return self.generation.step(token_id)


class RoundedIndexRunner(Runner):
    """With index keys in bfloat16, an option (`index_dtype`) for a float32 model."""

    index_dtype = torch.bfloat16
