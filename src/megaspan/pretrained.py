"""The Python face: load a checkpoint, ask it for logits or tokens, save it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaspan.cache.transient import TransientCache
from megaspan.engine.generation import check_prompt, generate
from megaspan.model.batch import Batch
from megaspan.model.folder import LanguageModel, load_folder, save_folder


class PretrainedModel(LanguageModel):
    """A model that answers: logits of a sequence, and tokens after it."""

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """token_ids [T] → float32 logits [T, V] of the whole sequence. UserError for ids it cannot read."""
        prompt = check_prompt(self.config, token_ids)
        batch = Batch.of([prompt], device=str(self.lm_head.weight.device))
        return self.unembed(self(batch, TransientCache()))

    def generate(
        self,
        token_ids: Sequence[int] | Tensor,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield sampled token ids until an end-of-sequence id (yielded too) or `max_tokens` of them."""
        vocabulary = self.tokenizer.vocab_size if self.tokenizer is not None else None
        return generate(self, token_ids, max_tokens, temperature, seed, vocabulary=vocabulary)


def load(path: str | Path, dtype: str | torch.dtype = "auto", device: str = "cpu") -> PretrainedModel:
    """Read a Hugging Face `glm_moe_dsa` checkpoint folder.

    dtype: "float32", "bfloat16", or "auto": what the checkpoint says where the device multiplies it
    fast, else float32. Raises UserError when a file is missing, damaged, or of another architecture.
    """
    return load_folder(path, dtype, device, PretrainedModel)


save = save_folder
