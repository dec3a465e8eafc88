"""Records for the reporting tests: a whole, valid one, and changes to it."""

from __future__ import annotations

from typing import Any

from mae_bench.recipes import digest
from mae_bench.reporting.record import Record, record_from

TASKS = {
    "tiny_linear": ("classification", "top1", "tiny-linear@1"),
    "tiny_coco": ("detection", "box_AP", "tiny-maskrcnn@1"),
    "coco": ("detection", "box_AP", "coco-vitdet-maskrcnn-1024@1"),
}


def values(
    task: str = "tiny_linear", init: str = "mae", size: str = "t", seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """Values of a record. ``value`` sets the primary metric, other names replace a field."""
    engine, metric, protocol = TASKS[task]
    value = changes.pop("value", 50.0)
    record = {
        "run_id": f"{task}.vit_{size}_{init}.seed{seed}",
        "created": f"2026-01-01T00:{seed % 60:02d}:00+00:00",
        "task": task,
        "engine": engine,
        "metric": metric,
        "protocol": protocol,
        "recipe_protocol": protocol,
        "backbone": f"vit_{size}_{init}",
        "size": size,
        "init": init,
        "seed": seed,
        "metrics": {metric: value, "other": 1.0},
        "recipe": {"values": {"epochs": 1.0}},
        "recipe_hash": "1" * 64,
        "code_hash": "2" * 64,
        "weights": {"kind": "none" if init == "scratch" else "file", "sha256": "" if init == "scratch" else "3" * 64},
        "data": {"name": "shapes", "fingerprint": "4" * 64, "counts": {"train": 8, "val": 8}, "matches": True},
        "git": {"commit": "5" * 40, "dirty": False},
        "versions": {"python": "3.11"},
        "hardware": {"cpu": "a cpu", "cores": 2, "memory_gib": 4.0, "platform": "Linux"},
        "times": {"started": "2026-01-01T00:00:00+00:00", "seconds": 1.5},
        "command": ["python", "-m", "mae_bench", "run"],
    }
    return record | changes


def record(*args: Any, **changes: Any) -> Record:
    return record_from(values(*args, **changes))


def sound_values(*args: Any, overridden: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`values` of a record whose parts agree, as a run writes it: hash, protocol, run id, history and scores per class.

    ``overridden`` are values that ``--set`` changed.
    """
    made = values(*args, **changes)
    task, backbone, metric, overridden = made["task"], made["backbone"], made["metric"], overridden or {}
    recipe = {
        "task": task,
        "protocol": made["recipe_protocol"],
        "data": {"format": "image_folder"},
        "values": {"epochs": 1.0, "base_lr": 0.1} | overridden,
        "backbone": {"name": backbone, "size": made["size"], "init": made["init"]},
    }
    stamp = made["created"].replace("-", "").replace(":", "").removesuffix("+0000") + "Z"
    suffix = f"+set:{digest(overridden)[:8]}" if overridden else ""
    value = made["metrics"][metric]
    return made | {
        "run_id": f"{task}.{backbone}.seed{made['seed']}-0a1b2c3d.{stamp}",
        "protocol": made["recipe_protocol"] + suffix,
        "recipe": recipe | {"origins": {"epochs": {"place": "layer 1", "source": "a paper"}}},
        "recipe_hash": digest(recipe),
        "overridden": sorted(overridden),
        "times": {"started": made["created"], "seconds": 1.5},
        "best": {metric: value},
        "history": [{"step": 1.0, "loss": 2.0}, {"step": 2.0, metric: value - 1}, {"step": 3.0, metric: value}],
    }


def sound(*args: Any, **changes: Any) -> Record:
    return record_from(sound_values(*args, **changes))
