"""What is to be reached at real widths on one H200, and what others' kernels take there.

The peers' figures were measured on another day on a machine of the same kind, with CUDA graphs or a flushed
cache as here; DeepGEMM 2.6.1, FlashMLA 9241ae3, SGLang 0.5.23's topk_v2, DeepSelect.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """In the unit of the case. memory: GiB of working memory. peer: others' best figure, in words."""

    target: float | None = None
    peer: str | None = None
    memory: float | None = None


GOALS = {
    "index_topk prefill, 4096 queries x 1M": Goal(40, "DeepGEMM + DeepSelect: 40.4 + 5.6 ms, 17 GB", 1),
    "index_topk prefill, 4096 queries x 128K": Goal(5.5, "DeepGEMM + DeepSelect: 4.9 + 1.1 ms", 1),
    "index_topk decode, batch 1 at 128K": Goal(peer="DeepGEMM + topk_v2: 7.9 + 8.2 µs"),
    "index_topk decode, batch 1 at 1M": Goal(58, "DeepGEMM + topk_v2: 61 µs"),
    "index_topk decode, batch 32 at 1M": Goal(1150, "DeepGEMM + topk_v2: 1187 µs"),
    "sparse_mla prefill, 4096 queries, 128K bf16 rows": Goal(peer="FlashMLA: 2.46 ms"),
    "sparse_mla prefill, 4096 queries, 1M bf16 rows": Goal(2.65, "FlashMLA: 2.65 ms"),
    "sparse_mla prefill, 4096 queries, 1M FP8 rows": Goal(3.2, "no prefill with FP8 rows"),
    "sparse_mla decode, batch 1, FP8 rows": Goal(13, "FlashMLA: 18 µs"),
    "sparse_mla decode, batch 8, FP8 rows": Goal(20, "FlashMLA: 22 µs"),
    "sparse_mla decode, batch 32, FP8 rows": Goal(49, "FlashMLA: 49 µs"),
    "sparse_mla decode, batch 64, FP8 rows": Goal(77, "FlashMLA: 77 µs"),
    "sparse_mla decode, batch 1, FP8 rows, 2 tokens each": Goal(peer="FlashMLA: 19.1 µs"),
    "sparse_mla forward and backward, 4096 queries, 128K rows": Goal(250),
    "one full layer's decode, batch 1 at 128K": Goal(31, "DeepGEMM + topk_v2 + FlashMLA: 34.8 µs"),
    "one full layer's decode, batch 1 at 1M": Goal(72, "DeepGEMM + topk_v2 + FlashMLA: 78.6 µs"),
    "one full layer's decode, batch 8 at 128K": Goal(peer="DeepGEMM + topk_v2 + FlashMLA: 75.6 µs"),
    "one full layer's decode, batch 8 at 1M": Goal(peer="DeepGEMM + topk_v2 + FlashMLA: 334 µs"),
    "one full layer's decode, batch 32 at 128K": Goal(peer="DeepGEMM + topk_v2 + FlashMLA: 213 µs"),
    "one full layer's decode, batch 32 at 1M": Goal(peer="DeepGEMM + topk_v2 + FlashMLA: 1236 µs"),
    "moe, 8192 tokens, bf16 weights": Goal(408),
}
"""By the name of the case."""
