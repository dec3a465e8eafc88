"""Augmentation and evaluation crops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from classification_toys import finetune, make_pictures
from engine_toys import make_backbone, make_values
from PIL import Image
from torchvision.transforms import v2

from mae_bench.classification.data import OneShotCrop, Pictures, collate, evaluation_transform, training_transform
from mae_bench.engine.samplers import SeededDataset
from mae_bench.engine.seeds import sample_randomness
from mae_bench.errors import UserError

INPUT = make_backbone().input


def _picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_evaluation_resizes_the_shorter_side_and_crops_the_centre() -> None:
    image = _picture(320, 400)
    found = evaluation_transform(make_values(image_size=224, eval_crop=0.875))(image)
    assert found.size == (224, 224)
    resized = image.resize((256, 320), Image.Resampling.BICUBIC)
    expected = resized.crop((16, 48, 240, 272))
    assert np.array_equal(np.array(found), np.array(expected))


def test_pictures_of_the_right_size_are_left_alone() -> None:
    image = _picture(32, 32)
    found = evaluation_transform(make_values(image_size=32, eval_crop=1.0))(image)
    assert np.array_equal(np.array(found), np.array(image))


def test_one_shot_crop_equals_the_published_formula() -> None:
    crop = OneShotCrop(8, (0.08, 1.0))
    image = _picture(30, 20)
    for seed in range(50):
        torch.manual_seed(seed)
        found = crop.make_params([image])
        torch.manual_seed(seed)
        area = 600 * torch.empty(1).uniform_(0.08, 1.0).item()
        aspect = math.exp(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
        width = min(round(math.sqrt(area * aspect)), 30)
        height = min(round(math.sqrt(area / aspect)), 20)
        top, left = torch.randint(0, 20 - height + 1, (1,)).item(), torch.randint(0, 30 - width + 1, (1,)).item()
        assert found == {"top": top, "left": left, "height": height, "width": width}
        torch.manual_seed(seed)
        expected = v2.functional.resized_crop(
            image, **found, size=[8, 8], interpolation=v2.InterpolationMode.BICUBIC, antialias=True
        )
        assert np.array_equal(np.array(crop(image)), np.array(expected))


@pytest.mark.parametrize("retry", [True, False])
def test_training_pictures_have_the_right_shape_and_vary(retry: bool) -> None:
    transform = training_transform(finetune(image_size=16, crop_retry=retry), INPUT)
    seen = set()
    for epoch in range(6):
        with sample_randomness(0, epoch, 0):
            image = transform(_picture(30, 20))
        assert image.size == (16, 16)
        assert image.mode == "RGB"
        seen.add(image.tobytes())
    assert len(seen) == 6


def test_flip_and_jitter_are_the_recipes() -> None:
    image = _picture(16, 16)
    still = training_transform(make_values(image_size=16, crop_scale=[1.0, 1.0], flip=False), INPUT)
    # The whole picture only fits with an aspect ratio of 1, otherwise torchvision falls back to the whole picture.
    assert {still(image).tobytes() for _ in range(10)} == {image.tobytes()}
    flipped = training_transform(make_values(image_size=16, crop_scale=[1.0, 1.0]), INPUT)
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    torch.manual_seed(0)
    assert {flipped(image).tobytes() for _ in range(20)} == {image.tobytes(), mirrored.tobytes()}
    jittered = training_transform(make_values(image_size=16, crop_scale=[1.0, 1.0], color_jitter=0.4), INPUT)
    assert len({jittered(image).tobytes() for _ in range(10)}) == 10


def test_randaugment_survives_its_largest_magnitude() -> None:
    """Increasing posterize keeps 0 bits at magnitude 10, which Pillow refuses and older ones made black."""
    transform = training_transform(make_values(image_size=16, randaug="rand-m10-n8-p1-inc1"), INPUT)
    posterize = next(op for op in transform.transforms[-1].ops if op.name == "PosterizeIncreasing")
    posterize.prob = 1.0
    assert not np.array(posterize(_picture(16, 16))).any()
    for _ in range(30):
        transform(_picture(20, 20))


def test_bad_notation_is_refused() -> None:
    with pytest.raises(UserError, match="randaug 'strong' is not timm's notation"):
        training_transform(make_values(randaug="strong"), INPUT)


def test_pictures_and_collation(tmp_path: Path) -> None:
    dataset = make_pictures(tmp_path)
    source = dataset.labelled("val")
    pictures = Pictures(source, evaluation_transform(make_values()))
    assert len(pictures) == 11
    batch = collate([pictures[0], pictures[10]])
    assert batch["inputs"].shape == (2, 3, 8, 8)
    assert batch["inputs"].dtype == torch.uint8
    assert batch["data_samples"].tolist() == [0, 5]


def test_augmentation_is_a_function_of_seed_epoch_and_index(tmp_path: Path) -> None:
    source = make_pictures(tmp_path).labelled("train")
    pictures = SeededDataset(Pictures(source, training_transform(finetune(), INPUT)), seed=0)
    first = pictures[(3, 5)][0]
    pictures[(0, 0)]
    assert torch.equal(pictures[(3, 5)][0], first)
    assert not torch.equal(pictures[(4, 5)][0], first)
