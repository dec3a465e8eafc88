"""Every variant of the ViT in every pipeline: two real steps from a real file, or a refusal in one line.

After two steps without weight decay exactly those parameters have moved that had a gradient: all that came from the
file, none in a linear probe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import classification_toys
import detection_cases
import pytest
import segmentation_cases
import torch
from engine_toys import MEAN, STD, make_values
from safetensors.torch import load_file
from torch import Tensor

from mae_bench.checkpoints.layouts import FORMAT
from mae_bench.checkpoints.load import build_encoder, save_model
from mae_bench.classification import run as classification
from mae_bench.classification.adapter import check_pooling
from mae_bench.data import Dataset
from mae_bench.detection import run as detection
from mae_bench.detection.adapter import load_encoder
from mae_bench.encoders.vit import random_encoder
from mae_bench.engine.job import Job, Outcome
from mae_bench.errors import UserError
from mae_bench.schema import Architecture, Backbone
from mae_bench.segmentation import run as segmentation

SIZES: dict[str, Any] = {"patch": 4, "width": 32, "depth": 4, "heads": 2, "image_size": 12, "positions": "learned"}
VARIANTS: dict[str, dict[str, Any]] = {
    "dinov2": {"patch": 14, "image_size": 42, "registers": 4, "layer_scale": True, "resize": "dinov2_registers"},
    "beit": {"positions": "none", "layer_scale": True, "rel_pos": "bias"},
    "beit_finetuned": {"positions": "none", "layer_scale": True, "rel_pos": "bias", "final_norm": "pooled"},
    "deit3": {"class_position": False, "layer_scale": True, "resize": "timm"},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 8 / 3, "layer_scale": True, "resize": "dinov2"},
    "vitdet": {"class_token": False, "rel_pos": "decomposed", "final_norm": "none"},
}
WINDOWS: dict[str, Any] = {"window": 3, "global_blocks": [1, 3]}
ROOMS = {"classification": classification, "detection": detection, "segmentation": segmentation}


def backbone(variant: str, **changes: Any) -> Backbone:
    return Backbone.model_validate(
        {
            "name": variant,
            "size": "t",
            "init": "mae",
            "summary": "a test",
            "architecture": Architecture.model_validate(SIZES | VARIANTS[variant] | changes),
            "input": {"mean": MEAN, "std": STD},
            "weights": {"kind": "made", "task": "none"},
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder file per variant, all its tensors random."""
    folder, found = tmp_path_factory.mktemp("files"), {}
    generator = torch.Generator().manual_seed(0)
    for variant in VARIANTS:
        architecture = backbone(variant).architecture
        options = WINDOWS | {"rel_pos_grid": (8, 8), "rel_pos": "decomposed"} if variant == "vitdet" else {}
        state = {
            name: value + 0.02 * torch.randn(value.shape, generator=generator)
            for name, value in random_encoder(architecture, 0, **options).state_dict().items()
        }
        found[variant] = folder / f"{variant}.safetensors"
        save_model(found[variant], state, {"format": FORMAT, "architecture": architecture.model_dump_json()})
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "classification": classification_toys.make_pictures(folder / "classification", train=8, val=4, classes=2),
        "detection": detection_cases.write_data(folder / "detection"),
    }


