"""Run under torchrun by test_detection_run: trains and evaluates in two processes and writes what each one saw."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from detection_cases import SPEC, Oracle, job, values

from mae_bench.checkpoints.load import read_tensors
from mae_bench.data import open_dataset
from mae_bench.detection.data import evaluation_examples, read_split
from mae_bench.detection.evaluate import evaluate
from mae_bench.detection.run import run
from mae_bench.engine import distributed
from mae_bench.engine.job import Options
from mae_bench.engine.samplers import ExactShard


def main(folder: Path) -> None:
    distributed.init(Options(device="cpu"))
    dataset = open_dataset(SPEC, folder / "data")
    split = dataset.coco("val")
    examples = evaluation_examples(read_split(split), values())
    shard = list(ExactShard(len(examples), distributed.rank(), 2))
    found = evaluate(Oracle(split), examples, split, shard=shard, batch=1, workers=0)
    assert found.metrics["box_AP"] > 99.9, "each process detected on half of the pictures"
    straight = run(job(folder / "run", values(batch=8, eval_every_steps=2), dataset, micro_batch=2))
    distributed.barrier()
    if distributed.main_process():
        sorted((folder / "run/checkpoints").iterdir())[-1].unlink()  # as if the run had ended before its last step
    distributed.barrier()
    again = run(job(folder / "run", values(batch=8, eval_every_steps=2), dataset, micro_batch=2, resume=True))
    assert again.history == straight.history
    distributed.barrier()
    tensors, _ = read_tensors(folder / "run/model.safetensors")
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    seen = {
        "metrics": straight.metrics,
        "history": straight.history,
        "effective": straight.effective,
        "parameters": total.hexdigest(),
    }
    (folder / f"seen_{distributed.rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
