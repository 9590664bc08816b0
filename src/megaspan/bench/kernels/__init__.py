"""`megaspan bench kernels`: every hot operation at real shapes, checked first, then timed.

A case whose result is wrong gives no figure, and nothing of its run is recorded. To add an operation: a
module here with a function of the scale that yields its cases, under `@operation`, imported below.
"""

from megaspan.bench.kernels import (
    decode_layer,
    index_loss,
    index_topk,
    linear,
    moe,
    page_copy,
    quant,
    small,
    sparse_mla,
    verify,
    write_rows,
)
from megaspan.bench.kernels.measure import Measured, Run, measure, run
from megaspan.bench.kernels.report import figures, record, refuse, render

__all__ = ["Measured", "Run", "figures", "measure", "record", "refuse", "render", "run"]
__all__ += [
    "decode_layer",
    "index_loss",
    "index_topk",
    "linear",
    "moe",
    "page_copy",
    "quant",
    "small",
    "sparse_mla",
    "verify",
    "write_rows",
]