def job(room: str, variant: str, changes: dict[str, Any], folder: Path, file: Path, data: Any, **options: Any) -> Job:
    """Two steps of two pictures on 4 x 4 patches of the encoder (detection: 8 x 8), which was made for 3 x 3."""
    folder.mkdir(parents=True)
    short = {"steps": 2, "batch": 2, "weight_decay": 0.0} | changes
    if room == "classification":
        sizes = {"image_size": 4 * backbone(variant).architecture.patch, "base_lr": 0.01}
        this = classification_toys.make_job(folder, make_values(**(sizes | short)), data[room], **options)
    elif room == "detection":
        this = detection_cases.job(folder, detection_cases.values(**(WINDOWS | short)), data[room], **options)
    else:
        size = 4 * backbone(variant).architecture.patch
        sizes = {"image_size": size, "resize": [2 * size, size], "stride": size // 2}
        this = segmentation_cases.job(folder, segmentation_cases.values(**(sizes | short)), **options)
    this.backbone, this.encoder_file = backbone(variant), file
    return this


def start(room: str, this: Job) -> dict[str, Tensor]:
    """The encoder's tensors before the first step."""
    values = this.task.values
    if room == "detection":
        return load_encoder(this.backbone, values, this.encoder_file, this.seed)[0].state_dict()
    if room == "classification":
        options = classification._encoder_options(values, this.backbone)
    else:
        options = segmentation._encoder_options(values, this.backbone.architecture.patch)
    return build_encoder(this.backbone, this.encoder_file, seed=this.seed, **options)[0].state_dict()


def moved(room: str, this: Job, outcome: Outcome) -> dict[str, bool]:
    """Name of a tensor of the encoder -> whether training changed it."""
    prefix = {"classification": "encoder.", "detection": "backbone.net.encoder.", "segmentation": "backbone.encoder."}
    assert outcome.weights is not None
    end = load_file(outcome.weights)
    return {name: not torch.equal(end[prefix[room] + name], value) for name, value in start(room, this).items()}


FINETUNE: dict[str, Any] = {"mode": "finetune", "pool": "mean"}
# room, variant, changed values, and what the task adds to the file's tensors
RUNS: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("classification", "dinov2", FINETUNE, set()),
    ("classification", "beit", FINETUNE | {"layer_decay": 0.9}, set()),
    ("classification", "beit_finetuned", FINETUNE, set()),
    ("classification", "deit3", FINETUNE | {"pool": "cls"}, set()),
    ("classification", "swiglu", FINETUNE, set()),
    ("detection", "dinov2", {"patch": 4}, {"rel_pos_h", "rel_pos_w"}),
    ("detection", "deit3", {}, {"rel_pos_h", "rel_pos_w"}),
    ("detection", "swiglu", {"rel_pos": False}, set()),
    ("detection", "vitdet", {"layer_decay": 0.9}, set()),
    ("segmentation", "dinov2", {}, {"relative_position_bias_table"}),
    ("segmentation", "beit", {"rel_pos": False}, set()),
    ("segmentation", "beit_finetuned", {}, set()),
    ("segmentation", "deit3", {"layer_decay": 0.9}, {"relative_position_bias_table"}),
    ("segmentation", "swiglu", {"layer_scale": 0.0, "rel_pos": False}, set()),
]


@pytest.mark.parametrize(("room", "variant", "changes", "added"), RUNS, ids=[f"{run[0]}-{run[1]}" for run in RUNS])
def test_every_loaded_parameter_trains(
    room: str,
    variant: str,
    changes: dict[str, Any],
    added: set[str],
    tmp_path: Path,
    files: dict[str, Path],
    data: dict[str, Dataset],
) -> None:
    this = job(room, variant, changes, tmp_path / "run", files[variant], data)
    outcome = ROOMS[room].run(this)
    assert not [name for name, changed in moved(room, this, outcome).items() if not changed]
    assert {name.rpartition(".")[2] for name in outcome.load["new"]} == added
    assert outcome.load["matched"] + len(outcome.load["new"]) == outcome.load["total"]
    options = {"eval_only": True, "weights": outcome.weights}
    alone = job(room, variant, changes, tmp_path / "alone", files[variant], data, **options)
    assert ROOMS[room].run(alone).metrics == pytest.approx(outcome.metrics)


@pytest.mark.parametrize(
    ("variant", "pool"),
    [
        ("dinov2", "cls"),
        ("dinov2", "mean"),
        ("beit", "cls"),
        ("beit_finetuned", "mean"),
        ("deit3", "cls"),
        ("swiglu", "cls"),
    ],
)
def test_a_probe_leaves_every_variant_alone(
    variant: str, pool: str, tmp_path: Path, files: dict[str, Path], data: dict[str, Dataset]
) -> None:
    """And nothing in its frozen encoder is random: every tensor is the file's."""
    changes = {"mode": "linear", "pool": pool}
    this = job("classification", variant, changes, tmp_path / "run", files[variant], data)
    outcome = classification.run(this)
    assert not any(moved("classification", this, outcome).values())
    assert (outcome.load["matched"], outcome.load["new"], outcome.load["unused"]) == (outcome.load["total"], [], {})
    assert outcome.parameters["trainable"] == 2 * 32 + 2
    options = {"eval_only": True, "weights": outcome.weights}
    alone = job("classification", variant, changes, tmp_path / "alone", files[variant], data, **options)
    assert classification.run(alone).metrics == pytest.approx(outcome.metrics)


