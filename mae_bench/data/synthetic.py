"""Write made data: the ``shapes`` set in three label layouts, and a handful of pictures for ``--smoke``.

Both are written into a sibling folder first and renamed when complete, so that an interrupted or a second process never
leaves half a data set. ``manifest.json`` carries two hashes: ``content`` over pixels and labels, equal on every machine
(file sizes are not: PNG encoders differ), and ``files`` over names and sizes, checked whenever the set is opened.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mae_bench.data import huggingface, tars
from mae_bench.data.dataset import CLASSIFIED, SPLITS, SplitName, inside, locate
from mae_bench.data.shapes import CLASSES, Mask, Picture, Pixels, Shape, draw
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

VERSION = 3  # raise it when a picture or a label changes: the folder's name and every fingerprint change with it
MANIFEST = "manifest.json"
SEEDS = {"pretrain": 0, "train": 1, "val": 2}
CLASSIFICATION = {"pretrain": 8000, "train": 1000, "val": 1000}
DENSE = {"train": 200, "val": 60}  # the first pictures of the same splits, labelled densely
EMPTY_EVERY = 12  # in the dense layouts every twelfth picture is its background alone
CATEGORY_IDS = (3, 7, 12, 18, 25, 41, 60, 88)
SMOKE = {"train": 8, "val": 4}
SMOKE_SIZE = (80, 96)  # height, width


@dataclass
class _Content:
    """Running hash over what was drawn and labelled, independent of how files are encoded."""

    total: Any = field(default_factory=hashlib.sha256)

    def picture(self, name: str, pixels: Pixels) -> None:
        self.total.update(name.encode() + b"\0" + str(pixels.shape).encode() + pixels.tobytes())

    def text(self, name: str, text: str) -> None:
        self.total.update(name.encode() + b"\1" + text.encode())


def make_shapes(root: Path) -> None:
    """Write the whole set (about 10,500 PNGs, 35 MB) to ``root``, atomically. A no-op when ``root`` exists."""
    _atomically(root, _write_shapes)


def make_smoke(spec: DataSpec, root: Path) -> None:
    """Write eight training and four validation pictures in the layout that ``spec`` names, with its number of classes.

    The pictures are the made shapes at 96 x 80 pixels as JPEGs; labels are spread over all classes.
    """
    _atomically(root, lambda folder: _write_smoke(spec, folder))


def check(root: Path) -> str:
    """Content hash of a made set after comparing the files on disk with the manifest."""
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        content, files = str(manifest["content"]), str(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"made data {root} has no usable {MANIFEST} ({error}); delete the folder: it is made again"
        ) from error
    if _tree(root) != files:
        raise UserError(
            f"made data {root} differs from its {MANIFEST} (a file was changed, added or lost); "
            "delete the folder: it is made again"
        )
    return content


def _atomically(root: Path, write: Callable[[Path], _Content]) -> None:
    if root.exists():
        return
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    except OSError as error:
        raise UserError(f"cannot make {root}: {error.strerror}; $MAE_BENCH_CACHE moves the cache") from error
    try:
        content = write(folder)
        manifest = {"name": root.name, "version": VERSION, "content": content.total.hexdigest(), "files": _tree(folder)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        folder.chmod(0o755)  # mkdtemp makes it private
        try:
            folder.replace(root)
        except OSError:
            if not (root / MANIFEST).is_file():  # otherwise another process finished first: its set is the same
                raise
    except OSError as error:
        raise UserError(f"cannot make {root}: {error.strerror}; $MAE_BENCH_CACHE moves the cache") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tree(root: Path) -> str:
    """sha256 over relative path and size of every file below ``root``, the manifest excepted."""
    found: list[tuple[str, int]] = []
    for folder, _, names in os.walk(root):
        below = Path(folder).relative_to(root).as_posix()
        found += [(f"{below}/{name}", os.stat(f"{folder}/{name}").st_size) for name in names]  # 10,000 calls  # noqa: PTH116
    lines = [f"{path}\0{size}\n" for path, size in sorted(found) if path != f"./{MANIFEST}"]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _write_shapes(root: Path) -> _Content:
    content = _Content()
    for split, count in CLASSIFICATION.items():
        folders = [root / "classification" / split / name for name in CLASSES]
        for folder in folders:
            folder.mkdir(parents=True)
        for index in range(count):
            picture = draw(SEEDS[split], index)
            _save(picture.pixels, folders[index % len(CLASSES)] / f"{index:05d}.png")
            content.picture(f"{split}/{CLASSES[index % len(CLASSES)]}/{index}", picture.pixels)
    for split, long in (("train", "training"), ("val", "validation")):
        pictures = [draw(SEEDS[split], i, empty=i % EMPTY_EVERY == EMPTY_EVERY - 1) for i in range(DENSE[split])]
        _write_coco(
            pictures, CATEGORY_IDS, CLASSES, root / "coco" / split, root / f"coco/annotations/{split}.json", content
        )
        labels = [picture.labels() for picture in pictures]
        _write_masks(pictures, labels, root / f"ade20k/images/{long}", root / f"ade20k/annotations/{long}", content)
    names = "".join(f"{number}\t{name}\n" for number, name in enumerate(("other", *CLASSES)))
    (root / "ade20k/classes.txt").write_text(names, encoding="utf-8")
    return content


def _save(pixels: Pixels, path: Path) -> None:
    """PNG at the fastest level, or JPEG by suffix."""
    Image.fromarray(pixels).save(path, compress_level=1, quality=95)  # each encoder takes its own


def _write_coco(
    pictures: list[Picture],
    ids: tuple[int, ...],
    names: tuple[str, ...],
    folder: Path,
    file: Path,
    content: _Content,
    suffix: str = ".png",
    first: int = 1,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures, first):
        name = f"{number:012d}{suffix}"
        _save(picture.pixels, folder / name)
        height, width = picture.pixels.shape[:2]
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        annotations += [_annotation(shape, number, ids) for shape in picture.shapes]
        content.picture(name, picture.pixels)
    for number, annotation in enumerate(annotations, 1):
        annotation["id"] = number
    categories = [{"id": id, "name": name, "supercategory": "made"} for id, name in zip(ids, names, strict=True)]
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories}, separators=(",", ":"))
    file.write_text(text, encoding="utf-8")
    content.text(file.name, text)


def _annotation(shape: Shape, image: int, ids: tuple[int, ...]) -> dict[str, Any]:
    """COCO's entry of one shape: polygons, or run lengths for a crowd region."""
    segmentation: Any = [[value for point in polygon for value in point] for polygon in shape.polygons]
    if shape.crowd:
        segmentation = {"size": list(shape.mask.shape), "counts": run_lengths(shape.mask)}
    return {
        "image_id": image,
        "category_id": ids[shape.label],
        "bbox": [round(value, 2) for value in shape.box],
        "area": int(shape.mask.sum()),
        "iscrowd": int(shape.crowd),
        "segmentation": segmentation,
    }


