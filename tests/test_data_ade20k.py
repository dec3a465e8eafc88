"""ADE20K's layout: pairing, class names, label values, and every wrong variant named."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mae_bench.data import masks, open_dataset
from mae_bench.data.ade20k import read_label
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SPEC = DataSpec(
    format="ade20k",
    train="images/training",
    val="images/validation",
    train_annotations="annotations/training",
    val_annotations="annotations/validation",
    classes=3,
    zero_is_other=True,
)
LABEL = np.array([[0, 1, 2, 3], [3, 3, 0, 0]], np.uint8)


def save_label(path: Path, label: np.ndarray, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(label)
    if mode == "P":
        image = Image.frombytes("P", image.size, label.tobytes())
        image.putpalette([255 - value // 3 for value in range(768)])
    image.save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("training", "validation"):
        for stem in ("b", "a"):
            picture = tmp_path / "set" / "images" / split / f"{stem}.jpg"
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((2, 4, 3), np.uint8)).save(picture)
            save_label(tmp_path / "set" / "annotations" / split / f"{stem}.png", LABEL)
    return tmp_path / "set"


def relabel(root: Path, label: np.ndarray, mode: str = "L") -> None:
    for path in root.glob("annotations/*/*.png"):
        save_label(path, label, mode)


def test_pictures_and_labels_pair_by_stem(root: Path) -> None:
    dataset = open_dataset(SPEC, root)
    assert dataset.counts == {"train": 2, "val": 2}
    assert dataset.classes == ("class_000", "class_001", "class_002")
    expected = [(root / f"images/training/{s}.jpg", root / f"annotations/training/{s}.png") for s in "ab"]
    assert dataset.masks("train") == expected
    assert np.array_equal(read_label(expected[0][1]), LABEL)


def test_palette_labels_give_indices(root: Path) -> None:
    relabel(root, LABEL, "P")
    dataset = open_dataset(SPEC, root)
    path = dataset.masks("val")[0][1]
    with Image.open(path) as image:
        assert image.mode == "P"
        assert np.asarray(image.convert("L")).max() > 200  # what a careless reader would see
    assert np.array_equal(read_label(path), LABEL)


NAMES = {
    "plain": ("classes.txt", "sky\nroad sign\ntree\n"),
    "numbered, with other": ("classes.txt", "0\tother\n1\tsky\n2\troad sign\n3\ttree\n"),
    "numbered": ("classes.txt", "1 sky\n2 road sign\n3 tree\n"),
    "ADE20K": ("objectInfo150.txt", "Idx\tRatio\tTrain\tVal\tStuff\tName\n"
               "1\t0.1\t9\t1\t1\tsky\n2\t0.1\t9\t1\t0\troad sign\n3\t0.1\t9\t1\t1\ttree\n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_class_names(root: Path, kind: str) -> None:
    file, text = NAMES[kind]
    (root / file).write_text(text)
    assert open_dataset(SPEC, root).classes == ("sky", "road sign", "tree")
    assert open_dataset(SPEC.model_copy(update={"classes": 0}), root).classes == ("sky", "road sign", "tree")


BAD_NAMES = {
    "too many": ("a\nb\nc\nd\n", r"names 4 classes, the task recipe expects 3"),
    "a gap": ("1 a\n2 b\n4 c\n", r"without gaps or repeats"),
    "a repeat": ("1 a\n1 b\n2 c\n", r"without gaps or repeats"),
    "not text": (b"\xff\xfe\x00", r"cannot read class names"),
    "empty": ("\n", r"names 0 classes"),
}


@pytest.mark.parametrize("kind", BAD_NAMES)
def test_bad_class_names_are_refused(root: Path, kind: str) -> None:
    content, message = BAD_NAMES[kind]
    (root / "classes.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        open_dataset(SPEC, root)


def test_a_number_of_classes_must_come_from_somewhere(root: Path) -> None:
    with pytest.raises(UserError, match=r"no classes\.txt and the task recipe names no number"):
        open_dataset(SPEC.model_copy(update={"classes": 0}), root)


VALUES = {
    "outside": (np.array([[0, 1, 2, 4], [3, 3, 0, 0]], np.uint8), r"has value 4; expected 0\.\.3"),
    "0 and 255": (np.array([[0, 255, 255, 255]] * 2, np.uint8), r"only 0 and 255, and 255 means 'ignore'"),
    "all other": (np.zeros((2, 4), np.uint8), r"only 0 = 'other'"),
    "another size": (np.ones((4, 2), np.uint8), r"is 2 x 4 pixels, its picture 4 x 2"),
    "rgb": (np.dstack([LABEL] * 3), r"3 channels \(mode RGB\).*python -m mae_bench\.data\.masks .*OUT"),
    "rgba": (np.dstack([LABEL] * 4), r"4 channels \(mode RGBA\)"),
    "16 bits": (LABEL.astype(np.uint16), r"another bit depth"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_wrong_labels_are_named(root: Path, kind: str) -> None:
    label, message = VALUES[kind]
    relabel(root, label)
    with pytest.raises(UserError, match=message):
        open_dataset(SPEC, root)


def test_ignore_is_admitted_and_zero_may_be_a_class(root: Path) -> None:
    relabel(root, np.array([[0, 1, 2, 255]] * 2, np.uint8))
    assert open_dataset(SPEC, root).counts["train"] == 2
    spec = SPEC.model_copy(update={"zero_is_other": False})
    assert open_dataset(spec, root).counts["train"] == 2
    relabel(root, LABEL)
    with pytest.raises(UserError, match=r"has value 3; expected 0\.\.2 \(3 classes, zero_is_other = false\)"):
        open_dataset(spec, root)


def test_a_jpeg_named_png_is_refused(root: Path) -> None:
    for path in root.glob("annotations/*/*.png"):
        Image.fromarray(LABEL).save(path, format="JPEG")
    with pytest.raises(UserError, match=r"is a JPEG file by its content"):
        open_dataset(SPEC, root)


def test_stretched_grey_levels_are_refused(tmp_path: Path) -> None:
    """A PNG with 4 bits per grey level comes out of Pillow multiplied by 17."""
    save_label(tmp_path / "a.png", LABEL)
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[24] = 4  # the header's bit depth; Pillow itself writes 8
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match="another bit depth"):
        read_label(tmp_path / "a.png")


def test_pictures_that_exif_turns_are_named(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(np.zeros((2, 4, 3), np.uint8)).save(root / "images/training/a.jpg", exif=exif)
    with pytest.raises(UserError, match=r"a\.jpg has EXIF orientation 3, which its label does not follow"):
        open_dataset(SPEC, root)


def test_missing_and_doubled_labels_are_named(root: Path) -> None:
    (root / "images/training/a.png").write_bytes((root / "images/training/a.jpg").read_bytes())
    with pytest.raises(UserError, match=r"a\.jpg and images/training/a\.png below .* share one label"):
        open_dataset(SPEC, root)
    (root / "images/training/a.png").unlink()
    (root / "annotations/validation/b.png").unlink()
    with pytest.raises(UserError, match=r"b\.jpg has no label; expected .*annotations/validation/b\.png"):
        open_dataset(SPEC, root)
    for path in root.glob("images/validation/*"):
        path.unlink()
    with pytest.raises(UserError, match=r"no pictures beside the labels .*validation"):
        open_dataset(SPEC, root)


FULL = ["images/training/a/abbey/ADE_train_00000001_seg.png", "images/ADE/training/x.jpg", "index_ade20k.pkl"]


@pytest.mark.parametrize("file", FULL)
def test_the_full_release_is_named(root: Path, file: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_bytes(b"")
    with pytest.raises(UserError, match=r"is the full ADE20K release .*this task needs ADEChallengeData2016"):
        open_dataset(SPEC, root)


def test_missing_folders_are_named(root: Path) -> None:
    (root / "annotations").rename(root / "labels")
    with pytest.raises(UserError, match=r"no ade20k data: .*annotations/training does not exist; .*--smoke"):
        open_dataset(SPEC, root)
    (root / "labels").rename(root / "annotations")
    with pytest.raises(UserError, match=r"does not set 'val_annotations', which ade20k data need"):
        open_dataset(SPEC.model_copy(update={"val_annotations": ""}), root)


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(max_examples=25)
def test_colours_convert_back_to_indices(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("colours")
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 1], [9, 9, 9], [128, 64, 0]], np.uint8)
    save_label(folder / "in/a.png", colours[np.array(rows)])
    (folder / "colours.txt").write_text("\n".join(" ".join(map(str, colour)) for colour in colours))
    given = [str(folder / "in"), str(folder / "out"), "--colours", str(folder / "colours.txt")]
    assert masks.main(given) == 0
    assert np.array_equal(read_label(folder / "out/a.png"), np.array(rows))


def test_conversion_guesses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, table = tmp_path / "in", tmp_path / "out", tmp_path / "colours.txt"
    save_label(source / "a.png", np.dstack([LABEL] * 3))
    assert masks.main([str(source), str(out)]) == 0
    assert np.array_equal(read_label(out / "a.png"), LABEL)
    assert masks.main([str(source), str(out)]) == 2
    assert "a.png exists" in capsys.readouterr().err
    save_label(source / "a.png", np.dstack([LABEL, LABEL, 255 - LABEL]))
    for colours, message in (
        (None, "has true colours"),
        ("0 0 255\n", "has colour 1 1 254"),
        ("0 0 255\n0 0 255\n", "names a colour twice"),
        ("0 0\n", "expected 1 to 255 lines"),
        ("0 0 256\n", "cannot read colours"),
    ):
        table.write_text(colours or "")
        extra = ["--colours", str(table)] if colours else []
        assert masks.main([str(source), str(tmp_path / "other"), *extra]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert masks.main([str(tmp_path / "nothing"), str(out)]) == 2
