"""What the command line asks of `megaspan bench slice`."""

from dataclasses import dataclass

from megaspan.bench.device_time import require_device
from megaspan.bench.kernels.registry import size
from megaspan.costs.memory import Format
from megaspan.errors import UserError

PARTS = ("decode", "batches", "attention", "invariant", "transformers")
ROWS: dict[str, tuple[Format, ...]] = {
    "fp8": ("fp8",),
    "bfloat16": ("bfloat16",),
    "both": ("fp8", "bfloat16"),
}
SHORT = 131072  # where decoding is measured beside the end of the context


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    config: str = "glm-5.2"
    layers: int = 4
    context: int = 1048576
    experts: int = 0
    rows: str = "both"
    chunk: int = 8192
    parts: tuple[str, ...] = PARTS
    device: str = "cuda"

    def check(self) -> None:
        """UserError for what cannot be."""
        if self.rows not in ROWS:
            raise UserError(f"there are no rows {self.rows!r}: choose from {', '.join(ROWS)}")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise UserError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        least = {"layers": 1, "chunk": 1, "context": 2, "experts": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UserError(f"--{name} is {getattr(self, name)}: give at least {smallest}")
        if self.context % self.chunk:
            raise UserError(
                f"--context {self.context} is no multiple of --chunk {self.chunk}: choose another chunk"
            )
        cpu = "--device cpu --config debug --context 256 --chunk 64 runs on a CPU"
        require_device(self.device, without=cpu)

    @property
    def command(self) -> str:
        given = [f"--config {self.config} --layers {self.layers} --context {self.context}"]
        given += [f"--experts {self.experts}"] if self.experts else []
        given += [f"--rows {self.rows}"] if self.rows != "both" else []
        given += [f"--chunk {self.chunk}"] if self.chunk != 8192 else []
        given += [f"--parts {','.join(self.parts)}"] if self.parts != PARTS else []
        return " ".join(["megaspan bench slice", *given])

    @property
    def lengths(self) -> tuple[int, int]:
        """Where decoding is measured: on the way, and at the end."""
        return (SHORT if self.context > SHORT else self.context // 2), self.context

    @property
    def whole(self) -> str:
        """The context in words."""
        return size(self.context)
