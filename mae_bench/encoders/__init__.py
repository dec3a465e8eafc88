"""The ViT encoder. ``Encoder`` is imported on first use: importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mae_bench.encoders.vit import Encoder

__all__ = ["Encoder"]


def __getattr__(name: str) -> Any:
    if name == "Encoder":
        from mae_bench.encoders.vit import Encoder

        return Encoder
    raise AttributeError(f"module 'mae_bench.encoders' has no attribute '{name}'")
