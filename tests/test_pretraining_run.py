"""The pipeline on a handful of pictures: what it leaves, that it learns, and that nothing but the protocol matters."""

from __future__ import annotations

import dataclasses
import multiprocessing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mae_bench.checkpoints.load import build_encoder, load_model
from mae_bench.data import open_dataset
from mae_bench.data.sources import Files
from mae_bench.encoders.vit import Encoder
from mae_bench.engine.job import Job, Options, Outcome
from mae_bench.engine.runner import Fit
from mae_bench.engine.samplers import SeededDataset
from mae_bench.errors import UserError
from mae_bench.pretraining import images
from mae_bench.pretraining.images import Pictures, TrainingSamples, ValidationSamples, collate
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.pretraining.run import _tail_loss, run
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema import MadeWeights, NoWeights, PretrainingValues

SHORT = ("batch=8", "steps=3", "warmup_steps=1")


def job(folder: Path, *settings: str, seed: int = 0, **options: object) -> Job:
    """A run of the tiny recipe on the eight smoke pictures (96 x 80 pixels)."""
    backbone = load_backbone("vit_t_mae")
    task = resolve_task("tiny_pretrain", backbone, list(settings or SHORT))
    backbone = backbone.model_copy(update={"weights": NoWeights(kind="none")})
    folder.mkdir(parents=True, exist_ok=True)
    chosen = dataclasses.replace(Options(out=folder, quiet=True, device="cpu", workers=0), **options)
    return Job(task, backbone, seed, chosen, folder, open_dataset(task.task.data, None, smoke=True), None)


def encoder_of(outcome: Outcome) -> dict[str, torch.Tensor]:
    made = load_backbone("vit_t_mae")
    assert outcome.weights is not None
    return build_encoder(made, outcome.weights, seed=0)[0].state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(job(tmp_path_factory.mktemp("trained")))


def test_what_a_run_leaves(trained: Outcome) -> None:
    assert trained.weights is not None
    assert sorted(path.name for path in trained.weights.parent.glob("*.*")) == [
        "encoder.safetensors",
        "log.txt",
        "mae.safetensors",
    ]
    assert set(trained.metrics) == {"loss", "val_loss"}
    assert trained.best["val_loss"] == trained.metrics["val_loss"]
    # Normalised pixels: 47/48 of the unit variance, but zero in flat patches.
    assert 0.5 < trained.baseline["loss"] < 1
    assert 0.5 < trained.baseline["val_loss"] < 1
    assert [point["step"] for point in trained.history if "lr" in point] == [1, 2, 3]
    assert trained.parameters["total"] - trained.parameters["trainable"] == 2 * 65 * 64  # the two position tables
    assert not trained.load["matched"]


