"""Two processes do what one does: the same steps, and the same counts, each image once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from classification_toys import classification_job, linear, make_pictures
from engine_toys import make_job, make_values, train

from mae_bench.classification.run import run
from mae_bench.engine import distributed
from mae_bench.engine.job import Options
from mae_bench.errors import UserError


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")  # 11 pictures to evaluate: the shards are uneven
    alone = run(classification_job(tmp_path, "alone", linear(), dataset))
    for name in ("toy", "probe", "measured", "single"):
        (tmp_path / name).mkdir()
    program = str(Path(__file__).with_name("engine_two_processes.py"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*launcher, program, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert (first["sum"], first["ranks"]) == ([3], [0, 1])
    assert (first["effective"]["world_size"], first["effective"]["accumulation"]) == (2, 2)
    assert (tmp_path / "probe/model.safetensors").is_file()
    # The same trained model: identical counts, and so identical percentages.
    metrics, per_class = first["measured"]
    assert (metrics["top1"], metrics["top5"], per_class) == (
        alone.metrics["top1"],
        alone.metrics["top5"],
        alone.per_class,
    )
    assert metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], rel=1e-6)
    # The same training, where nothing depends on how a batch is split.
    model, fitted = train(make_job(tmp_path / "single", make_values(eval_every_epochs=1, ema=0.5)), noisy=False)
    for mine, theirs in zip(model.parameters(), first["parameters"], strict=True):
        torch.testing.assert_close(mine.data, torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(fitted.history, first["history"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_single_process_needs_no_group() -> None:
    distributed.init(Options(device="cpu"))
    assert (distributed.rank(), distributed.world_size(), distributed.main_process()) == (0, 1, True)
    assert distributed.gather_objects("x") == ["x"]
    assert distributed.sum_over_processes(torch.tensor([2])).tolist() == [2]
    distributed.barrier()
    distributed.shutdown()


def test_devices() -> None:
    assert distributed.device(Options(device="cpu")) == torch.device("cpu")
    if torch.cuda.is_available():
        assert distributed.device(Options()).type == "cuda"
    else:
        assert distributed.device(Options()) == torch.device("cpu")
        with pytest.raises(UserError, match="torch sees no GPU"):
            distributed.device(Options(device="cuda"))
