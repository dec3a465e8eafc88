"""Silent faults, once found, stay found: a run that would have ended with a wrong number and exit code 0.

Each test names the fault; where a room's own tests pin one in detail, only the user's view of it stands here. Those of
data sets are in `test_silent_faults_data`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from classification_toys import make_pictures
from two_processes import in_two_processes

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


def _smoke(task: str, folder: Path) -> Path:
    """Folder of a smoke run of the tiny MAE backbone."""
    options = dataclasses.replace(QUIET, smoke=True, out=folder)
    pretrains = recipes.load_task(task).engine == "pretraining"
    runs = (
        mae_bench.pretrain("vit_t_mae", task=task, options=options)
        if pretrains
        else mae_bench.run(task, "vit_t_mae", options=options)
    )
    return runs[0].folder


def test_a_model_of_a_smoke_run_is_never_evaluated_as_a_trained_one(tmp_path: Path) -> None:
    """Two steps on made data, then `--eval-only`: a number in the protocol's column."""
    model = _smoke("tiny_linear", tmp_path / "smoke") / "model.safetensors"
    options = dataclasses.replace(QUIET, weights=model, eval_only=True, out=tmp_path)
    with pytest.raises(UserError, match="was made with smoke = 'True', this run has 'False'"):
        mae_bench.run("tiny_linear", "vit_t_mae", options=options)


def test_an_encoder_that_a_smoke_run_trained_is_no_encoder(tmp_path: Path) -> None:
    encoder = _smoke("tiny_pretrain", tmp_path / "smoke") / "encoder.safetensors"
    options = dataclasses.replace(QUIET, weights=encoder, out=tmp_path)
    with pytest.raises(UserError, match="random weights that a smoke run wrote"):
        mae_bench.run("tiny_linear", "vit_t_mae", options=options)


def test_overridden_values_are_not_evaluated_as_the_protocols_own(tmp_path: Path) -> None:
    """Trained with --set, evaluated without: the protocol's column would hold another protocol's number."""
    options = dataclasses.replace(QUIET, smoke=True, out=tmp_path)
    (run,) = mae_bench.run("tiny_linear", "vit_t_scratch", settings=["base_lr=0.001"], options=options)
    again = dataclasses.replace(options, weights=run.folder / "model.safetensors", eval_only=True)
    with pytest.raises(UserError, match=r"was made with protocol = 'tiny-linear@1\+set:[0-9a-f]+'"):
        mae_bench.run("tiny_linear", "vit_t_scratch", options=again)


def _own(path: Path, **stated: str) -> Path:
    """A file as our own runs leave it, of the tiny backbone's architecture."""
    from mae_bench.checkpoints.load import save_encoder
    from mae_bench.encoders.vit import random_encoder

    backbone = recipes.load_backbone("vit_t_mae")
    origin = {"init": "mae", "input": backbone.input.model_dump_json(), "target": "norm_pix"}
    save_encoder(path, random_encoder(backbone.architecture, 0), origin | stated)
    return path


def test_an_encoder_of_another_initialisation_is_no_mae_encoder(tmp_path: Path) -> None:
    """A supervised encoder of the same shapes under `vit_t_mae`: the table would say that MAE won."""
    with pytest.raises(UserError, match="of the initialisation 'supervised', but 'vit_t_mae' is 'mae'"):
        mae_bench.load_encoder("vit_t_mae", weights=_own(tmp_path / "e.safetensors", init="supervised"))


def test_an_encoder_of_other_statistics_is_refused(tmp_path: Path) -> None:
    other = '{"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}'
    with pytest.raises(UserError, match="as mean and std, which 'vit_t_mae' does not declare"):
        mae_bench.load_encoder("vit_t_mae", weights=_own(tmp_path / "e.safetensors", input=other))


def test_statistics_in_units_of_255_are_refused(tmp_path: Path) -> None:
    """mean = [123.675, …]: every picture black, and a run that ends."""
    text = (
        recipes.find("backbone", "vit_t_scratch").read_text().replace("[0.485, 0.456, 0.406]", "[123.7, 116.3, 103.5]")
    )
    (tmp_path / "vit_t_scratch.toml").write_text(text)
    with pytest.raises(UserError, match=r"divide those of \[0, 255\] by 255"):
        recipes.load_backbone(str(tmp_path / "vit_t_scratch.toml"))


def test_loaded_parameters_share_no_memory(tmp_path: Path) -> None:
    """With the file, which may change, or with each other: a step on one would move the others."""
    import torch

    tied = torch.zeros(64)
    state = {key: tied if value.shape == (64,) else value for key, value in _state().items()}
    torch.save({"model": state}, tmp_path / "tied.pth")
    recipe = _published(tmp_path)
    encoder = mae_bench.load_encoder(str(recipe), weights=tmp_path / "tied.pth")
    storages = [parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()]
    assert len(set(storages)) == len(storages)
    file = _own(tmp_path / "e.safetensors")
    encoder = mae_bench.load_encoder("vit_t_mae", weights=file)
    before = encoder.norm.weight.detach().clone()
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(encoder.norm.weight, before)


def _state() -> dict[str, Any]:
    from mae_bench.encoders.vit import random_encoder

    return dict(random_encoder(recipes.load_backbone("vit_t_mae").architecture, 0).state_dict())


