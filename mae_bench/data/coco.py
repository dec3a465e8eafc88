"""COCO's format: a folder of pictures and one JSON of instances for each split.

The whole JSON is checked before anything is trained or evaluated (ids, boxes, polygons, run lengths, files), because
the usual faults surface late or never: category ids with gaps, boxes in another convention, masks of another size. No
mask is rasterised here, so a hostile file can claim any size without costing memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from mae_bench.data.dataset import SPLITS, CocoSplit, Contents, Split, SplitName, fingerprint, inside, locate, missing
from mae_bench.data.images import header
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

MAX_JSON_BYTES = 2 << 30  # COCO's own largest is 0.45 GB
MAX_SIDE = 1 << 15  # pixels
SLACK = 2.0  # pixels that boxes and polygons may reach beyond the picture: annotation tools round
SAMPLE = 48  # pictures per split whose header is compared with the JSON


def read(spec: DataSpec, root: Path) -> Contents:
    """Check both splits and map their category ids."""
    files: list[tuple[str, int]] = []
    digests: list[str] = []
    splits: dict[SplitName, Split] = {}
    for split in SPLITS:
        folder = locate(spec, root, split)
        file = locate(spec, root, f"{split}_annotations")
        if not folder.is_dir() or not file.is_file():
            raise missing(spec, root, folder if not folder.is_dir() else file)
        digest, content = _load(file)
        digests.append(digest)
        ids, names = _categories(content, file)
        sizes, found = _images(content, file, folder)
        counted = _annotations(content, file, sizes, ids)
        _check_headers(folder, content["images"])
        files += [(f"{getattr(spec, split)}/{name}", size) for name, size in found]
        described = CocoSplit(folder, file, ids, names, *counted)
        splits[split] = Split(tuple(f"{getattr(spec, split)}/{name}" for name, _ in found), coco=described)
    _refuse_shared(spec, splits)
    train, val = splits["train"].coco, splits["val"].coco
    assert train is not None
    assert val is not None
    if (train.ids, train.names) != (val.ids, val.names):
        raise UserError(
            f"categories differ between {train.annotations} ({len(train.ids)}) and {val.annotations} "
            f"({len(val.ids)}); both need the same ids and names"
        )
    if spec.classes and len(train.names) != spec.classes:
        raise UserError(
            f"{train.annotations} has {len(train.names)} categories, the task recipe expects "
            f"{spec.classes}; copy the recipe and set its classes"
        )
    return Contents(train.names, splits, fingerprint(files, train.names, digests))


def _refuse_shared(spec: DataSpec, splits: dict[SplitName, Split]) -> None:
    """One folder may hold the pictures of both splits, but no picture may be in both."""
    val = set(map(PurePosixPath, splits["val"].images))
    if shared := next((image for image in splits["train"].images if PurePosixPath(image) in val), None):
        raise UserError(
            f"{shared} is in both {spec.train_annotations} and {spec.val_annotations}; training and validation "
            "must not share a picture"
        )


def _load(file: Path) -> tuple[str, dict[str, Any]]:
    """sha256 and content of an instances file with the three lists that COCO's format requires."""
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise UserError(f"{file} has {size} bytes, more than {MAX_JSON_BYTES}: not an instances file")
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(f"{file} has no list '{key}'; expected COCO's instances format")
        if not all(isinstance(entry, dict) for entry in content[key]):
            raise UserError(f"{file}: an entry of '{key}' is not an object; expected COCO's instances format")
    return hashlib.sha256(raw).hexdigest(), content


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _unique_ids(entries: list[dict[str, Any]], kind: str, file: Path) -> None:
    seen: set[int] = set()
    for entry in entries:
        id: Any = entry.get("id")
        if not _whole(id):
            raise UserError(f"{file}: {kind} id {str(id)[:40]!r} is not a whole number")
        if id in seen:
            raise UserError(f"{file}: {kind} id {id} occurs twice; ids must be unique")
        seen.add(id)


