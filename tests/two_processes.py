"""A program of these tests in two real processes, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_two_processes(program: str, folder: Path, *arguments: str) -> list[Any]:
    """What each process of ``program``, a file beside this one, left in ``folder`` as ``seen_<rank>.json``."""
    script = Path(__file__).with_name(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(script.parent.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"seen_{rank}.json").read_text()) for rank in (0, 1)]
