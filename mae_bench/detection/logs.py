"""detectron2's chatter goes to the run's ``log.txt``, not to the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

# The last one warns about a question that detectron2 asks torch in every forward pass.
LOGGERS = ("detectron2", "fvcore", "iopath", "faster_coco_eval", "torch.fx._symbolic_trace")
# Deprecations in detectron2's code that its users can do nothing about: (message, category).
KNOWN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"The 'warn' method is deprecated", DeprecationWarning),
    (r"The given NumPy array is not writable", UserWarning),  # bitmaps; it only reads them
    (r"torch\.meshgrid: in an upcoming release", UserWarning),
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", FutureWarning),
)


@contextlib.contextmanager
def logged(file: Path) -> Iterator[None]:
    """While open, log records of detectron2 and its helpers are appended to ``file`` and to nothing else."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        with warnings.catch_warnings():
            for message, category in KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()


@contextlib.contextmanager
def printed_to_log() -> Iterator[None]:
    """What the COCO evaluation prints becomes one log record."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield
    if text := out.getvalue().strip():
        logging.getLogger("detectron2").info("COCO evaluation:\n%s", text)
