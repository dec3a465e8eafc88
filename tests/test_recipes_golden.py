"""The full protocols against their sources, typed here by hand from the papers' tables and the authors' files.

Numbers of recipes are compared with what was published, never with what a recipe says elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from mae_bench.errors import UserError
from mae_bench.recipes import ResolvedTask, digest, index, load_backbone, resolve_task


def _resolve(task: str, backbone: str) -> ResolvedTask:
    return resolve_task(task, load_backbone(backbone))


def _check(task: str, backbone: str, expected: dict[str, Any]) -> None:
    values = _resolve(task, backbone).values
    found = {key: getattr(values, key) for key in expected}
    assert found == pytest.approx(expected, rel=1e-12)


# MAE Table 8; FAIR PRETRAIN.md.
@pytest.mark.parametrize("backbone", ["vit_b_mae", "vit_l_mae", "vit_h_mae"])
def test_imagenet_pretrain(backbone: str) -> None:
    values = _resolve("imagenet_pretrain", backbone).values
    assert (values.optimizer, values.betas, values.schedule) == ("adamw", (0.9, 0.95), "cosine")
    assert (values.batch, values.lr, values.weight_decay) == (4096, pytest.approx(2.4e-3), 0.05)
    assert (values.epochs, values.warmup_epochs, values.min_lr, values.layer_decay) == (1600, 40, 0, 1)
    assert (values.mask_ratio, values.norm_pix, values.crop_scale, values.flip) == (0.75, True, (0.2, 1.0), True)
    assert (values.decoder_depth, values.decoder_width, values.decoder_heads) == (8, 512, 16)
    assert values.no_decay == ("norm", "bias")  # the cls and mask tokens are decayed
    assert (values.drop_path, values.clip_grad, values.ema, values.precision) == (0, 0, 0, "fp16")


# MAE Table 10; FAIR main_linprobe.py. One protocol for all sizes but the tiny one, whatever the weights.
@pytest.mark.parametrize("backbone", [name for name in index("backbone") if not name.startswith("vit_t_")])
def test_imagenet_linear(backbone: str) -> None:
    values = _resolve("imagenet_linear", backbone).values
    assert (values.mode, values.pool, values.head_norm, values.head_init_std) == ("linear", "cls", True, 0.01)
    assert (values.optimizer, values.momentum, values.weight_decay) == ("lars", 0.9, 0)
    assert (values.batch, values.base_lr, values.lr) == (16384, 0.1, pytest.approx(6.4))
    assert (values.epochs, values.warmup_epochs, values.schedule, values.min_lr) == (90, 10, "cosine", 0)
    assert (values.crop_scale, values.crop_retry, values.flip) == ((0.08, 1.0), False, True)
    assert (values.randaug, values.mixup, values.cutmix, values.label_smoothing, values.erasing) == ("", 0, 0, 0, 0)
    assert (values.image_size, values.eval_crop) == (224, 0.875)


# FAIR FINETUNE.md (normalised-pixel weights): lr at batch 1024, layer decay, drop path, epochs.
FINETUNE = {
    "vit_b_mae": (2e-3, 0.65, 0.1, 100),
    "vit_l_mae": (4e-3, 0.75, 0.2, 50),
    "vit_h_mae": (4e-3, 0.75, 0.3, 50),
}


# MAE Table 9, which was searched for weights that predict raw pixels.
@pytest.mark.parametrize("kind", ["pixel", "hf"])
@pytest.mark.parametrize(("size", "drop_path", "epochs"), [("b", 0.1, 100), ("l", 0.1, 50), ("h", 0.2, 50)])
def test_imagenet_finetune_of_raw_pixels(kind: str, size: str, drop_path: float, epochs: int) -> None:
    expected = {"lr": 4e-3, "layer_decay": 0.75, "drop_path": drop_path, "epochs": epochs}
    _check("imagenet_finetune", f"vit_{size}_mae_{kind}", expected)
    assert not _resolve("imagenet_pretrain", f"vit_{size}_mae_{kind}").values.norm_pix


@pytest.mark.parametrize("backbone", FINETUNE)
def test_imagenet_finetune(backbone: str) -> None:
    lr, layer_decay, drop_path, epochs = FINETUNE[backbone]
    shared = {"batch": 1024, "warmup_epochs": 5, "weight_decay": 0.05, "label_smoothing": 0.1, "mixup": 0.8}
    shared |= {"cutmix": 1.0, "erasing": 0.25, "min_lr": 1e-6, "ema": 0.0, "head_init_std": 2e-5, "eval_crop": 0.875}
    shared |= {"image_size": 224, "color_jitter": 0.0, "clip_grad": 0.0}
    own = {"lr": lr, "layer_decay": layer_decay, "drop_path": drop_path, "epochs": epochs}
    _check("imagenet_finetune", backbone, shared | own)
    values = _resolve("imagenet_finetune", backbone).values
    assert (values.pool, values.head_norm, values.randaug) == ("mean", False, "rand-m9-mstd0.5-inc1")
    assert (values.optimizer, values.betas, values.schedule) == ("adamw", (0.9, 0.999), "cosine")
    assert set(values.no_decay) == {"norm", "bias", "positions", "tokens"}
    assert values.min_lr_scaled


# MAE Table 11 and A.2: epochs, drop path.
SCRATCH = {"vit_b_scratch": (300, 0.1), "vit_l_scratch": (200, 0.2), "vit_h_scratch": (200, 0.2)}


@pytest.mark.parametrize("backbone", SCRATCH)
def test_imagenet_from_scratch(backbone: str) -> None:
    epochs, drop_path = SCRATCH[backbone]
    shared = {"batch": 4096, "lr": 1.6e-3, "weight_decay": 0.3, "warmup_epochs": 20, "ema": 0.9999, "layer_decay": 1.0}
    shared |= {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.0, "head_init_std": 0.02}
    _check("imagenet_finetune", backbone, shared | {"epochs": epochs, "drop_path": drop_path})
    assert _resolve("imagenet_finetune", backbone).values.betas == (0.9, 0.95)


# unilm's get_started_for_image_classification.md, BEiT (pt22k) and BEiT v2 (1600 epochs). Their --lr is not scaled.
# At batch 1024: lr, layer decay, drop path, epochs, warmup epochs.
BEIT = {
    "vit_b_beit": (4e-3, 0.65, 0.1, 100, 20),
    "vit_l_beit": (1e-3, 0.75, 0.2, 50, 5),
    "vit_b_beit_v2": (5e-4, 0.6, 0.2, 100, 20),
    "vit_l_beit_v2": (2e-4, 0.8, 0.2, 50, 5),
}


@pytest.mark.parametrize("backbone", BEIT)
def test_imagenet_finetune_of_beit(backbone: str) -> None:
    lr, layer_decay, drop_path, epochs, warmup_epochs = BEIT[backbone]
    own = {"lr": lr, "layer_decay": layer_decay, "drop_path": drop_path, "epochs": epochs}
    # The rest of BEiT's command and defaults, which are MAE's; its head is drawn at 0.02 and scaled by 0.001.
    shared = {"batch": 1024, "weight_decay": 0.05, "label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25}
    shared |= {"min_lr": 1e-6, "ema": 0.0, "head_init_std": 2e-5, "eval_crop": 0.875, "clip_grad": 0.0}
    _check("imagenet_finetune", backbone, own | shared | {"warmup_epochs": warmup_epochs})
    values = _resolve("imagenet_finetune", backbone).values
    assert (values.pool, values.randaug, values.betas) == ("mean", "rand-m9-mstd0.5-inc1", (0.9, 0.999))
    # Every 1-D parameter is exempt, the tables of relative positions are not.
    assert set(values.no_decay) == {"norm", "bias", "positions", "tokens", "layer_scale"}


# ViTDet Table 11 and detectron2's configurations:
# lr, weight decay, layer decay, drop path, steps, the two milestones in steps, global blocks.
_B, _L, _H = (2, 5, 8, 11), (5, 11, 17, 23), (7, 15, 23, 31)
COCO = {
    "vit_b_mae": (1e-4, 0.1, 0.7, 0.1, 184375, (163889, 177546), _B),
    "vit_l_mae": (1e-4, 0.1, 0.8, 0.4, 184375, (163889, 177546), _L),
    "vit_h_mae": (1e-4, 0.1, 0.9, 0.5, 138281, (122916, 133159), _H),
    "vit_b_supervised": (8e-5, 0.1, 1.0, 0.1, 92187, (81944, 88773), _B),
    "vit_l_supervised": (8e-5, 0.1, 1.0, 0.4, 92187, (81944, 88773), _L),
    "vit_b_scratch": (1.6e-4, 0.2, 1.0, 0.1, 553125, (491667, 532638), _B),
    "vit_l_scratch": (1.6e-4, 0.2, 1.0, 0.4, 368750, (327778, 355092), _L),
}


@pytest.mark.parametrize("backbone", COCO)
def test_coco(backbone: str) -> None:
    lr, weight_decay, layer_decay, drop_path, steps, milestones, global_blocks = COCO[backbone]
    own = {"lr": lr, "weight_decay": weight_decay, "layer_decay": layer_decay, "drop_path": drop_path, "steps": steps}
    shared = {"batch": 64, "warmup_steps": 250, "warmup_factor": 0.001, "image_size": 1024, "window": 14}
    shared |= {"roi_batch": 512, "rpn_batch": 256, "rpn_topk_train": 2000, "rpn_topk_test": 1000, "detections": 100}
    shared |= {"proposals_train": 1000, "proposals_test": 1000, "score_threshold": 0.05, "eval_every_steps": 5000}
    shared |= {"pyramid_width": 256, "box_fc": 1024, "head_convs": 256, "clip_grad": 0.0}
    _check("coco", backbone, own | shared)
    values = _resolve("coco", backbone).values
    assert values.global_blocks == global_blocks
    assert tuple(round(fraction * steps) for fraction in values.milestones) == milestones
    assert (values.optimizer, values.betas, values.schedule) == ("adamw", (0.9, 0.999), "steps")
    assert (values.rel_pos, values.scale, values.precision) == (True, (0.1, 2.0), "fp16")
    # 14-pixel patches become 16-pixel ones, and ViT-H alone decays everything
    assert values.patch == (16 if "_h_" in backbone else 0)
    assert values.no_decay == (() if "_h_" in backbone else ("norm", "positions"))


@pytest.mark.parametrize("backbone", ["vit_h_supervised", "vit_h_scratch"])
def test_coco_baselines_of_vit_h_are_ours(backbone: str) -> None:
    """ViTDet's Table 11 has baselines for B and L alone."""
    assert {"base_lr", "weight_decay", "drop_path", "steps"} <= set(_resolve("coco", backbone).ours)


