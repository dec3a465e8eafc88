"""The classification pipeline from pictures to metrics."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from classification_toys import SPEC, classification_job, finetune, linear, make_pictures
from engine_toys import make_backbone
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mae_bench.checkpoints.load import build_encoder
from mae_bench.classification.data import Pictures, collate, evaluation_transform
from mae_bench.classification.evaluate import Counts, Evaluation, names_digest
from mae_bench.classification.run import run, smoke
from mae_bench.data import open_dataset
from mae_bench.engine.job import Outcome
from mae_bench.errors import UserError
from mae_bench.schema import ClassificationValues, MadeWeights


@pytest.mark.parametrize("make", [linear, finetune])
def test_training_evaluating_and_evaluating_only(tmp_path: Path, make: Callable[[], ClassificationValues]) -> None:
    dataset = make_pictures(tmp_path / "data")
    outcome = run(classification_job(tmp_path, "run", make(), dataset, micro_batch=4))
    assert set(outcome.metrics) == {"top1", "top5", "val_loss"}
    assert outcome.metrics["top1"] <= outcome.metrics["top5"] <= 100
    assert outcome.best["top1"] >= outcome.metrics["top1"]
    assert outcome.best["val_loss"] <= outcome.metrics["val_loss"]
    # Of 11 validation pictures 4 are of class 0 and 5 classes cover 10.
    assert outcome.baseline == {"top1": pytest.approx(100 * 4 / 11), "top5": pytest.approx(100 * 10 / 11)}
    assert set(outcome.per_class) == set(dataset.classes)
    shares = [outcome.per_class[f"class_{label}"]["top1"] * n for label, n in enumerate((4, 2, 2, 1, 1, 1))]
    assert sum(shares) / 11 == pytest.approx(outcome.metrics["top1"])
    trainable = 16 * 6 + 6
    assert (outcome.parameters["trainable"] == trainable) == (make is linear)
    again = run(
        classification_job(tmp_path, "eval", make(), dataset, eval_only=True, weights=outcome.weights, micro_batch=4)
    )
    assert again.metrics == outcome.metrics
    assert again.effective.get("linear") == outcome.effective.get("linear")
    assert again.per_class == outcome.per_class
    assert again.images == outcome.images
    assert again.weights is None


@pytest.mark.parametrize("workers", [0, 2])
def test_each_picture_is_told_in_the_data_sets_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Against the same model on one picture after the other."""
    dataset, values = make_pictures(tmp_path / "data", val=23), linear(epochs=2)
    evaluated: list[Any] = []
    evaluate = Evaluation.__call__

    def remembered(self: Evaluation, model: Any) -> dict[str, float]:
        evaluated.append(model)
        return evaluate(self, model)

    monkeypatch.setattr(Evaluation, "__call__", remembered)
    outcome = run(classification_job(tmp_path, "run", values, dataset, workers=workers, micro_batch=4))
    assert not multiprocessing.active_children()  # though the evaluation lives on, in what draws samples
    model, source = evaluated[-1].eval(), dataset.labelled("val")
    pictures = Pictures(source, evaluation_transform(values))
    right = []
    for index, label in enumerate(source.labels):
        with torch.no_grad():
            logits_1K = model(model.data_preprocessor(collate([pictures[index]]))["inputs"])
        right.append(bool(logits_1K.argmax() == label))
    assert outcome.images is not None
    assert outcome.images[1] == right
    assert 0 < sum(right) < len(right)  # else any order would do
    assert outcome.metrics["top1"] == 100 * sum(right) / len(right)


def test_pictures_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    """The data root and what was trained do not matter; another picture or another name does."""
    digests = []
    for name, val in (("here", 11), ("there", 11), ("more", 12)):
        job = classification_job(tmp_path, name, linear(), make_pictures(tmp_path / "data" / name, val=val))
        digests.append(Evaluation(job, linear()).images()[0])
    assert digests[0] == digests[1] != digests[2]
    picture = tmp_path / "data/there/val/class_0/000.png"
    picture.rename(picture.with_name("other.png"))
    job = classification_job(tmp_path, "renamed", linear(), open_dataset(SPEC, tmp_path / "data/there"))
    assert Evaluation(job, linear()).images()[0] != digests[0]


def test_digests_of_names() -> None:
    names = ["/data/val/a/1.png", "/data/val/b/\udcff.png"]
    expected = hashlib.sha256(b"val/a/1.png\0val/b/\xed\xb3\xbf.png").hexdigest()
    assert names_digest(names, Path("/data")) == expected != names_digest(names[::-1], Path("/data"))


