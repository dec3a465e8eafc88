"""Run under torchrun by test_silent_faults: two processes that find other files under one name, as on two nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mae_bench
from mae_bench import UserError
from mae_bench.engine import distributed
from mae_bench.engine.job import Options


def main(folder: Path, backbone: str) -> None:
    distributed.init(Options(device="cpu"))
    rank = distributed.rank()
    os.chdir(folder / f"node_{rank}")
    weights = Path("encoder.safetensors") if backbone == "vit_t_mae" else None
    options = Options(data=Path("data"), weights=weights, out=folder / "runs", device="cpu", workers=0, quiet=True)
    said = ""
    try:
        mae_bench.run("tiny_linear", backbone, settings=["batch=8", "epochs=1", "warmup_epochs=0"], options=options)
    except UserError as error:
        said = str(error)
    (folder / f"seen_{rank}.json").write_text(json.dumps(said))
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