def run_lengths(mask: Mask) -> list[int]:
    """COCO's uncompressed RLE: lengths of alternating runs in column order, the first one of zeros (maybe empty)."""
    flat = mask.T.reshape(-1)
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    lengths = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist()
    return [0, *lengths] if flat[0] else lengths


def _write_masks(
    pictures: list[Picture], labels: list[Pixels], images: Path, masks: Path, content: _Content, suffix: str = ".png"
) -> None:
    images.mkdir(parents=True, exist_ok=True)
    masks.mkdir(parents=True, exist_ok=True)
    for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        _save(picture.pixels, images / f"{index:05d}{suffix}")
        _save(label, masks / f"{index:05d}.png")
        content.picture(f"{images.name}/{index}", picture.pixels)
        content.picture(f"{masks.name}/{index}", label)


def _write_smoke(spec: DataSpec, root: Path) -> _Content:
    content = _Content()
    classes = spec.classes or len(CLASSES)
    names = CLASSES if classes == len(CLASSES) else tuple(f"class_{number:04d}" for number in range(classes))
    height, width = SMOKE_SIZE
    for split in SPLITS:
        pictures = [draw(SEEDS[split], index, height=height, width=width) for index in range(SMOKE[split])]
        if spec.format in CLASSIFIED:
            targets = [index * classes // len(pictures) for index in range(len(pictures))]
            for index, (picture, target) in enumerate(zip(pictures, targets, strict=True)):
                content.picture(f"{split}/{names[target]}/{index}", picture.pixels)
            _write_classified(spec, root, split, pictures, targets, names)
            continue
        images = locate(spec, root, split)
        if spec.format == "coco":
            pictures[-1] = draw(SEEDS[split], len(pictures), height=height, width=width, empty=True)
            ids = tuple(number + number // 7 + 1 for number in range(classes))  # with gaps, like COCO's 1..90 for 80
            spread = [_relabelled(picture, classes) for picture in pictures]
            one_folder = split == "val" and images == locate(spec, root, "train")
            first = 1 + SMOKE["train"] if one_folder else 1
            _write_coco(spread, ids, names, images, locate(spec, root, f"{split}_annotations"), content, ".jpg", first)
        else:
            first = 1 if spec.zero_is_other else 0  # the background's label counts as a class without 'other'
            labels = [_spread_labels(picture, classes, first) for picture in pictures]
            _write_masks(pictures, labels, images, locate(spec, root, f"{split}_annotations"), content, ".jpg")
    if spec.format in ("ade20k", "tar"):
        listed = ("other", *names) if spec.zero_is_other else names
        text = "".join(f"{number}\t{name}\n" for number, name in enumerate(listed))
        (root / "classes.txt").write_text(text, encoding="utf-8")
    return content


def _write_classified(
    spec: DataSpec, root: Path, split: SplitName, pictures: list[Picture], targets: list[int], names: tuple[str, ...]
) -> None:
    """Pictures with a class each, as JPEGs in the order of their classes: the same ones in each of the formats."""
    files = [_jpeg(picture.pixels) for picture in pictures]
    if spec.format == "image_folder":
        folder = locate(spec, root, split)
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for index, (data, target) in enumerate(zip(files, targets, strict=True)):
            (folder / names[target] / f"{index:05d}.jpg").write_bytes(data)
    elif spec.format == "tar":
        with tarfile.open(_shard(spec, root, split), "w") as tar:
            for index, (data, target) in enumerate(zip(files, targets, strict=True)):
                _add(tar, f"{index:05d}.jpg", data)
                _add(tar, f"{index:05d}.cls", b"%d" % target)
    else:
        _write_rows(spec, root / "data" / f"{getattr(spec, split)}-00000-of-00001.parquet", files, targets, names)


def _jpeg(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def _shard(spec: DataSpec, root: Path, split: SplitName) -> Path:
    """A file that the split's pattern matches; its folder is made."""
    pattern: str = getattr(spec, split)
    shard = inside(root, re.sub(r"\*+|\?", "0", pattern), f"the task recipe's [data] {split}")
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.touch()
    if shard not in tars.matching(root, pattern):
        raise UserError(f"--smoke finds no name that {split} = {pattern!r} matches; write it with * and ? alone")
    return shard


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _write_rows(spec: DataSpec, file: Path, pictures: list[bytes], targets: list[int], names: tuple[str, ...]) -> None:
    """Parquet in the layout that the Hub and the ``datasets`` package take for a split."""
    huggingface.require(spec.repository)
    import datasets

    columns: dict[str, list[Any]] = {spec.image_column: [{"bytes": data, "path": None} for data in pictures]}
    features: dict[str, Any] = {spec.image_column: datasets.Image()}
    if spec.label_column:
        columns[spec.label_column] = list(targets)
        features[spec.label_column] = datasets.ClassLabel(names=list(names))
    file.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(file)


def _relabelled(picture: Picture, classes: int) -> Picture:
    """The same shapes with labels spread over ``classes``."""
    shapes = [Shape(s.label * classes // len(CLASSES), s.polygons, s.mask, s.crowd) for s in picture.shapes]
    return Picture(picture.pixels, tuple(shapes))


def _spread_labels(picture: Picture, classes: int, first: int) -> Pixels:
    """Label picture whose background is 0 and whose shapes take labels spread over ``first .. first + classes - 1``."""
    table = [0, *(first + label * classes // len(CLASSES) for label in range(len(CLASSES)))]
    return np.asarray(table, np.uint8)[picture.labels()]
