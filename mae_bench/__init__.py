"""Pre-train Masked Autoencoders and measure how well their encoders transfer.

Everything that the command line does is one import away::

    import mae_bench
    runs = mae_bench.run("tiny_linear", "vit_t_mae", seeds=[0, 1, 2])
    encoder = mae_bench.load_encoder("vit_t_mae")
    frame = mae_bench.results("runs")

Importing the package imports no torch; the first call that needs it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mae_bench.api import load_encoder, results, table
    from mae_bench.engine.job import Options
    from mae_bench.errors import UserError
    from mae_bench.recipes import load_backbone, load_task, resolve_task
    from mae_bench.runs import Run, pretrain, run

_HOMES = {
    "Options": "mae_bench.engine.job",
    "Run": "mae_bench.runs",
    "UserError": "mae_bench.errors",
    "load_backbone": "mae_bench.recipes",
    "load_encoder": "mae_bench.api",
    "load_task": "mae_bench.recipes",
    "pretrain": "mae_bench.runs",
    "resolve_task": "mae_bench.recipes",
    "results": "mae_bench.api",
    "run": "mae_bench.runs",
    "table": "mae_bench.api",
}

__all__ = [
    "Options",
    "Run",
    "UserError",
    "load_backbone",
    "load_encoder",
    "load_task",
    "pretrain",
    "resolve_task",
    "results",
    "run",
    "table",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mae_bench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
