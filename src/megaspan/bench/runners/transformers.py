"""transformers' GlmMoeDsaForCausalLM with its own cache."""

from pathlib import Path

import torch
from torch import Tensor

from megaspan.bench.runners import CHUNK, Progress

PACKAGES = ("transformers",)


class Runner:
    def __init__(self, checkpoint: Path, capacity: int, threads: int):
        from transformers import DynamicCache, GlmMoeDsaForCausalLM

        torch.set_num_threads(threads)
        self.model = GlmMoeDsaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.cache = DynamicCache(config=self.model.config)  # grows by itself: capacity is not asked for

    def prefill(self, token_ids: list[int], on_progress: Progress) -> Tensor:
        logits = torch.empty(0)
        for start in range(0, len(token_ids), CHUNK):
            chunk = token_ids[start : start + CHUNK]
            logits = self._read(chunk)
            on_progress(start + len(chunk), len(token_ids))
        return logits

    def step(self, token_id: int) -> Tensor:
        return self._read([token_id])

    @torch.inference_mode()
    def _read(self, token_ids: list[int]) -> Tensor:
        output = self.model(torch.tensor([token_ids]), cache=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float()