def test_a_probe_learns_and_leaves_the_encoder_alone(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data", train=96, val=40)
    outcome = run(classification_job(tmp_path, "run", linear(epochs=15), dataset))
    assert outcome.metrics["top1"] >= 90
    encoder, _ = build_encoder(make_backbone(), None, seed=3)
    assert outcome.weights is not None
    saved = load_file(outcome.weights)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(saved[f"encoder.{name}"], tensor), name


@pytest.mark.parametrize("make", [linear, finetune])
def test_resuming_equals_running_through(tmp_path: Path, make: Callable[[], ClassificationValues]) -> None:
    dataset = make_pictures(tmp_path / "data")
    whole = run(classification_job(tmp_path, "whole", make(), dataset))
    first = run(classification_job(tmp_path, "cut", make(), dataset, workers=1))
    newest = sorted((tmp_path / "cut/checkpoints").iterdir())[-1]
    newest.unlink()  # as if the run had ended before its last step
    resumed = run(classification_job(tmp_path, "cut", make(), dataset, resume=True))
    assert resumed == first
    assert (resumed.metrics, resumed.history) == (whole.metrics, whole.history)
    assert whole.weights is not None
    assert resumed.weights is not None
    saved = load_file(resumed.weights)
    for name, tensor in load_file(whole.weights).items():
        assert torch.equal(tensor, saved[name]), name


def test_supervised_training_leaves_an_encoder_that_loads(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")
    run(classification_job(tmp_path, "run", finetune(pool="cls"), dataset))
    backbone = make_backbone().model_copy(update={"weights": MadeWeights(kind="made", task="toy")})
    _, report = build_encoder(backbone, tmp_path / "run/encoder.safetensors", seed=0)
    assert (report.matched, report.new, report.unused) == (report.total, [], {})


def test_supervised_training_at_another_size_leaves_no_encoder(tmp_path: Path) -> None:
    """Its position table is of another grid than the backbone's, so it is a model of this task alone."""
    dataset = make_pictures(tmp_path / "data")
    run(classification_job(tmp_path, "run", finetune(pool="cls", image_size=16, steps=1), dataset))
    assert (tmp_path / "run/model.safetensors").is_file()
    assert not (tmp_path / "run/encoder.safetensors").exists()


def test_the_order_of_images_and_the_seed_matter(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")
    losses = []
    for seed in (0, 0, 1):
        job = classification_job(tmp_path, f"run{len(losses)}", finetune(), dataset)
        job.seed = seed
        losses.append(run(job).metrics["val_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_image_sizes_other_than_pre_training(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")
    outcome = run(classification_job(tmp_path, "run", finetune(image_size=16, steps=2, eval_every_epochs=0.0), dataset))
    assert outcome.load["total"] > 0
    assert load_file(tmp_path / "run/model.safetensors")["encoder.pos_embed"].shape == (1, 1 + 16, 16)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (linear(drop_path=0.1), {}, "drop_path and layer_decay have no effect"),
        (linear(layer_decay=0.5), {}, "drop_path and layer_decay have no effect"),
        (finetune(color_jitter=0.3), {}, "color_jitter has no effect beside randaug"),
        (finetune(image_size=10), {}, "image_size 10 is not a multiple of toy's patch 4"),
        (finetune(), {"micro_batch": 1}, "the micro batch is 1"),
        (finetune(batch=9), {}, "the micro batch is 9"),
        (linear(), {"eval_only": True}, "needs --weights FILE"),
    ],
)
def test_what_has_no_effect_is_refused(
    tmp_path: Path, values: ClassificationValues, options: dict[str, Any], message: str
) -> None:
    dataset = make_pictures(tmp_path / "data")
    with pytest.raises(UserError, match=message):
        run(classification_job(tmp_path, "run", values, dataset, **options))


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path / "data")
    outcome: Outcome = run(classification_job(tmp_path, "run", linear(), dataset))
    for number, values in enumerate((linear(pool="mean"), finetune())):
        job = classification_job(tmp_path, f"eval{number}", values, dataset, eval_only=True, weights=outcome.weights)
        with pytest.raises(UserError, match="was made with"):
            run(job)


def test_counts_by_hand() -> None:
    counts = Counts.zeros(7)
    logits = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]] * 4)
    assert counts.add(logits, torch.tensor([0, 0, 4, 6])).tolist() == [True, True, False, False]
    counts.add(logits[:1], torch.tensor([5]))
    metrics = counts.metrics()
    assert (metrics["top1"], metrics["top5"]) == (40.0, 60.0)
    losses = [
        -(row - row.logsumexp(0))[label] for row, label in zip(logits[[0, 0, 0, 0, 0]], (0, 0, 4, 6, 5), strict=True)
    ]
    assert metrics["val_loss"] == pytest.approx(sum(losses).item() / 5)
    names = tuple("abcdefg")
    assert counts.per_class(names) == {"a": {"top1": 100.0}, "e": {"top1": 0.0}, "f": {"top1": 0.0}, "g": {"top1": 0.0}}
    with pytest.raises(UserError, match="not finite"):
        counts.add(torch.full((1, 7), torch.nan), torch.tensor([0]))


@given(classes=st.integers(2, 12), parts=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_counts_do_not_depend_on_batches(classes: int, parts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(parts), classes, generator=generator)
    labels = torch.randint(classes, (sum(parts),), generator=generator)
    whole, split = Counts.zeros(classes), Counts.zeros(classes)
    whole.add(logits, labels)
    for batch, targets in zip(logits.split(parts), labels.split(parts), strict=True):
        split.add(batch, targets)
    for name in ("images", "top1", "top5"):
        assert torch.equal(getattr(whole, name), getattr(split, name))
    assert ("top5" in whole.metrics()) == (classes > 5)
    assert whole.metrics()["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())


def test_smoke_keeps_small_pictures() -> None:
    assert smoke(linear(image_size=224), make_backbone()) == {"image_size": 32}
    assert smoke(linear(image_size=16), make_backbone()) == {"image_size": 16}
    assert smoke(linear(image_size=224), make_backbone(patch=16, width=1024, image_size=224)) == {"image_size": 64}