def test_ade20k_base() -> None:
    """implus/mae_segmentation's configuration, which the MAE authors name."""
    expected = {"lr": 1e-4, "layer_decay": 0.65, "drop_path": 0.1, "batch": 16, "weight_decay": 0.05, "steps": 160000}
    expected |= {"warmup_steps": 1500, "warmup_factor": 1e-6, "poly_power": 1.0, "min_lr": 0.0, "layer_scale": 1.0}
    expected |= {"image_size": 512, "stride": 341, "head_width": 768, "auxiliary_width": 256, "auxiliary_weight": 0.4}
    expected |= {"dropout": 0.1, "max_class_share": 0.75, "eval_every_steps": 16000}
    _check("ade20k", "vit_b_mae", expected)
    values = _resolve("ade20k", "vit_b_mae").values
    assert (values.taps, values.pool_scales, values.resize) == ((3, 5, 7, 11), (1, 2, 3, 6), (2048, 512))
    assert (values.schedule, values.betas, values.test_mode, values.rel_pos) == ("poly", (0.9, 0.999), "slide", True)
    assert (values.resize_ratio, values.photometric) == ((0.5, 2.0), True)
    assert not {"positions", "tokens", "rel_pos"} & set(values.no_decay)  # decayed in the reference, by its naming


# unilm's configurations at 512 px for 160,000 steps: lr, layer decay, drop path, taps, width of the head.
ADE20K_BEIT = {
    "vit_b_beit": (7e-4, 0.65, 0.1, (3, 5, 7, 11), 768),
    "vit_b_beit_v2": (5e-5, 0.75, 0.15, (3, 5, 7, 11), 768),
    "vit_l_beit_v2": (4e-5, 0.9, 0.2, (7, 11, 15, 23), 1024),
}


