"""Run under torchrun by test_engine_distributed: trains and evaluates in two processes and writes what each one saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from classification_toys import SPEC, linear
from engine_toys import make_job, make_values, same_state, train

from mae_bench.classification.run import run
from mae_bench.data import open_dataset
from mae_bench.data.decode import Oddities
from mae_bench.data.images import Odd
from mae_bench.engine import distributed
from mae_bench.engine.job import Options
from mae_bench.engine.oddities import note_oddities


def main(folder: Path) -> None:
    distributed.init(Options(device="cpu"))
    values = make_values(eval_every_epochs=1, ema=0.5)
    model, fitted = train(make_job(folder / "toy", values, micro_batch=2), noisy=False)
    distributed.barrier()
    if distributed.main_process():
        sorted((folder / "toy/checkpoints").iterdir())[-1].unlink()  # as if the run had ended before its last step
    distributed.barrier()
    resumed, again = train(make_job(folder / "toy", values, micro_batch=2, resume=True), noisy=False)
    assert again == fitted
    assert same_state(resumed, model)
    dataset = open_dataset(SPEC, folder / "data")
    probe = run(make_job(folder / "probe", linear(), dataset))
    weights = folder / "alone/model.safetensors"
    measured = run(make_job(folder / "measured", linear(), dataset, eval_only=True, weights=weights))
    odd = make_job(folder / "toy", values)
    oddities = Oddities(4)
    for picture in (distributed.rank(), 2):  # one of its own, and one that both have read
        oddities.note(picture, Odd.GREY)
    note_oddities(odd, training=oddities)
    seen = {
        "odd": odd.notes,
        "parameters": [parameter.tolist() for parameter in model.parameters()],
        "history": fitted.history,
        "effective": fitted.effective,
        "probe": [probe.metrics, probe.per_class],
        "measured": [measured.metrics, measured.per_class, measured.images],
        "sum": distributed.sum_over_processes(torch.tensor([distributed.rank() + 1])).tolist(),
        "ranks": distributed.gather_objects(distributed.rank()),
    }
    (folder / f"seen_{distributed.rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
