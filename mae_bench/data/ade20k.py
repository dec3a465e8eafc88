"""ADE20K's scene-parsing layout (ADEChallengeData2016): pictures, and index PNGs of the same stem in another folder.

A label picture holds one byte per pixel: the class index. 255 is 'ignore' everywhere. With ``zero_is_other`` 0 is
'other' and classes are 1..n, else classes are 0..n-1.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from mae_bench.data.dataset import SPLITS, Contents, Split, SplitName, fingerprint, locate, missing
from mae_bench.data.folders import scan
from mae_bench.data.images import BROKEN, MAX_PIXELS, POLICY, header
from mae_bench.data.names import read_names
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

IGNORE = 255
SAMPLE = 48  # label pictures decoded per split when a data set is opened
NAME_FILES = ("classes.txt", "objectInfo150.txt")
CHALLENGE = "ADEChallengeData2016 (http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip)"


def read_label(path: Path) -> NDArray[np.uint8]:
    """(H, W) class indices of one label picture. Palette PNGs give their indices, never their colours."""
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UserError(f"{path} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; {POLICY}")
            _check_format(path, image)
            return np.asarray(image).astype(np.uint8)
    except BROKEN as error:
        raise UserError(f"cannot decode label {path}: {error}; {POLICY}") from error


def _check_format(path: Path, image: Image.Image) -> None:
    expected = "expected a PNG with one byte per pixel, the class index"
    if not isinstance(image, PngImageFile):
        raise UserError(f"label {path} is a {image.format} file by its content; {expected}")
    if image.mode in ("RGB", "RGBA", "LA"):
        convert = f"`python -m mae_bench.data.masks {path.parent} OUT [--colours FILE]` converts the folder"
        raise UserError(f"label {path} has {len(image.getbands())} channels (mode {image.mode}); {expected}; {convert}")
    # Pillow stretches grey values of 2 and 4 bits to 0..255, which would change the indices.
    if image.mode not in ("L", "P", "1") or image.tile[0].args in ("L;2", "L;4"):
        raise UserError(f"label {path} has another bit depth (mode {image.mode}); {expected}")


def read(spec: DataSpec, root: Path) -> Contents:
    """Pair pictures and labels by stem, and check sampled labels against the recipe's classes."""
    _refuse_full_ade20k(root, locate(spec, root, "train"))
    classes = class_names(spec, root)
    files: list[tuple[str, int]] = []
    splits: dict[SplitName, Split] = {}
    for split in SPLITS:
        found, labels = (_list(spec, root, key) for key in (split, f"{split}_annotations"))
        paired = _pair(root, found, labels, getattr(spec, f"{split}_annotations"))
        splits[split] = Split(tuple(image for image, _ in paired), masks=tuple(label for _, label in paired))
        files += found + labels
        _check_sample(root, paired, len(classes), spec.zero_is_other)
    return Contents(classes, splits, fingerprint(files, classes))


def _list(spec: DataSpec, root: Path, key: str) -> list[tuple[str, int]]:
    folder = locate(spec, root, key)
    if not folder.is_dir():
        raise missing(spec, root, folder)
    return scan(folder, getattr(spec, key))[0]


def _refuse_full_ade20k(root: Path, images: Path) -> None:
    found = [*root.glob("index_ade20k.*"), *root.glob("images/ADE"), *islice(images.rglob("*_seg.png"), 1)]
    if found:
        raise UserError(
            f"{root} is the full ADE20K release ({found[0].relative_to(root)}), whose labels are colours; "
            f"this task needs {CHALLENGE}: get it and pass --data FOLDER"
        )


def class_names(spec: DataSpec, root: Path) -> tuple[str, ...]:
    """Names from ``classes.txt`` (a name a line, or ``index name``) or ``objectInfo150.txt``, else ``class_000``…

    The file lies in the data root or in a folder between it and the labels.
    """
    labels = PurePosixPath(spec.train_annotations)
    candidates = [root / folder / name for folder in labels.parents for name in NAME_FILES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        if not spec.classes:
            raise UserError(
                f"{root} has no classes.txt and the task recipe names no number of classes; write one name "
                "a line, or set classes in the recipe's [data]"
            )
        return tuple(f"class_{number:03d}" for number in range(spec.classes))
    names = read_names(file, first=1 if spec.zero_is_other else 0)
    if spec.classes and len(names) != spec.classes:
        raise UserError(
            f"{file} names {len(names)} classes, the task recipe expects {spec.classes}; correct one of them"
        )
    if not 0 < len(names) < IGNORE:
        raise UserError(f"{file} names {len(names)} classes; expected 1 to {IGNORE - 1}, since labels are one byte")
    return names


def _pair(
    root: Path, images: list[tuple[str, int]], labels: list[tuple[str, int]], masks: str
) -> list[tuple[str, str]]:
    if not images:
        raise UserError(f"no pictures beside the labels {root / masks}; expected one for each label, such as *.jpg")
    by_stem = {Path(label).stem: label for label, _ in labels if label.lower().endswith(".png")}
    paired: dict[str, tuple[str, str]] = {}
    for image, _ in images:
        stem = Path(image).stem
        if stem not in by_stem:
            raise UserError(f"picture {root / image} has no label; expected {root / masks / stem}.png")
        if stem in paired:
            raise UserError(f"pictures {paired[stem][0]} and {image} below {root} share one label; remove one of them")
        paired[stem] = (image, by_stem[stem])
    return list(paired.values())


def _check_sample(root: Path, pairs: list[tuple[str, str]], classes: int, zero_is_other: bool) -> None:
    """Decode evenly spaced labels: sizes equal the picture's, values are class indices, and not a 0/255 mask."""
    top = classes if zero_is_other else classes - 1
    seen: set[int] = set()
    step = max(1, len(pairs) // SAMPLE)
    for image, mask in pairs[::step]:
        label = read_label(root / mask)
        height, width = label.shape
        size, orientation = header(root / image)
        if orientation != 1:
            raise UserError(
                f"picture {root / image} has EXIF orientation {orientation}, which its label does not follow; "
                "save it upright"
            )
        if size != (width, height):
            raise UserError(
                f"label {root / mask} is {width} x {height} pixels, its picture {size[0]} x {size[1]}; "
                "they must be equal"
            )
        values = set(np.unique(label).tolist())
        seen |= values
        if wrong := sorted(values - set(range(top + 1)) - {IGNORE}):
            raise UserError(
                f"label {root / mask} has value {wrong[0]}; expected 0..{top} ({classes} classes, "
                f"{'0 = other' if zero_is_other else 'zero_is_other = false'}) or {IGNORE}"
            )
    if seen <= {0, IGNORE} and IGNORE in seen:
        raise UserError(
            f"labels in {(root / pairs[0][1]).parent} hold only 0 and 255, and 255 means 'ignore': divide "
            "binary masks by 255 and save them again"
        )
    if zero_is_other and seen == {0}:
        raise UserError(f"labels in {(root / pairs[0][1]).parent} hold only 0 = 'other': there is nothing to learn")