@pytest.mark.parametrize("backbone", ADE20K_BEIT)
def test_ade20k_of_beit(backbone: str) -> None:
    lr, layer_decay, drop_path, taps, head_width = ADE20K_BEIT[backbone]
    own = {"lr": lr, "layer_decay": layer_decay, "drop_path": drop_path, "head_width": head_width}
    shared = {
        "batch": 16,
        "weight_decay": 0.05,
        "steps": 160000,
        "warmup_steps": 1500,
        "stride": 341,
        "image_size": 512,
    }
    _check("ade20k", backbone, own | shared)
    assert _resolve("ade20k", backbone).values.taps == taps


@pytest.mark.parametrize("backbone", ["vit_s_dinov2", "vit_b_dinov2_registers", "vit_l_dinov2", "vit_h_mae"])
def test_patch_14_is_given_sizes_that_it_divides(backbone: str) -> None:
    """37 patches of 14 in place of 32 of 16; detection resamples the kernel, since 14 makes no pyramid."""
    values = _resolve("ade20k", backbone).values
    assert (values.image_size, values.resize, values.stride) == (37 * 14, (4 * 37 * 14, 37 * 14), 345)
    assert {"image_size", "resize", "stride"} <= set(_resolve("ade20k", backbone).ours)
    assert _resolve("coco", backbone).values.patch == 16
    assert ("patch" in _resolve("coco", backbone).ours) == ("dinov2" in backbone)


