"""What a run shows while it trains: a bar on standard error, and curves for tensorboard."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megaspan.errors import UserError
from megaspan.train.recipe import Stage

SECONDS_BETWEEN_LINES = 30  # where standard error is a file


class StageProgress:
    """The bar and the curves of one stage, from step `first` on. A context manager."""

    def __init__(self, stage: Stage, folder: Path, first: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("training needs tensorboard: pip install 'megaspan[train]'") from None
        self.stage = stage
        self.writer = SummaryWriter(str(folder))
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(stage.name, total=stage.steps, completed=first, figures="")
        self.shown_step, self.shown_at = first, time.monotonic()
        self.next_line = self.shown_at

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.writer.close()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def show(self, step: int, figures: dict[str, float]) -> dict[str, float]:
        """Show and log the figures of a step; return them with the step and the tokens per second."""
        now = time.monotonic()
        tokens = (step - self.shown_step) * self.stage.tokens_per_step
        speed = {"tokens_per_second": tokens / max(now - self.shown_at, 1e-9)}
        self.shown_step, self.shown_at = step, now
        for name, value in (figures | speed).items():
            self.writer.add_scalar(name, value, step)
        shown = "  ".join(f"{name.replace('_', ' ')} {value:,.4g}" for name, value in figures.items())
        rate = f"{speed['tokens_per_second']:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, figures=f"loss {figures['loss']:.3f}  {rate}")
        if not self.bar.console.is_terminal and (now >= self.next_line or step == self.stage.steps):
            self.next_line = now + SECONDS_BETWEEN_LINES
            line = f"{self.stage.name} {step}/{self.stage.steps}  {shown}  {rate}"
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return {**figures, **speed, "step": step}
