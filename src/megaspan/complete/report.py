"""What a completion cost: one record, shown as a table or as JSON."""

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from megaspan.config import ModelConfig
from megaspan.costs.flops import DENSE, Schedule, prefill_flops

ENDINGS = {"end": "ended by the model", "max_tokens": "stopped by --max-tokens", "interrupt": "interrupted"}


@dataclass
class Completion:
    """A completion as far as it got, with what was measured on the way. Times in seconds, memory in bytes."""

    config: ModelConfig
    prompt_tokens: int
    files_included: tuple[str, ...] = ()
    files_left_out: tuple[str, ...] = ()
    truncated: str | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stopped_by: str = "interrupt"
    """One of ENDINGS."""
    tokens_read: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    latent_bytes: int = 0
    index_bytes: int = 0

    @property
    def prefill_speed(self) -> float | None:
        """Prompt tokens per second."""
        return self.tokens_read / self.prefill_seconds if self.tokens_read else None

    @property
    def decode_speed(self) -> float | None:
        """Steps per second; the first token comes with the prompt and is not a step."""
        return self.decode_steps / self.decode_seconds if self.decode_steps else None

    def flops_per_token(self) -> dict[str, float]:
        """Mean over the tokens read and generated: as spent, with per-layer indexers, dense attention."""
        schedules = {
            "spent": Schedule.published(self.config),
            "per_layer_indexers": Schedule.all_full(self.config),
            "dense_attention": DENSE,
        }
        tokens, logits = self.tokens_read + self.decode_steps, 1 + self.decode_steps
        if not tokens:
            return dict.fromkeys(schedules, 0.0)
        parts = {name: prefill_flops(self.config, 0, tokens, schedules[name], logits) for name in schedules}
        return {name: sum(flops.values()) / tokens for name, flops in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `megaspan complete --json`; a speed that was not measured is null."""
        return {
            **self.settings,
            "completion": self.text,
            "stopped_by": self.stopped_by,
            "completion_tokens": len(self.token_ids),
            "context_tokens": self.prompt_tokens,
            "files_included": list(self.files_included),
            "files_left_out": list(self.files_left_out),
            "files_skipped": self.skipped,
            "truncated": self.truncated,
            "prefill_seconds": self.prefill_seconds,
            "prefill_tokens_per_second": self.prefill_speed,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.decode_speed,
            "latent_bytes": self.latent_bytes,
            "index_bytes": self.index_bytes,
            "flops_per_token": self.flops_per_token(),
        }

    def table(self) -> Table:
        """The closing table."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column(style="dim", overflow="fold")
        cut = f"the beginning of {self.truncated} cut off" if self.truncated else ""
        table.add_row("context", f"{self.prompt_tokens:,} tokens", cut)
        if self.files_included:
            rest = f"{len(self.files_left_out):,} left out, {sum(self.skipped.values()):,} skipped"
            table.add_row("files", f"{len(self.files_included):,}", rest)
        generated = f"{len(self.token_ids):,} tokens, {ENDINGS[self.stopped_by]}"
        table.add_row("prefill", _speed(self.prefill_speed), f"{self.prefill_seconds:.1f} s")
        table.add_row("decode", _speed(self.decode_speed), generated)
        layers, full = self.config.num_hidden_layers, len(self.config.full_layers)
        table.add_row("KV rows", _mebibytes(self.latent_bytes), f"in {layers} layers")
        table.add_row("index rows", _mebibytes(self.index_bytes), f"in {full} of {layers} layers")
        flops = self.flops_per_token()
        table.add_row("FLOPs per token", f"{flops['spent'] / 1e6:,.1f} M", "spent")
        others = {"per_layer_indexers": "an indexer in each layer", "dense_attention": "dense attention"}
        for name, label in others.items():
            ratio = f" ({flops[name] / flops['spent']:.2f} times)" if flops["spent"] else ""
            table.add_row("", f"{flops[name] / 1e6:,.1f} M", label + ratio)
        return table


def _speed(speed: float | None) -> str:
    return f"{speed:,.1f} tokens/s" if speed else "not measured"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