PUBLISHED = [
    ("imagenet_pretrain", "vit_b_mae"),
    ("imagenet_pretrain", "vit_l_mae"),
    ("imagenet_pretrain", "vit_h_mae"),
    ("imagenet_linear", "vit_b_mae"),
    ("imagenet_linear", "vit_l_mae"),
    ("imagenet_linear", "vit_h_mae"),
    *(("imagenet_finetune", backbone) for backbone in (*FINETUNE, *SCRATCH)),
    *(("imagenet_finetune", backbone) for backbone in BEIT),
    *(("coco", backbone) for backbone in COCO if backbone.endswith("_mae")),
    *(("ade20k", backbone) for backbone in ("vit_b_mae", *ADE20K_BEIT)),
]


@pytest.mark.parametrize(("task", "backbone"), PUBLISHED)
def test_fully_published_protocols_hold_nothing_of_ours(task: str, backbone: str) -> None:
    assert _resolve(task, backbone).ours == ()


RUNS = [
    (task, backbone)
    for task in ("imagenet_linear", "imagenet_finetune", "coco", "ade20k")
    for backbone in sorted(index("backbone"))
    if task != "coco" or "beit" not in backbone  # refused
]


@pytest.mark.parametrize(("task", "backbone"), RUNS)
def test_a_learning_rate_that_nobody_published_says_so(task: str, backbone: str) -> None:
    """Of every initialisation and size that no source has trained under the protocol."""
    kind = load_backbone(backbone)
    # ViTDet's supervised rows are of ImageNet-1K's labels and of ImageNet-21K's.
    name = backbone.removesuffix("_pixel").removesuffix("_hf")  # as published as MAE's normalised pixels
    published = (task, name) in PUBLISHED or (task == "coco" and f"vit_{kind.size}_{kind.init}" in COCO)
    assert ("base_lr" in _resolve(task, backbone).ours) != published


@pytest.mark.parametrize("backbone", [backbone for backbone in COCO if not backbone.endswith("_mae")])
def test_coco_baselines_differ_from_their_source_in_relative_positions_alone(backbone: str) -> None:
    assert _resolve("coco", backbone).ours == ("rel_pos",)


@pytest.mark.parametrize(
    ("task", "train", "val", "classes"),
    [
        ("imagenet_pretrain", 1281167, 50000, 1000),
        ("imagenet_linear", 1281167, 50000, 1000),
        ("imagenet_finetune", 1281167, 50000, 1000),
        ("coco", 118287, 5000, 80),
        ("ade20k", 20210, 2000, 150),
    ],
)
def test_data_of_the_full_protocols(task: str, train: int, val: int, classes: int) -> None:
    data = _resolve(task, "vit_b_mae").task.data
    assert data.expected == {"train": train, "val": val}
    assert data.classes == classes
    assert data.zero_is_other == (task == "ade20k")


# What MAE, supervised and from-scratch backbones resolved to before the recipes knew others: a hash of every value that
# is not the schema's default, of its source, and of the protocol's id. A change of one of these is a change of the
# protocol, whose id must then be raised, and of the hash that committed records bear.
RESOLVED = {
    "ade20k": "d73426739b32",
    "camvid": "46fc9a0bdf22",
    "cifar10_finetune": "14f99d2b0556",
    "cifar10_linear": "bcafa1f5b726",
    "cifar10_pretrain": "1bc602dfa7de",
    "coco": "67bff34c2849",
    "coco_small": "a4b27c5eb01e",
    "imagenet_finetune": "8a9b48f1fc90",
    "imagenet_linear": "57d96d8d4663",
    "imagenet_pretrain": "2e09866f3419",
    "tiny_ade20k": "1629252265d6",
    "tiny_coco": "f22e4a4c228c",
    "tiny_finetune": "0c253df15843",
    "tiny_linear": "335e37e956e4",
    "tiny_pretrain": "92388f733819",
    "tiny_supervised": "bbfa647dfb6e",
}


@pytest.mark.parametrize("task", sorted(index("task")))
def test_the_first_backbones_resolve_to_what_they_did(task: str) -> None:
    found: dict[str, Any] = {}
    for name in (f"vit_{size}_{init}" for size in "tblh" for init in ("mae", "supervised", "scratch")):
        try:
            resolved = _resolve(task, name)
        except UserError as refusal:
            found[name] = str(refusal)
            continue
        values = resolved.values.model_dump(mode="json", exclude_defaults=True)
        sources = {key: origin.source for key, origin in resolved.origins.items() if origin.place != "default"}
        found[name] = [resolved.protocol, values, sources]
    assert digest(found)[:12] == RESOLVED[task]
