"""Run under torchrun by test_engine_compiling: pre-training in two processes, plain and with compiled blocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine_processes import losses

from mae_bench.engine import distributed
from mae_bench.engine.job import Options


def main(folder: Path) -> None:
    distributed.init(Options(device="cpu"))
    seen = {
        "plain": losses(folder / "plain"),
        "replicated": losses(folder / "replicated", compile=True, micro_batch=16),
        "sharded": losses(folder / "sharded", compile=True, fsdp=True),
    }
    (folder / f"seen_{distributed.rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
