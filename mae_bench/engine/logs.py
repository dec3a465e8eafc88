"""mmengine's global state, fenced in: its loggers and hubs live as long as one piece of work and write to a file."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer

_MANAGED = (MMLogger, MessageHub, DefaultScope, Visualizer)  # classes that keep every instance under its name, for ever


@contextmanager
def mm_logs(folder: Path) -> Iterator[str]:
    """Within, what mmengine, mmcv and mmseg log goes to ``folder/log.txt`` and not to the terminal.

    Yields the instance name to give to mmengine (``experiment_name``). All instances that were made within are
    forgotten afterwards, so that any number of runs fits into one process.
    """
    name = f"mae_bench_{uuid.uuid4().hex}"
    before = {kind: set(kind._instance_dict) for kind in _MANAGED}
    logger = MMLogger.get_instance(name, logger_name="mae_bench", log_file=str(folder / "log.txt"), file_mode="a")
    del logger.handlers[0]  # the one that writes to the terminal
    try:
        yield name
    finally:
        for kind in _MANAGED:
            for made in set(kind._instance_dict) - before[kind]:
                instance = kind._instance_dict.pop(made)
                for handler in instance.handlers if kind is MMLogger else ():
                    handler.close()
