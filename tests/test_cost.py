"""The command: what it counts for each task, what it measures here, and what it says of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mae_bench import cost, recipes
from mae_bench.errors import UserError
from mae_bench.pretraining.cost import total


def test_the_text() -> None:
    text = cost.estimate("pretrain", "vit_l_mae", measure=False).text()
    lines = text.splitlines()
    assert lines[0] == "vit_l_mae, imagenet_pretrain   in1k-mae-1600ep@1"
    assert lines[1] == "  224 x 224 pixels, 196 patches of 16"
    for expected in (
        "  GMACs per image            plain      here      parameters",
        "  patch embedding            0.154     0.039         787,456",
        "  decoder                    5.276     5.019      25,219,072",
        "  forward                   20.756    20.364     329,541,888",
        "  speed-up     3.28 x fewer MACs than with mask tokens in the encoder (plain: 3.23 x)",
        "  length       499,200 steps, 2,044,723,200 images, 2.50e+20 FLOPs",
        "  measured     not asked for",
    ):
        assert expected in lines, expected
    page = (Path(__file__).resolve().parent.parent / "docs" / "cost.md").read_text(encoding="utf-8")
    assert text.replace(lines[-1], "").strip() in page
    assert "this device" not in text
    assert text.isascii() and not any(line != line.rstrip() for line in lines)


def test_settings_change_the_costs() -> None:
    published = cost.estimate("pretrain", "vit_b_mae", measure=False)
    shallow = cost.estimate("pretrain", "vit_b_mae", ["decoder_depth=1", "epochs=800"], measure=False)
    assert shallow.images == published.images // 2  # type: ignore[operator]
    assert shallow.counted.training < published.counted.training
    assert shallow.protocol.startswith(f"{published.protocol}+set:")
    with pytest.raises(UserError, match="noise = 0\\.1 is read by objective 'denoising' alone"):
        cost.estimate("pretrain", "vit_b_mae", ["noise=0.1"], measure=False)
    with pytest.raises(UserError, match="225 pixels are no whole number of patches"):
        cost.estimate("pretrain", "vit_b_mae", ["height=225"], measure=False)


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        ({"registers": 4}, [], "'vit_b_mae' has registers = 4, for which MAE pre-training is not defined"),
        ({"positions": "learned"}, ["height=192"], "need positions that are computed"),
    ],
)
def test_what_a_run_refuses_has_no_cost(features: dict[str, object], settings: list[str], message: str) -> None:
    recipe = recipes.load_backbone("vit_b_mae")
    shape = recipe.architecture.model_copy(update=features)
    changed = recipe.model_copy(update={"architecture": shape})
    with pytest.raises(UserError, match=message):
        cost.count(changed, recipes.resolve_task("imagenet_pretrain", recipe, settings))


def test_other_tasks_count_the_encoder_at_their_size() -> None:
    probe, tuned, boxes, masks = (
        cost.estimate(task, "vit_b_mae").as_dict()
        for task in ("imagenet_linear", "imagenet_finetune", "coco", "ade20k")
    )
    assert probe["counted"]["training"] == probe["macs_per_image"] == tuned["macs_per_image"]
    embedding = 196 * 768 * 768
    assert tuned["counted"]["training"] == 3 * tuned["macs_per_image"] - embedding
    # Windows of 14 in eight of twelve blocks: less than half of global attention's quadratic part is left.
    assert boxes["counted"]["grid"] == (64, 64)
    assert 450e9 < boxes["macs_per_image"] < 500e9
    assert masks["counted"]["grid"] == (32, 32)
    for one, missing in ((probe, "classifier"), (tuned, "classifier"), (boxes, "Mask R-CNN"), (masks, "UperNet")):
        assert missing in one["not_counted"]
        assert one["measured"] is None
        assert one["predicted_hours_on_this_device"] is None


def test_every_recipe_has_its_costs() -> None:
    """All tasks with all backbones, unless the task refuses the backbone or its size."""
    counted, refusals = 0, set()
    for backbone in recipes.index("backbone"):
        for task in recipes.index("task"):
            try:
                one = cost.estimate(task, backbone, measure=False)
            except UserError as error:
                refusals.add(str(error))
                continue
            counted += 1
            json.dumps(one.as_dict(), allow_nan=False)
            assert total(one.counted.parts.values()).macs > 0
            assert one.text()
    assert counted > 200
    assert all(re.search("cannot run with|pixels are no whole number", refusal) for refusal in refusals)


def test_real_steps_are_timed_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BUDGET", 0.5)
    one = cost.estimate("tiny_pretrain", "vit_t_mae")
    measured = one.measured
    assert measured is not None and one.steps == 2400 and one.images == 2400 * 64
    least, median, most = measured.per_image
    assert 0 < least <= median <= most < 0.1
    assert measured.precision == "fp32" and 3 <= measured.repeats <= 30
    assert measured.batch in (1, 2, 4, 8, 16, 32, 64)
    assert one.prediction is not None
    hours = (one.images * median + one.steps * measured.per_update) / 3600
    assert one.prediction[1] == pytest.approx(hours)
    assert json.loads(json.dumps(one.as_dict()))["predicted_hours_on_this_device"]["median"] == pytest.approx(hours)
    said = [line for line in one.text().splitlines() if "hours" in line or "minutes" in line]
    assert len(said) == 1 and said[0].startswith("  prediction ") and "on this device alone" in said[0]


@pytest.mark.parametrize(
    "settings",
    [
        ["objective=vae", "latent=4", "kl_weight=0.1", "mask_ratio=0", "loss_on=all"],
        ["objective=denoising", "noise=0.1", "mask_ratio=0", "loss_on=all"],
        ["height=16", "width=64", "sampling=block", "decoder=cross"],
        ["optimizer=sgd", "betas=[0.9, 0.999]", "precision=bf16"],
    ],
)
def test_what_has_been_set_is_what_is_timed(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BUDGET", 0.1)
    assert cost.estimate("tiny_pretrain", "vit_t_mae", settings).measured is not None


def test_recipes_without_a_length_have_no_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BUDGET", 0.1)
    one = cost.estimate("tiny_pretrain", "vit_t_mae", ["steps=0", "epochs=3.0", "warmup_steps=0"])
    assert one.measured is not None and one.prediction is None
    assert "whatever data there is" in one.text()
    assert "this device" not in one.text()


def test_a_model_that_does_not_fit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_free_bytes", lambda device: 10**9)
    one = cost.estimate("pretrain", "vit_h_mae")
    assert one.measured is None
    assert re.search(r"measured     a step needs 1\d\.\d GB, more than is free here", one.text())


@pytest.mark.parametrize(
    ("hours", "shown"),
    [(0.01234, "0.74 minutes"), (1.2345, "1.23 hours"), (99.96, "100 hours"), (635_432.0, "635,000 hours")],
)
def test_three_digits(hours: float, shown: str) -> None:
    assert cost._hours(hours) == shown
