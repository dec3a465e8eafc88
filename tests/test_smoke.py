"""Every task on a tiny and on a base backbone: two steps of the real graph, evaluation, and a record marked smoke."""

from __future__ import annotations

from pathlib import Path

import pytest

from mae_bench import UserError, cli, recipes
from mae_bench.reporting import store

TASKS = sorted(recipes.index("task"))


def _backbone(task: str, size: str) -> str:
    """The first initialisation of a size that the task admits."""
    for init in ("mae", "supervised", "scratch"):
        name = f"vit_{size}_{init}"
        try:
            recipes.resolve_task(task, recipes.load_backbone(name))
        except UserError:
            continue
        return name
    raise AssertionError(f"{task} refuses every backbone of size {size}")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["t", "b"])
@pytest.mark.parametrize("task", TASKS)
def test_smoke(task: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbone = _backbone(task, size)
    pretrains = recipes.load_task(task).engine == "pretraining"
    command = "pretrain" if pretrains else "run"
    words = [command, "--task", task, "--backbone", backbone, "--smoke", "--quiet", "--out", str(tmp_path)]
    assert cli.main(words) == 0, capsys.readouterr().err
    (record,) = store.load_records([tmp_path])
    assert record.smoke and record.protocol.endswith("+smoke")
    assert record.task == task and record.backbone == backbone
    assert record.effective["steps"] == 2
    assert record.value is not None
    assert record.data.synthetic
    kinds = {"mae": "none" if pretrains else "synthetic", "supervised": "synthetic", "scratch": "none"}
    if not task.endswith("_supervised"):
        assert record.weights.kind == kinds[record.init]
    # A smoke run measures nothing, and no table shows it.
    assert cli.main(["table", "--records", str(tmp_path)]) == 2
    assert "smoke" in capsys.readouterr().err