def _published(folder: Path, **changes: str) -> Path:
    """vit_t_mae's recipe as one with a published file."""
    text = recipes.find("backbone", "vit_t_mae").read_text()
    stated = {
        "kind": "file", "file": "toy.pth", "layout": "fair_mae", "url": "https://example.org/toy.pth",
        "licence": "MIT", "target": "norm_pix", "pretrain_data": "none", "source": "a test",
    }  # fmt: skip
    weights = "\n".join(f'{key} = "{value}"' for key, value in (stated | changes).items())
    path = folder / "vit_t_mae.toml"
    path.write_text(f"{text.partition('[weights]')[0]}[weights]\n{weights}\npretrain_epochs = 1\n")
    return path


def test_a_file_with_another_hash_is_not_the_published_one_whatever_its_name(tmp_path: Path) -> None:
    import torch

    from mae_bench.checkpoints.load import build_encoder

    torch.save({"model": _state()}, tmp_path / "other_name.pth")
    backbone = recipes.load_backbone(str(_published(tmp_path, sha256="ab" * 32)))
    _, report = build_encoder(backbone, tmp_path / "other_name.pth", seed=0)
    assert report.differs and "not the published file" in report.line()


def test_pre_training_does_not_go_on_from_weights_under_the_from_scratch_protocol(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pre-trains from random weights, and 'vit_t_mae' brings its own"):
        mae_bench.run("tiny_pretrain", str(_published(tmp_path)), options=QUIET)


def test_a_number_that_was_edited_by_hand_is_found(tmp_path: Path) -> None:
    """A better number typed into a record, which every table would have shown."""
    from mae_bench.reporting.record import read_record

    file = _smoke("tiny_linear", tmp_path) / "record.json"
    record = read_record(file)
    assert record.images is not None
    assert record.images.count == record.data.counts["val"]
    stated = json.dumps({"top1": record.value})[1:-1]
    text = file.read_text(encoding="utf-8")
    assert text.count(stated) > 1
    file.write_text(text.replace(stated, '"top1": 83.1', 1), encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics.top1 is 83.1, but of images .* % are right: one of them was changed"):
        read_record(file)


def test_a_file_of_a_newer_schema_is_not_read_as_ours(tmp_path: Path) -> None:
    """Fields that changed their meaning since, read under their old one; and a file that states no version at all."""
    from mae_bench.reporting.record import read_record

    file = _smoke("tiny_linear", tmp_path) / "record.json"
    text = file.read_text(encoding="utf-8")
    for head, message in (('"schema_version": 3,', "newer mae_bench"), ("", "states no schema_version")):
        file.write_text(text.replace('"schema_version": 2,', head, 1), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            read_record(file)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "differs"), [("vit_t_scratch", "data set"), ("vit_t_mae", "weight file")])
def test_processes_on_different_files_do_not_train_together(tmp_path: Path, backbone: str, differs: str) -> None:
    """Copies on each node's own disk, one of them not complete: the record vouched for the first process's alone."""
    for rank in (0, 1):
        folder = tmp_path / f"node_{rank}"
        make_pictures(folder / "data/classification", train=24 + (rank if differs == "data set" else 0))
        _own(folder / "encoder.safetensors", mask_ratio=str(rank))
    for said in in_two_processes("runs_two_processes.py", tmp_path, backbone):
        assert said.startswith("process 1 on ")
        assert f"has another {differs} (" in said
        assert "give every node the same" in said
        assert "\n" not in said


@pytest.mark.parametrize("task", ["tiny_finetune", "tiny_ade20k"])
def test_an_evaluation_alone_gives_the_bits_of_the_run(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained and measured with linear layers by oneDNN, evaluated again without: another sum, and no word of it."""
    import torch

    from mae_bench.engine import onednn

    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(onednn, "preferred", lambda: True)
    options = dataclasses.replace(QUIET, smoke=True, out=tmp_path, device="cpu")
    (trained,) = mae_bench.run(task, "vit_t_scratch", options=options)
    again = dataclasses.replace(options, weights=trained.folder / "model.safetensors", eval_only=True)
    (alone,) = mae_bench.run(task, "vit_t_scratch", options=again)
    assert alone.record.metrics == trained.record.metrics
    assert alone.record.effective["linear"] == trained.record.effective["linear"] == "oneDNN"


def test_weights_that_all_share_do_not_depend_on_who_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run --compile` pre-trained with it too, into the cache that every later run takes its weights from."""
    from mae_bench import data, runs, weights

    asked: list[Options] = []

    def train(job: Any, source: Any) -> Any:
        asked.append(job.options)
        (job.folder / runs.ENCODER_FILE).touch()

    made = data.open_dataset
    monkeypatch.setattr(data, "open_dataset", lambda spec, *_, **__: made(spec, smoke=True))  # in no time
    monkeypatch.setattr(weights, "made_folder", lambda *_: tmp_path / "made")
    monkeypatch.setattr(runs, "_train", train)
    backbone = recipes.load_backbone("vit_t_mae")
    for options in (QUIET, dataclasses.replace(QUIET, compile=True, fsdp=True, log=("tensorboard",), out=tmp_path)):
        runs._make_weights(backbone, options)
    assert asked[0] == asked[1]
    # Asked for by name, they are those of a run of its own.
    mae_bench.pretrain("vit_t_mae", options=dataclasses.replace(QUIET, compile=True, out=tmp_path / "own"))
    assert asked[2].compile
    assert asked[2].out == tmp_path / "own"
