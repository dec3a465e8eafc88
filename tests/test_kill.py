"""A pre-training run that is killed again and again ends with the bits of one that was left alone.

Real processes on the real command line. When to kill is read off the run's own log.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

STEPS = 60
KILLED = sorted(random.Random(9).sample(range(2, 50), 5))
ENDED = 54  # by SIGTERM, after the last kill
SECONDS = 60.0  # no step takes as long


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen pictures of noise in the folders of the tiny task."""
    root, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("pretrain", 6), ("val", 2)):
        for label in ("a", "b"):
            folder = root / "classification" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


class Command:
    """`python -m mae_bench pretrain` of sixty small steps, below ``out``."""

    def __init__(self, pictures: Path, out: Path) -> None:
        self.pictures, self.out = pictures, out

    @contextmanager
    def started(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        values = (f"steps={STEPS}", "warmup_steps=4", "batch=8", "eval_every_steps=50")
        settings = [f"--set={value}" for value in values]
        command = ["pretrain", "--backbone", "vit_t_mae", "--task", "tiny_pretrain", "--device", "cpu", "--quiet"]
        places = [f"--data={self.pictures}", f"--out={self.out}"]
        with subprocess.Popen(
            [sys.executable, "-m", "mae_bench", *command, *settings, *places, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @property
    def folder(self) -> Path:
        (folder,) = (self.out / "tiny_pretrain/vit_t_mae").iterdir()
        return folder

    def steps(self) -> list[int]:
        """Every step that the log tells of, in the order in which they were done; some twice."""
        logs = list(self.out.glob("tiny_pretrain/vit_t_mae/*/log.txt"))
        return [int(step) for step in re.findall(rf"step (\d+)/{STEPS}", logs[0].read_text())] if logs else []

    def wait_for(self, step: int, after: int, process: subprocess.Popen[str]) -> None:
        """Until the log, whose first ``after`` steps are of processes before, tells of ``step`` or a later one."""
        deadline = time.monotonic() + SECONDS
        while max(self.steps()[after:], default=0) < step:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.mark.slow
def test_a_run_killed_five_times_and_ended_once_equals_one_left_alone(pictures: Path, tmp_path: Path) -> None:
    alone, cut = Command(pictures, tmp_path / "alone"), Command(pictures, tmp_path / "cut")
    with alone.started("--workers=0") as whole:
        for step in KILLED:
            done = len(cut.steps())
            with cut.started("--workers=0", "--resume") as process:
                cut.wait_for(step, done, process)
                process.kill()
            assert process.returncode == -signal.SIGKILL
            _went_on(cut, done)
        done = len(cut.steps())
        with cut.started("--workers=1", "--resume") as process:
            cut.wait_for(ENDED, done, process)
            os.killpg(process.pid, signal.SIGTERM)  # as torchrun and SLURM do: loaders hear of it too
            out, err = process.communicate(timeout=SECONDS)
        _went_on(cut, done)
        last = cut.steps()[-1]
        line = f"mae_bench: stopped by SIGTERM after step {last}; the same command with --resume goes on\n"
        assert (process.returncode, out, err) == (75, "", line)
        assert (cut.folder / f"checkpoints/step_{last:09}.pt").is_file()
        with cut.started("--workers=1", "--resume") as process:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, err
        assert cut.steps()[-(STEPS - last) :] == list(range(last + 1, STEPS + 1))
        assert whole.communicate(timeout=SECONDS)[1] == ""
    assert alone.steps() == list(range(1, STEPS + 1))
    for file in ("encoder.safetensors", "mae.safetensors"):
        assert (cut.folder / file).read_bytes() == (alone.folder / file).read_bytes()
    one, other = (json.loads((run.folder / "record.json").read_text()) for run in (alone, cut))
    for part in ("history", "metrics", "best", "baseline", "effective", "recipe_hash"):
        assert one[part] == other[part], part
    assert len(one["history"]) == STEPS + 2


def _went_on(run: Command, done: int) -> None:
    """The last process did not begin anew, but at most two steps, the distance of resume files, before its end."""
    steps = run.steps()
    if done:
        assert steps[done] > steps[done - 1] - 2
