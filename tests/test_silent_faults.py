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


def test_a_box_cut_by_the_crop_is_the_box_of_what_is_left(tmp_path: Path) -> None:
    """Targets of large-scale jitter: the clipped old box is too loose for an L-shaped object that lost its foot."""
    from detectron2.data import DatasetMapper, detection_utils
    from detectron2.data import transforms as T
    from detectron2.structures import BoxMode

    from mae_bench.detection import data

    outline = [0, 0, 10, 0, 10, 80, 100, 80, 100, 100, 0, 100]  # upright bar, foot below y = 80
    cut = T.CropTransform(0, 0, 100, 60)
    old = {"bbox": [0, 0, 100, 100], "bbox_mode": BoxMode.XYXY_ABS, "segmentation": [outline], "category_id": 0}
    moved = detection_utils.transform_instance_annotations(old, [cut], (60, 100))
    instances = detection_utils.annotations_to_instances([moved], (60, 100))
    assert instances.gt_boxes.tensor[0].tolist() == [0, 0, 100, 60]  # what training would see without it
    assert instances.gt_masks.get_bounding_boxes().tensor[0, 2] == 10
    import ast
    import inspect

    calls = [node for node in ast.walk(ast.parse(inspect.getsource(data))) if isinstance(node, ast.Call)]
    training = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == DatasetMapper.__name__]
    stated = {word.arg: ast.unparse(word.value) for call in training for word in call.keywords}
    assert stated["recompute_boxes"] == "True"


def test_pretrain_never_writes_a_transfer_result_under_a_pretrained_name(tmp_path: Path) -> None:
    """`pretrain` starts from random weights: a probe of those would have stood in the MAE row."""
    with pytest.raises(UserError, match="use `run`"):
        mae_bench.pretrain(
            "vit_t_mae", task="tiny_linear", options=dataclasses.replace(QUIET, smoke=True, out=tmp_path)
        )


def test_resume_refuses_the_record_of_another_run(tmp_path: Path) -> None:
    options = dataclasses.replace(QUIET, smoke=True, out=tmp_path)
    (one,) = mae_bench.run("tiny_linear", "vit_t_mae", options=options)
    (other,) = mae_bench.run("tiny_finetune", "vit_t_scratch", options=options)
    other.record_file.write_bytes(one.record_file.read_bytes())
    with pytest.raises(UserError, match="of another run"):
        mae_bench.run("tiny_finetune", "vit_t_scratch", options=dataclasses.replace(options, resume=True))


def test_an_annotation_id_of_zero_is_refused(tmp_path: Path) -> None:
    """COCO's evaluation takes id 0 for 'no match': AP 0 for a perfect detection."""
    import json

    from mae_bench.data import open_dataset
    from mae_bench.data.synthetic import make_smoke

    spec = recipes.load_task("tiny_coco").data
    make_smoke(spec, tmp_path / "data")
    file = tmp_path / "data" / spec.val_annotations
    content = json.loads(file.read_text())
    content["annotations"][0]["id"] = 0
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="id below 1"):
        open_dataset(spec, tmp_path / "data").coco("val")


def test_an_option_without_effect_is_refused(tmp_path: Path) -> None:
    options = dataclasses.replace(QUIET, smoke=True, data=tmp_path, out=tmp_path)
    with pytest.raises(UserError, match="leave out --data"):
        mae_bench.run("tiny_linear", "vit_t_mae", options=options)
    with pytest.raises(UserError, match="seeds are whole numbers"):
        mae_bench.run("tiny_linear", "vit_t_mae", seeds=[-1], options=dataclasses.replace(QUIET, out=tmp_path))


def test_two_processes_never_work_in_one_run_folder(tmp_path: Path) -> None:
    """The model in the folder might not be the one that the record describes."""
    from mae_bench import weights

    options = dataclasses.replace(QUIET, smoke=True, out=tmp_path)
    (one,) = mae_bench.run("tiny_linear", "vit_t_mae", options=options)
    one.record_file.unlink()  # as if it were still going on
    with weights.locked(one.folder / "run"), pytest.raises(UserError, match="another process works in"):
        mae_bench.run("tiny_linear", "vit_t_mae", options=dataclasses.replace(options, resume=True))