def _categories(content: dict[str, Any], file: Path) -> tuple[dict[int, int], tuple[str, ...]]:
    entries = content["categories"]
    _unique_ids(entries, "category", file)
    entries = sorted(entries, key=lambda entry: int(entry["id"]))
    names = [entry.get("name") for entry in entries]
    if not names:
        raise UserError(f"{file} has no categories")
    for name, count in Counter(map(str, names)).items():
        if count > 1 or name not in names:
            raise UserError(f"{file}: category name {name[:40]!r} is not a text, or occurs {count} times")
    return {entry["id"]: number for number, entry in enumerate(entries)}, tuple(map(str, names))


def _images(
    content: dict[str, Any], file: Path, folder: Path
) -> tuple[dict[int, tuple[int, int]], list[tuple[str, int]]]:
    """id -> (width, height), and (name, bytes) of every picture, which must exist inside ``folder``."""
    _unique_ids(content["images"], "image", file)
    sizes: dict[int, tuple[int, int]] = {}
    found: list[tuple[str, int]] = []
    for entry in content["images"]:
        name, width, height = entry.get("file_name"), entry.get("width"), entry.get("height")
        if not isinstance(name, str) or not name:
            raise UserError(f"{file}: image {entry['id']} has no file_name")
        path = inside(folder, name, f"{file}: image {entry['id']}")
        if not (_whole(width) and _whole(height) and 0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
            raise UserError(
                f"{file}: image {entry['id']} has size {str(width)[:20]} x {str(height)[:20]}; expected "
                f"whole pixels up to {MAX_SIDE}"
            )
        try:
            status = os.stat(path)  # a hundred thousand calls  # noqa: PTH116
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise UserError(f"{file} lists {name!r}, which is not in {folder}; complete the folder") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a file")
        sizes[entry["id"]] = (width, height)
        found.append((name, status.st_size))
    if not sizes:
        raise UserError(f"{file} lists no images")
    return sizes, found


def _annotations(
    content: dict[str, Any], file: Path, sizes: dict[int, tuple[int, int]], ids: dict[int, int]
) -> tuple[int, int, int, int]:
    """Objects, crowd regions, images without an object, and polygons with fewer than three points."""
    entries = content["annotations"]
    _unique_ids(entries, "annotation", file)
    # COCO's evaluation takes an id below 1 for 'no match': an object that was found would count as missed.
    if any(entry["id"] < 1 for entry in entries):
        raise UserError(f"{file}: an annotation has an id below 1; number annotations from 1, as COCO does")
    crowds = short = 0
    with_objects: set[int] = set()
    largest = 0.0
    for entry in entries:
        try:
            width, height = _reference(entry, sizes, ids)
            largest = max(largest, *_box(entry, width, height)[2:])
            short += _segmentation(entry.get("segmentation"), width, height)
        except ValueError as error:
            raise UserError(f"{file}: annotation {entry['id']} {error}") from error
        if entry.get("iscrowd", 0):
            crowds += 1
        else:
            with_objects.add(entry["image_id"])
    if entries and largest <= 1:
        raise UserError(
            f"{file}: no box is larger than 1: they look normalised; expected [x, y, width, height] in pixels"
        )
    return len(entries) - crowds, crowds, len(sizes) - len(with_objects), short


def _reference(entry: dict[str, Any], sizes: dict[int, tuple[int, int]], ids: dict[int, int]) -> tuple[int, int]:
    image, category = entry.get("image_id"), entry.get("category_id")
    if not _whole(image) or image not in sizes:
        raise ValueError(f"names image {str(image)[:40]}, which 'images' does not list")
    if not _whole(category) or category not in ids:
        raise ValueError(f"names category {str(category)[:40]}, which 'categories' does not list")
    if entry.get("iscrowd", 0) not in (0, 1):
        raise ValueError(f"has iscrowd {str(entry['iscrowd'])[:40]}; expected 0 or 1")
    area: Any = entry.get("area")
    if type(area) not in (int, float) or not 0 <= area < math.inf:
        raise ValueError(f"has area {str(area)[:40]}; expected square pixels (evaluation sorts objects by it)")
    return sizes[image]


def _numbers(values: Any, low: float, high: float) -> bool:
    """A list of finite numbers within bounds. Bounds come first: they admit no integer too large for a float."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        return False
    return not values or (low <= min(values) and max(values) <= high and math.isfinite(sum(values)))


def _box(entry: dict[str, Any], width: int, height: int) -> list[float]:
    """[x, y, width, height] in pixels. Sides may be 0 (COCO itself has such); they are never trained on."""
    box = entry.get("bbox")
    if isinstance(box, list) and len(box) == 4 and _numbers(box, -SLACK, 2 * MAX_SIDE):
        x, y, w, h = box
        if w >= 0 and h >= 0 and x + w <= width + SLACK and y + h <= height + SLACK:
            return box
    raise ValueError(f"has bbox {str(box)[:80]}; expected [x, y, width, height] in pixels inside {width} x {height}")


def _segmentation(value: Any, width: int, height: int) -> int:
    """Check polygons or run lengths; the number of polygons with fewer than three points."""
    if isinstance(value, dict):
        _run_lengths(value, width, height)
        return 0
    if not isinstance(value, list) or not value:
        raise ValueError("has no segmentation; Mask R-CNN needs polygons or run lengths for every object")
    for polygon in value:
        if not isinstance(polygon, list) or len(polygon) % 2:
            raise ValueError("has a polygon that is not a list of x, y pairs")
        if not (_numbers(polygon[::2], -SLACK, width + SLACK) and _numbers(polygon[1::2], -SLACK, height + SLACK)):
            raise ValueError(f"has a polygon that is not made of pixels inside {width} x {height}")
    return sum(len(polygon) < 6 for polygon in value)


def _run_lengths(value: dict[str, Any], width: int, height: int) -> None:
    if value.get("size") != [height, width]:
        raise ValueError(f"has run lengths of size {str(value.get('size'))[:40]}; expected [{height}, {width}]")
    counts = value.get("counts")
    if isinstance(counts, str):
        counts = decode_counts(counts)
    if not isinstance(counts, list) or not all(map(_whole, counts)) or any(count < 0 for count in counts):
        raise ValueError("has run lengths that are not whole numbers from 0")
    if sum(counts) != width * height:
        raise ValueError(f"has run lengths that cover {sum(counts)} pixels; expected {width * height}")


def decode_counts(text: str) -> list[int]:
    """Run lengths from COCO's compressed text: base-32 digits with a sign, from the fourth run on as a difference to
    the one two before (the format of ``rleToString`` in the COCO API)."""
    counts: list[int] = []
    value = shift = 0
    for character in text:
        digit = ord(character) - 48
        if not 0 <= digit < 64 or shift > 30:
            raise ValueError("has run lengths that are not COCO's compressed text")
        value |= (digit & 31) << shift
        shift += 5
        if digit & 32:
            continue
        if digit & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("has run lengths that end in the middle of a number")
    return counts


def _check_headers(folder: Path, images: list[dict[str, Any]]) -> None:
    """Compare evenly spaced pictures' sizes with the JSON. detectron2 turns pictures by their EXIF orientation."""
    for entry in images[:: max(1, len(images) // SAMPLE)]:
        path = folder / entry["file_name"]
        (width, height), orientation = header(path)
        if orientation >= 5:
            width, height = height, width
        if (width, height) != (entry["width"], entry["height"]):
            raise UserError(
                f"{path} is {width} x {height} pixels{' after EXIF rotation' if orientation >= 5 else ''}, "
                f"its JSON says {entry['width']} x {entry['height']}; they must be equal"
            )