LINEAR: dict[str, Any] = {"mode": "linear", "pool": "mean"}


@pytest.mark.parametrize(
    ("room", "variant", "changes", "message"),
    [
        ("classification", "vitdet", LINEAR, "'vitdet' is a ViTDet encoder .* choose another backbone"),
        ("classification", "vitdet", FINETUNE, "'vitdet' is a ViTDet encoder .* choose another backbone"),
        (
            "classification",
            "beit_finetuned",
            {"mode": "linear", "pool": "cls"},
            "the norm of 'beit_finetuned' was trained on the mean of the patch tokens .* --set pool=mean",
        ),
        (
            "classification",
            "beit_finetuned",
            {"mode": "finetune", "pool": "cls"},
            "the norm of 'beit_finetuned' was trained on the mean of the patch tokens .* --set pool=mean",
        ),
        ("detection", "dinov2", {}, "'dinov2' has 14: .* --set patch=16"),
        ("detection", "beit", {}, r"'beit' has a relative position bias .* \(rel_pos = bias\), .* choose a backbone"),
        ("detection", "beit", {"rel_pos": False}, "'beit' has a relative position bias .* choose a backbone"),
        ("detection", "vitdet", {"rel_pos": False}, "'vitdet' is a ViTDet encoder .* set rel_pos=true"),
        (
            "detection",
            "vitdet",
            {"window": 0, "global_blocks": []},
            "'vitdet' is a ViTDet encoder .* window and global_blocks",
        ),
        ("detection", "vitdet", {"window": 4}, "for other windows than this task's"),
        ("segmentation", "vitdet", {}, "'vitdet' is a ViTDet encoder .* choose another backbone"),
        ("segmentation", "dinov2", {"image_size": 48}, "image_size 48 is not a multiple of the backbone's patch 14"),
        (
            "segmentation",
            "beit",
            {"test_mode": "whole", "stride": 0, "rel_pos": False},
            'the relative position bias of the backbone has no entries; set test_mode to "slide"$',
        ),
    ],
)
@pytest.mark.parametrize("eval_only", [False, True])
def test_what_cannot_work_is_refused_in_one_line(
    room: str,
    variant: str,
    changes: dict[str, Any],
    message: str,
    eval_only: bool,
    tmp_path: Path,
    files: dict[str, Path],
    data: dict[str, Dataset],
) -> None:
    options: dict[str, Any] = {"eval_only": True, "weights": files[variant]} if eval_only else {}
    this = job(room, variant, changes, tmp_path / "run", files[variant], data, **options)
    if eval_only and "other windows" in message:
        message = "was made with"  # a trained model's file is asked first
    with pytest.raises(UserError, match=message) as caught:
        ROOMS[room].run(this)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("features", [{"final_norm": "none"}, {"final_norm": "none", "class_token": False}])
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("mode", ["linear", "finetune"])
def test_classification_without_a_final_norm(features: dict[str, Any], pool: Any, mode: Any) -> None:
    """Only fine-tuning on the mean brings a norm of its own."""
    recipe = backbone("deit3", **features)
    values = make_values(mode=mode, pool=pool)
    if (mode, pool) == ("finetune", "mean"):
        check_pooling(values, recipe)
        return
    message = "no class token .* pool=mean" if pool == "cls" and "class_token" in features else "no final norm .* mean"
    with pytest.raises(UserError, match=f"'deit3' has {message}"):
        check_pooling(values, recipe)


@pytest.mark.parametrize("eval_only", [False, True])
def test_the_record_says_which_values_the_weights_override(
    eval_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path], data: dict[str, Dataset]
) -> None:
    """Noted before anything is built."""

    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(segmentation, "eval_set", stop)
    own = "of the task is not used: the weights bring their own"
    for variant, changes, expected in (
        ("beit", {}, [f"rel_pos true {own}", f"layer_scale 1.0 {own}"]),
        ("beit", {"rel_pos": False, "layer_scale": 0.0}, []),
        ("deit3", {"layer_scale": 0.5}, [f"layer_scale 0.5 {own}"]),
    ):
        folder = tmp_path / f"{variant}{len(changes)}"
        this = job("segmentation", variant, changes, folder, files[variant], data, eval_only=eval_only)
        with pytest.raises(InterruptedError):
            segmentation.run(this)
        assert this.notes == expected
