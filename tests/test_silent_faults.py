"""Silent faults, once found, stay found: a run that would have ended with a wrong number and exit code 0.

Each test names the fault; where a room's own tests pin one in detail, only the user's view of it stands here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import mae_bench
from mae_bench import UserError, recipes
from mae_bench.checkpoints.load import write_synthetic
from mae_bench.engine.job import Options

QUIET = Options(quiet=True, workers=0)


def test_random_weights_of_a_smoke_run_never_stand_behind_a_number(tmp_path: Path) -> None:
    """Weights that were never trained, loaded key by key without complaint."""
    file = tmp_path / "mae_pretrain_vit_base.pth"
    write_synthetic(file, recipes.load_backbone("vit_b_mae"), seed=0)
    options = dataclasses.replace(QUIET, weights=file, out=tmp_path)
    with pytest.raises(UserError, match="random weights that a smoke run wrote"):
        mae_bench.run("tiny_linear", "vit_b_mae", options=options)


def test_a_file_under_the_publishers_name_must_have_the_publishers_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights of the same shape, saved under the name of the published file."""
    import torch

    file = tmp_path / "mae_pretrain_vit_base.pth"
    write_synthetic(file, recipes.load_backbone("vit_b_mae"), seed=0)
    content = torch.load(file, weights_only=True)
    torch.save({"model": content["model"]}, file)  # without the mark
    monkeypatch.setenv("MAE_BENCH_WEIGHTS", str(tmp_path))
    with pytest.raises(UserError, match="md5"):
        mae_bench.load_encoder("vit_b_mae")


def test_a_misspelt_value_is_not_ignored() -> None:
    """A dead option: training in fp32 while the config says fp16 under a key that nobody reads."""
    with pytest.raises(UserError, match="unknown key 'fp16'"):
        recipes.resolve_task("tiny_linear", recipes.load_backbone("vit_t_mae"), ["fp16=true"])


def test_an_idle_value_is_refused(tmp_path: Path) -> None:
    """An option of another optimiser, set and without effect."""
    with pytest.raises(UserError, match="does not read"):
        mae_bench.run(
            "tiny_linear",
            "vit_t_mae",
            settings=['optimizer="adamw"', "momentum=0.5"],
            options=dataclasses.replace(QUIET, smoke=True, out=tmp_path),
        )


def test_other_values_and_other_data_leave_the_column(tmp_path: Path) -> None:
    """A number made with other values under the protocol's name."""
    backbone = recipes.load_backbone("vit_t_mae")
    task = recipes.resolve_task("tiny_linear", backbone, ["epochs=1"])
    assert task.protocol != task.task.protocol


def test_baselines_have_recipes_of_their_own() -> None:
    """A baseline trained with the fine-tuning recipe of pre-trained weights, and measured too low."""
    for task in ("imagenet_finetune", "coco", "ade20k"):
        values = {
            init: recipes.resolve_task(task, recipes.load_backbone(f"vit_b_{init}")).values
            for init in ("mae", "scratch")
        }
        assert values["mae"].model_dump() != values["scratch"].model_dump(), task
    scratch = recipes.resolve_task("imagenet_finetune", recipes.load_backbone("vit_l_scratch")).values
    assert scratch.ema == 0.9999  # 82.6 with, 81.5 without (arXiv 2111.06377, A.2)
