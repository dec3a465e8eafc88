"""The main job on tiny data: pre-train, transfer to four tasks from three initialisations, and compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from mae_bench import api, runs
from mae_bench.engine.job import Options

TASKS = ("tiny_linear", "tiny_finetune", "tiny_coco", "tiny_ade20k")
INITIALISATIONS = ("mae", "supervised", "scratch")
PICTURES = "reconstructions.png"  # what MAE pre-training leaves in its folder


def run(out: Path, seeds: Sequence[int] = (0,)) -> None:
    """Twelve runs per seed below ``out``, the table as ``table.md`` and reconstructions as ``reconstructions.png``.

    Runs that are already there are kept, so an interrupted quickstart goes on where it stopped.
    """
    started = time.monotonic()
    options = Options(out=out, resume=True)
    made = {init: runs.pretrain(f"vit_t_{init}")[0] for init in ("mae", "supervised")}
    jobs = [(task, f"vit_t_{init}") for task in TASKS for init in INITIALISATIONS]
    for number, (task, backbone) in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {task} {backbone}", flush=True)
        for one in runs.run(task, backbone, seeds=seeds, options=options):
            print(f"  seed {one.record.seed}: {one.record.metric} {one.record.value}", flush=True)
    shutil.copyfile(made["mae"].folder / PICTURES, out / PICTURES)
    text = api.table(out, layout="long")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{len(jobs) * len(seeds)} runs in {(time.monotonic() - started) / 60:.1f} minutes")
    print(f"table: {out / 'table.md'}\nreconstructions: {out / PICTURES}")
