"""llama.cpp through llama-cpp-python's C interface: batches of CHUNK, float32 cache, flash attention."""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaspan.bench.gguf_file import write_gguf
from megaspan.bench.runners import CHUNK, Progress
from megaspan.errors import UserError

PACKAGES = ("llama-cpp-python", "gguf")
GGML_TYPE_F32 = 0
FLASH_ATTENTION_OFF, FLASH_ATTENTION_ON = 0, 1


class Runner:
    flash_attention = FLASH_ATTENTION_ON

    def __init__(self, checkpoint: Path, capacity: int, threads: int):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        path = checkpoint / "model.gguf"
        if not path.exists():
            write_gguf(checkpoint, path)
        self.library: Any = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept alive: C holds it
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            raise UserError(f"llama.cpp does not load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = -(-capacity // 256) * 256
        parameters.n_batch = parameters.n_ubatch = CHUNK
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = GGML_TYPE_F32
        parameters.flash_attn_type = self.flash_attention
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise UserError(f"llama.cpp makes no context of {capacity} tokens")

    def prefill(self, token_ids: list[int], on_progress: Progress) -> Tensor:
        for start in range(0, len(token_ids), CHUNK):
            chunk = token_ids[start : start + CHUNK]
            self._read(chunk)
            on_progress(start + len(chunk), len(token_ids))
        return self._logits()

    def step(self, token_id: int) -> Tensor:
        self._read([token_id])
        return self._logits()

    def _read(self, token_ids: list[int]) -> None:
        array = (self.library.llama_token * len(token_ids))(*token_ids)
        batch = self.library.llama_batch_get_one(array, len(token_ids))
        code = self.library.llama_decode(self.context, batch)
        if code != 0:
            raise UserError(f"llama.cpp stopped with code {code}")
        self.library.llama_synchronize(self.context)

    def _logits(self) -> Tensor:
        pointer = self.library.llama_get_logits_ith(self.context, -1)
        return torch.tensor(pointer[: self.vocab_size])


class ExactRunner(Runner):
    """Without flash attention, which rounds: slower, but comparable to the others digit by digit."""

    flash_attention = FLASH_ATTENTION_OFF
