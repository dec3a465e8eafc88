"""Ten thousand records: reading, aggregating and tabulating them, and the memory that it takes.

    python benchmarks/records.py [--records 10000] [--history 45] [--per-class 20]

The records are made in a temporary folder, in the layout and size of real ones: fifty recipes (tasks x backbones x
overridden values), seeds, a history and scores per class. Times are the least of three, of one process and with the
files in the system's cache; memory is what loading adds to a fresh process's peak, for histories of two lengths.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mae_bench.recipes import digest
from mae_bench.reporting import cells, store, tables
from mae_bench.reporting.record import Record, record_from
from mae_bench.reporting.render import render

TASKS = {
    "tiny_linear": ("classification", "top1", "tiny-linear@1"),
    "tiny_finetune": ("classification", "top1", "tiny-finetune@1"),
    "camvid": ("segmentation", "mIoU", "camvid-upernet-small@1"),
    "coco_small": ("detection", "box_AP", "coco-small-maskrcnn@1"),
    "imagenet_linear": ("classification", "top1", "imagenet-linear@1"),
}
INITS = ("mae", "supervised", "scratch", "dino", "moco_v3")
LAYER_DECAYS = (0.65, 0.75)  # fifty recipes: 5 tasks x 5 initialisations x 2
KEYS = [f"some_value_{number}" for number in range(45)]  # a task has about as many
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def made(count: int, history: int, per_class: int) -> Iterator[Record]:
    """Records of ``count`` runs, each with its own numbers, from a fixed seed."""
    noise = random.Random(0)
    recipes = [(task, init, decay) for task in TASKS for init in INITS for decay in LAYER_DECAYS]
    for number in range(count):
        seed, which = divmod(number, len(recipes))
        yield record_from(_values(*recipes[which], seed, number, history, per_class, noise))


def _values(
    task: str, init: str, decay: float, seed: int, number: int, history: int, per_class: int, noise: random.Random
) -> dict[str, Any]:
    engine, metric, protocol = TASKS[task]
    backbone, created = f"vit_t_{init}", FIRST + timedelta(minutes=number)
    recipe: dict[str, Any] = {
        "task": task,
        "protocol": protocol,
        "data": {"format": "image_folder", "folder": task, "train": "train", "val": "val", "expected": {"val": 1000}},
        "values": {"layer_decay": decay} | {key: 0.1 * index for index, key in enumerate(KEYS)},
        "backbone": {"name": backbone, "size": "t", "init": init, "architecture": {"width": 192, "depth": 12}},
    }
    origins = {
        key: {"place": f"tasks/{task}/task.toml layer 1 (all)", "source": "MAE, arXiv 2111.06377, Table 9"}
        for key in recipe["values"]
    }
    value = noise.uniform(20, 80)
    return {
        "run_id": f"{task}.{backbone}.seed{seed}-{number:08x}.{created:%Y%m%dT%H%M%SZ}",
        "created": created.isoformat(timespec="seconds"),
        "task": task,
        "engine": engine,
        "metric": metric,
        "protocol": f"{protocol}+set:{digest({'layer_decay': decay})[:8]}",
        "recipe_protocol": protocol,
        "backbone": backbone,
        "size": "t",
        "init": init,
        "seed": seed,
        "metrics": {metric: value, "val_loss": noise.random()},
        "best": {metric: value, "val_loss": noise.random()},
        "baseline": {metric: 10.0},
        "per_class": {f"class {index}": {"IoU": noise.random(), "Acc": noise.random()} for index in range(per_class)},
        "history": [{"step": 10.0 * step, "loss": noise.random(), "lr": noise.random()} for step in range(history)],
        "recipe": recipe | {"origins": origins},
        "recipe_hash": digest(recipe),
        "overridden": ["layer_decay"],
        "code_hash": "2" * 64,
        "weights": {"kind": "none"} if init == "scratch" else {"kind": "file", "sha256": "3" * 64},
        "data": {"name": task, "fingerprint": "4" * 64, "counts": {"train": 8000, "val": 1000}, "matches": True},
        "git": {"commit": "5" * 40},
        "versions": {"python": "3.11", "torch": "2.6.0", "timm": "1.0.20", "numpy": "2.1.0"},
        "hardware": {"cpu": "a cpu", "cores": 2, "memory_gib": 4.0, "platform": "Linux"},
        "times": {"started": FIRST.isoformat(), "seconds": 60.0 * number},
        "command": ["python", "-m", "mae_bench", "run", "--task", task, "--backbone", backbone],
    }


def write(folder: Path, records: Iterator[Record]) -> int:
    """Promoted records as `write_record` lays them out, without its waits for the disk. Returns their bytes."""
    total = 0
    for record in records:
        path = folder / record.task / record.backbone / f"{record.run_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        total += path.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return total


def least(act: Callable[[], Any], repeats: int = 3) -> str:
    """Seconds of the fastest of ``repeats``, by the clock and of the processor."""
    times = []
    for _ in range(repeats):
        gc.collect()
        clock, processor = time.perf_counter(), time.process_time()
        act()
        times.append((time.perf_counter() - clock, time.process_time() - processor))
    clock, processor = (min(column) for column in zip(*times, strict=True))
    return f"{clock:6.2f} s ({processor:.2f} s of the processor)"


def growth(folder: Path) -> float:
    """MiB that `load_frame` adds to the peak memory of a fresh process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_growth, (folder,))


def _growth(folder: Path) -> float:
    store.frame([])
    before = _peak_kib()
    store.load_frame([folder])
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    # VmHWM, not ru_maxrss: that one begins with the size of the process it was forked from.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=45)
    parser.add_argument("--per-class", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, long = Path(temporary, "records"), Path(temporary, "long")
        size = write(folder, made(args.records, args.history, args.per_class))
        print(f"{args.records} records, {size / args.records / 1024:.1f} KiB each")
        runs = store.load_frame([folder])
        print(f"load_frame            {least(lambda: store.load_frame([folder]))}")
        print(f"load_frame and cells  {least(lambda: cells.cells(cells.select(store.load_frame([folder]))[0]))}")
        print(f"table of the frame    {least(lambda: render(tables.results(runs), 'markdown'))}")
        few = max(1, args.records // 10)
        write(long, made(few, 10 * args.history, args.per_class))
        print(f"memory                {growth(folder):6.1f} MiB for {args.records} records")
        print(f"memory                {growth(long):6.1f} MiB for {few} with histories ten times as long")


if __name__ == "__main__":
    main()
