"""Progress of long work: a bar with the time left on a terminal, a few plain lines anywhere else. Imports no torch."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

LINES = 10  # plain lines per piece of work; work within other work prints none of them
LINE_SECONDS = 30.0  # but a line so often all the same


class Progress:
    """Shows how far ``label`` is on stderr. Several may be open at once, e.g. an evaluation within training.

    ``quiet`` shows nothing (other processes than the first one should pass it).
    """

    _bars: ClassVar[Bars | None] = None  # rich allows one live display; inner work adds a line to it
    _open: ClassVar[int] = 0  # displays that are not quiet

    def __init__(self, total: int, label: str, quiet: bool = False) -> None:
        self.total = total
        self.label = label
        self.quiet = quiet
        self._inner = Progress._open > 0
        self._terminal = not quiet and sys.stderr.isatty()
        self._started = self._last_time = time.monotonic()
        self._first: int | None = None
        self._last_line = 0
        self._closed = quiet
        if quiet:
            return
        Progress._open += 1
        if self._terminal:
            if Progress._bars is None:
                Progress._bars = _make_bars()
                Progress._bars.start()
            self._task = Progress._bars.add_task(label, total=total, metrics="")

    def update(self, step: int, **metrics: float) -> None:
        """``step`` of ``total`` are done; ``metrics`` stand beside it."""
        if self._first is None:  # a resumed run starts above 0, and that part took no time
            self._first = step - 1
        text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self._terminal and Progress._bars is not None:
            Progress._bars.update(self._task, completed=step, metrics=text)
        elif not self.quiet:
            self._line(step, text)

    def _line(self, step: int, text: str) -> None:
        now = time.monotonic()
        share = step * LINES // self.total if self.total else LINES
        if (self._inner or share == self._last_line) and now - self._last_time < LINE_SECONDS:
            return
        self._last_line, self._last_time = share, now
        assert self._first is not None
        rate = (now - self._started) / max(1, step - self._first)
        left = _clock(rate * (self.total - step))
        print(f"{self.label}  {step}/{self.total}  {text}  {left} left", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        Progress._open -= 1
        if self._terminal and Progress._bars is not None:
            Progress._bars.remove_task(self._task) if Progress._open else Progress._bars.stop()
        if not Progress._open:
            Progress._bars = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_bars() -> Bars:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    return Bars(*columns, console=Console(stderr=True))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