def test_the_encoder_file_is_the_made_backbones(trained: Outcome) -> None:
    assert isinstance(load_backbone("vit_t_mae").weights, MadeWeights)
    state = encoder_of(trained)
    folder = trained.weights.parent if trained.weights else Path()
    values = resolve_task("tiny_pretrain", load_backbone("vit_t_mae"), list(SHORT)).values
    backbone = load_backbone("vit_t_mae")
    encoder = Encoder(backbone.architecture, frozen_positions=True)
    model = MaskedAutoencoder(encoder, backbone.input, values, seed=0)
    load_model(model, folder / "mae.safetensors", {"backbone": "vit_t_mae", "target": "norm_pix"})
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_variant_that_fits_leaves_an_encoder_that_loads(tmp_path: Path) -> None:
    this = job(tmp_path)
    features = {"mlp": "swiglu", "mlp_ratio": 8 / 3, "layer_scale": True, "class_position": False}
    shape = this.backbone.architecture.model_copy(update=features)
    this.backbone = this.backbone.model_copy(update={"architecture": shape})
    outcome = run(this)
    made = load_backbone("vit_t_mae").model_copy(update={"architecture": shape})
    encoder, report = build_encoder(made, outcome.weights, seed=0)
    assert (report.matched, report.new, report.unused) == (report.total, [], {})
    assert encoder.pos_embed.shape[1] == 64


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"registers": 4}, "registers = 4"),
        ({"class_token": False}, "class_token = false"),
        ({"positions": "none"}, "positions = none"),
        ({"rel_pos": "bias"}, "rel_pos = bias"),
        ({"rel_pos": "decomposed", "class_token": False, "final_norm": "none"}, "class_token = false"),
        ({"final_norm": "pooled"}, "final_norm = pooled"),
        ({"final_norm": "none"}, "final_norm = none"),
    ],
)
def test_variants_that_mae_is_not_defined_for_are_refused(
    features: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is built or read."""
    monkeypatch.setattr("mae_bench.pretraining.run.build_encoder", None)
    this = job(tmp_path)
    shape = this.backbone.architecture.model_copy(update=features)
    this.backbone = this.backbone.model_copy(update={"architecture": shape})
    with pytest.raises(UserError, match=f"'vit_t_mae' has {message}, for which MAE pre-training is not defined"):
        run(this)


def test_it_learns(tmp_path: Path) -> None:
    settings = ("batch=8", "steps=60", "warmup_steps=5", "base_lr=3e-3", "crop_scale=[0.9,1.0]")
    outcome = run(job(tmp_path, *settings))
    assert outcome.metrics["loss"] < 0.75 * outcome.history[0]["loss"]
    assert outcome.metrics["loss"] < 0.8 * outcome.baseline["loss"]


def test_seed_decides_and_machine_does_not(trained: Outcome, tmp_path: Path) -> None:
    """Same seed: same weights, also with worker processes and, up to rounding, in micro batches. Another seed: not."""
    outcome = run(job(tmp_path / "workers", workers=1))
    assert not multiprocessing.active_children()
    workers = encoder_of(outcome)
    parts = run(job(tmp_path / "parts", micro_batch=2))
    other = encoder_of(run(job(tmp_path / "other", seed=1)))
    first = encoder_of(trained)
    assert all(torch.equal(first[name], workers[name]) for name in first)
    assert parts.effective["accumulation"] == 4
    assert parts.metrics["loss"] == pytest.approx(trained.metrics["loss"], abs=1e-5)
    assert parts.metrics["val_loss"] == pytest.approx(trained.metrics["val_loss"], abs=1e-4)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_samples_are_functions_of_seed_epoch_and_index(tmp_path: Path) -> None:
    paths = _photos(tmp_path, 3)
    first, again, other = (SeededDataset(_training(paths), seed) for seed in (0, 0, 1))
    keys = [(0, 0), (0, 1), (1, 0)]
    for key in keys:
        for ours, theirs in zip(first[key], again[key], strict=True):
            assert torch.equal(ours, theirs)
    noises = [first[key][1] for key in keys] + [other[0, 0][1]]
    assert len({tuple(noise.tolist()) for noise in noises}) == 4
    crops = [first[0, 0][0], first[1, 0][0], other[0, 0][0]]
    assert not any(torch.equal(a, b) for a, b in pairwise(crops))


def test_validation_samples_never_change(tmp_path: Path) -> None:
    samples = ValidationSamples(Pictures(Files(_photos(tmp_path, 2))), (8, 8), 4, _values())
    torch.manual_seed(0)
    first = samples[0]
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, samples[0], strict=True))
    assert not torch.equal(first[1], samples[1][1])
    assert first[0].shape == (3, 32, 32)


def test_crops_are_pillows_bicubic_to_two_grey_levels(tmp_path: Path) -> None:
    """The whole picture as the crop: the same pixels as FAIR's Pillow pipeline, which works on the same integers."""
    path = _photos(tmp_path, 1)[0]
    with Image.open(path) as photo:
        expected = torch.from_numpy(np.array(photo.resize((32, 32), Image.Resampling.BICUBIC))).permute(2, 0, 1)
    values = _values(crop_scale=(1.0, 1.0), flip=False)
    crop = TrainingSamples(Pictures(Files([path])), (8, 8), 4, values)[0][0]
    assert crop.dtype == torch.uint8
    assert (crop.int() - expected.int()).abs().max() <= 2


def test_a_small_set_is_decoded_once_and_a_large_one_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _photos(tmp_path, 2)
    monkeypatch.setattr(images, "CACHE_BYTES", 2 * 3 * 40 * 40)
    kept = Pictures(Files(paths))
    assert kept[0] is kept[0]
    assert kept[1] is kept[1]
    monkeypatch.setattr(images, "CACHE_BYTES", 2 * 3 * 40 * 40 - 1)
    large = Pictures(Files(paths))
    assert large[0] is not large[0]
    assert torch.equal(large[0], kept[0])


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG nothing")
    with pytest.raises(UserError, match=r"broken\.png"):
        Pictures(Files([path]))[0]


def test_tail_loss_weighs_points_by_their_steps() -> None:
    curve = [{"step": 2 * n, "loss": 10.0 if n <= 9 else 1.0, "lr": 0.1} for n in range(1, 10)]
    history = [*curve, {"step": 19, "loss": 1.0, "lr": 0.1}, {"step": 20, "loss": 2.0, "lr": 0.1}]
    fitted = Fit([*history, {"step": 20, "val_loss": 9.0}], {}, {}, {"steps": 20})
    assert _tail_loss(fitted) == pytest.approx(1.5)


def test_collate_stacks_pictures_and_noise() -> None:
    sample = (torch.zeros(3, 8, 8, dtype=torch.uint8), torch.ones(4))
    batch = collate([sample, sample])
    assert batch["inputs"].shape == (2, 3, 8, 8)
    assert batch["data_samples"].shape == (2, 4)


def _values(**changes: object) -> PretrainingValues:
    task = resolve_task("tiny_pretrain", load_backbone("vit_t_mae"))
    return PretrainingValues.model_validate(task.values.model_dump() | changes)


def _training(paths: list[Path]) -> TrainingSamples:
    return TrainingSamples(Pictures(Files(paths)), (8, 8), 4, _values())


def _photos(folder: Path, count: int) -> list[Path]:
    """Noise pictures of 40 x 40 pixels."""
    generator = np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(count)]
    for path in paths:
        Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("decoder_width=50", "decoder_width 50 is not a multiple of decoder_heads 4"),
        ("crop_scale=[0.8, 0.2]", r"crop_scale \[0.8, 0.2\] is not a range"),
        ("mask_ratio=1.0", "mask_ratio"),
    ],
)
def test_values_that_cannot_be_built_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_task("tiny_pretrain", load_backbone("vit_t_mae"), [setting])
