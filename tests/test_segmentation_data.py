"""Pictures and labels on their way into mmseg: zero reduction once, 255 kept, augmentation aligned, faults named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from PIL import Image
from segmentation_cases import colour_of, values, write_pair

from mae_bench.errors import UserError
from mae_bench.segmentation.data import PairDataset, ReadPicture, eval_set, train_set

NAMES = tuple(f"class {number}" for number in range(8))
LABELS = np.array([[0, 1, 2, 8], [255, 3, 4, 0], [5, 6, 7, 255]], np.uint8)
BLOCKS = np.kron(LABELS, np.ones((16, 12), np.uint8))


def labels_of(item: dict[str, Any]) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = item["data_samples"].gt_sem_seg.data[0].numpy()
    return array


@pytest.mark.parametrize("mode", ["L", "P"])
def test_zero_is_reduced_exactly_once_and_255_stays(tmp_path: Path, mode: str) -> None:
    """Palette PNGs are read as indices; every item, and the same item twice, is reduced once."""
    pairs = [write_pair(tmp_path, BLOCKS, mode, name) for name in "ab"]
    data = eval_set(pairs, NAMES, True, values())
    expected = np.where((BLOCKS == 0) | (BLOCKS == 255), 255, BLOCKS.astype(int) - 1)
    for index in (0, 1, 0):
        np.testing.assert_array_equal(labels_of(data[index]), expected)
    assert set(np.unique(expected)) == {0, 1, 2, 3, 4, 5, 6, 7, 255}


def test_without_reduction_labels_are_as_stored(tmp_path: Path) -> None:
    stored = np.where(BLOCKS == 8, 0, BLOCKS)
    data = eval_set([write_pair(tmp_path, stored)], NAMES, False, values())
    np.testing.assert_array_equal(labels_of(data[0]), stored)


def test_training_labels_are_reduced_once_too(tmp_path: Path) -> None:
    data = train_set([write_pair(tmp_path, BLOCKS)], NAMES, True, values(photometric=False))
    assert set(np.unique(labels_of(data[0]))) <= {0, 1, 2, 3, 4, 5, 6, 7, 255}
    # The picture's red channel is the stored label: mmseg's items are BGR.
    item = data[0]
    red = item["inputs"][2].numpy()
    reduced = np.where((red == 0) | (red == 255), 255, red.astype(int) - 1)
    # Bilinear resizing mixes colours at borders; inside a block they are the label.
    assert (reduced == labels_of(item)).mean() > 0.7


def test_augmentation_keeps_picture_and_label_aligned_and_is_seeded(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, np.where(BLOCKS == 8, 0, BLOCKS))
    data = train_set([pair], NAMES, False, values(photometric=False, resize_ratio=[1.0, 1.0]))
    seen = []
    for seed in (0, 0, 1, 2, 3, 4):
        np.random.seed(seed)
        item = data[0]
        seen.append(labels_of(item))
        image = item["inputs"].permute(1, 2, 0).numpy()[..., ::-1]
        assert (image == colour_of(seen[-1])).all(-1).mean() > 0.9
        assert item["inputs"].shape[1:] == seen[-1].shape
    np.testing.assert_array_equal(seen[0], seen[1])
    assert any(seen[0].shape != other.shape or (seen[0] != other).any() for other in seen[2:])


def test_crops_and_sizes_follow_the_values(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, np.zeros((90, 200), np.uint8))
    small = train_set([pair], NAMES, False, values(image_size=16, resize=[50, 40], resize_ratio=[1.0, 1.0]))
    assert small[0]["inputs"].shape == (3, 16, 16)
    whole = train_set([pair], NAMES, False, values(image_size=64, resize=[50, 40], resize_ratio=[1.0, 1.0]))
    assert whole[0]["inputs"].shape == (3, 23, 50)  # keep ratio: the longer side meets its bound
    half = train_set([pair], NAMES, False, values(image_size=64, resize=[50, 40], resize_ratio=[0.5, 0.5]))
    assert half[0]["inputs"].shape == (3, 11, 25)
    tested = eval_set([pair], NAMES, False, values(resize=[50, 40]))[0]
    assert tested["inputs"].shape == (3, 23, 50)
    assert labels_of(tested).shape == tested["data_samples"].metainfo["ori_shape"] == (90, 200)


def test_crops_of_one_class_are_drawn_again(tmp_path: Path) -> None:
    """A thin stripe of class 1: with a bound on the largest share, crops that miss it become rare."""
    labels = np.zeros((16, 256), np.uint8)
    labels[:, 100:108] = 1
    pair = write_pair(tmp_path, labels)

    def hits(share: float) -> int:
        bounds = values(image_size=16, resize=[256, 16], resize_ratio=[1.0, 1.0], max_class_share=share, stride=16)
        data = train_set([pair], NAMES, False, bounds)
        np.random.seed(0)
        return sum(1 in labels_of(data[0]) for _ in range(60))

    assert hits(0.75) > 2 * hits(1.0)


def test_photometric_distortion_can_be_switched_off(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, np.full((32, 32), 40, np.uint8))

    def colours(photometric: bool) -> set[tuple[int, ...]]:
        data = train_set([pair], tuple("abcdefgh" * 6), False, values(photometric=photometric))
        np.random.seed(0)
        return {tuple(data[0]["inputs"][:, 0, 0].tolist()) for _ in range(8)}

    assert colours(False) == {(7, 215, 40)}
    assert len(colours(True)) > 3


def test_pictures_are_read_as_mmcv_reads_them(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (33, 47, 3), np.uint8)
    for name, options in (("a.jpg", {"quality": 90}), ("b.png", {}), ("grey.png", {})):
        Image.fromarray(noise if name != "grey.png" else noise[..., 0]).save(tmp_path / name, **options)
        ours = ReadPicture().transform({"img_path": str(tmp_path / name)})
        theirs = LoadImageFromFile().transform({"img_path": str(tmp_path / name)})
        np.testing.assert_array_equal(ours["img"], theirs["img"])
        assert ours["ori_shape"] == theirs["ori_shape"] == (33, 47)


def test_pictures_are_taken_as_stored_so_that_labels_fit(tmp_path: Path) -> None:
    """A camera's rotation tag does not turn the picture away from its label map."""
    picture, label = write_pair(tmp_path, np.zeros((20, 30), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(picture).save(tmp_path / "turned.jpg", exif=exif)
    item = eval_set([(tmp_path / "turned.jpg", label)], NAMES, False, values())[0]
    assert item["data_samples"].metainfo["ori_shape"] == (20, 30)


def refused(pair: tuple[Path, Path], zero_is_other: bool = True) -> str:
    data: PairDataset = train_set([pair], NAMES, zero_is_other, values())
    with pytest.raises(UserError) as caught:
        data[0]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_label_values_that_no_class_has_are_refused(tmp_path: Path) -> None:
    wrong = BLOCKS.copy()
    wrong[0, 0] = 9
    message = refused(write_pair(tmp_path, wrong))
    assert "value 9" in message and "1 to 8" in message and "a_label.png" in message
    assert "value 8" in refused(write_pair(tmp_path, BLOCKS), zero_is_other=False)
    assert "value 254" in refused(write_pair(tmp_path, np.full((8, 8), 254)))


def test_label_files_that_hold_no_indices_are_refused(tmp_path: Path) -> None:
    picture, label = write_pair(tmp_path, BLOCKS)
    Image.fromarray(colour_of(BLOCKS)).save(label)
    assert "mode RGB" in refused((picture, label))
    Image.fromarray(BLOCKS.astype(np.uint16) + 256).save(label)
    assert "mode I;16" in refused((picture, label))
    label.write_bytes(label.read_bytes()[:20])
    assert "cannot be read" in refused((picture, label))
    Image.fromarray(BLOCKS[:-1]).save(label)
    assert "48 x 47" in refused((picture, label))


def test_pictures_that_do_not_decode_are_refused(tmp_path: Path) -> None:
    """mmcv fills the missing half of a cut JPEG with grey; the run must not."""
    picture, label = write_pair(tmp_path, BLOCKS)
    noise = np.random.default_rng(0).integers(0, 256, (*BLOCKS.shape, 3), np.uint8)
    whole = tmp_path / "whole.jpg"
    Image.fromarray(noise).save(whole)
    picture.write_bytes(whole.read_bytes()[:1500])
    assert picture.name in refused((picture, label))


def test_items_survive_worker_processes(tmp_path: Path) -> None:
    """Faults cross from a worker to the main process as what they are."""
    from mmengine.dataset import pseudo_collate
    from torch.utils.data import DataLoader

    good = write_pair(tmp_path, BLOCKS, name="good")
    bad = write_pair(tmp_path, np.full((8, 8), 200), name="bad")
    loader: DataLoader[Any] = DataLoader(
        eval_set([good, bad], NAMES, True, values()), num_workers=1, collate_fn=pseudo_collate
    )
    items = iter(loader)
    assert isinstance(next(items)["inputs"][0], torch.Tensor)
    with pytest.raises(UserError, match="value 200"):
        next(items)
