"""Run under torchrun by test_segmentation_run: trains in two processes, and evaluates a given model in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from segmentation_cases import job, values

from mae_bench.engine import distributed
from mae_bench.engine.job import Options
from mae_bench.segmentation.run import run


def main(folder: Path, weights: Path) -> None:
    distributed.init(Options(device="cpu"))
    chosen = values(eval_every_steps=2, drop_path=0.1)  # as in the fixture `trained`
    this = job(folder / "together", chosen)
    trained = run(this)
    alone = run(job(folder / "alone", chosen, eval_only=True, weights=weights))
    seen = {"trained": trained.metrics, "notes": this.notes, "alone": [alone.metrics, alone.per_class, alone.baseline]}
    (folder / f"seen_{distributed.rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
