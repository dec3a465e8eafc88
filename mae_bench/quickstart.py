"""The main job on tiny data: pre-train, transfer to four tasks from three initialisations, and compare."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from mae_bench import provenance, runs, samples, tabulate
from mae_bench.engine.job import Options
from mae_bench.engine.progress import Progress
from mae_bench.reporting import page

TASKS = ("tiny_coco", "tiny_ade20k", "tiny_finetune", "tiny_linear")  # the long ones first
INITIALISATIONS = ("scratch", "supervised", "mae")
PAGE = "report.html"
PICTURES = "reconstructions.png"  # the samples that MAE pre-training leaves
MOST_PROCESSES = 4  # each takes about 1 GiB


def run(out: Path, seeds: Sequence[int] = (0,)) -> None:
    """Twelve runs per seed below ``out``, ``table.md``, the page ``report.html`` and ``reconstructions.png``.

    Runs that are already there are kept, so an interrupted quickstart goes on where it stopped.
    """
    started = time.monotonic()
    made = {init: runs.pretrain(f"vit_t_{init}")[0] for init in ("mae", "supervised")}
    jobs = [(task, f"vit_t_{init}") for task in TASKS for init in INITIALISATIONS]
    _transfer_all(jobs, seeds, out)
    pictures = made["mae"].folder / samples.FILE
    if pictures.is_file():  # not where the disk was full when they were to be drawn
        shutil.copyfile(pictures, out / PICTURES)
    text = tabulate.text(paths=[out], layout="long")
    (out / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{len(jobs) * len(seeds)} runs in {(time.monotonic() - started) / 60:.1f} minutes")
    page.write(tabulate.report([out]), out / PAGE)
    print(f"table: {out / 'table.md'}\npage: {out / PAGE}")
    if pictures.is_file():
        print(f"reconstructions: {out / PICTURES}")


def _transfer_all(jobs: list[tuple[str, str]], seeds: Sequence[int], out: Path) -> None:
    """The runs side by side, one thread each: models this small do not keep two cores busy."""
    count = min(provenance.hardware()["cores"], MOST_PROCESSES)
    # Read by the new processes when they import torch.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool, Progress(len(jobs), "transfer", False) as progress:
        futures = {pool.submit(_transfer, task, backbone, seeds, out): (task, backbone) for task, backbone in jobs}
        for number, done in enumerate(as_completed(futures), 1):
            for one in done.result():
                value = f"{one.record.metric} {one.record.value:.2f}" if one.record.value is not None else "undefined"
                print(f"{' '.join(futures[done])} seed {one.record.seed}: {value}", flush=True)
            progress.update(number)


def _transfer(task: str, backbone: str, seeds: Sequence[int], out: Path) -> list[runs.Run]:
    return runs.run(task, backbone, seeds=seeds, options=Options(out=out, resume=True, quiet=True, workers=0))
