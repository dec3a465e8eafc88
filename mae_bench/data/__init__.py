"""Data sets: class folders, tar shards, Hugging Face data sets, COCO and ADE20K layouts, checked when opened, and tiny
made sets in the same layouts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mae_bench import places
from mae_bench.data.dataset import CocoSplit, Contents, Dataset, SplitName
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

__all__ = ["CocoSplit", "Dataset", "SplitName", "open_dataset"]


def open_dataset(spec: DataSpec, root: Path | None = None, *, smoke: bool = False) -> Dataset:
    """Open and check the data set of a task recipe.

    ``root`` is the folder that ``spec``'s paths lie below. Without it, made data are generated into the cache once, and
    others are looked for at ``$MAE_BENCH_DATA/<spec.folder>``; data of the Hugging Face Hub lie in no folder, and take
    no ``root``. ``smoke`` ignores ``root`` and makes a handful of pictures in the same format. A missing or wrong
    layout is a ``UserError`` that names what was expected.
    """
    if smoke:
        return _open_made(spec, _smoke_root(spec), smoke=True)
    if root is None and spec.made:
        return _open_made(spec, _shapes_root(), smoke=False)
    if root is not None and spec.hub:
        raise UserError(
            f"--data {root}: the task's data are '{spec.repository}' of the Hugging Face Hub, and no folder is read; "
            'leave out --data, or write repository = "./FOLDER" in the recipe\'s [data] for a folder below it'
        )
    root = root if root is not None else places.data_root() / spec.folder
    return _dataset(spec, root, _read(spec, root), synthetic=False)


def _shapes_root() -> Path:
    from mae_bench.data import synthetic

    root = places.cache() / "data" / f"shapes-{synthetic.VERSION}"
    synthetic.make_shapes(root)
    return root


def _smoke_root(spec: DataSpec) -> Path:
    from mae_bench.data import synthetic

    layout = spec.model_dump_json(exclude={"folder", "made", "expected"})
    key = hashlib.sha256(layout.encode()).hexdigest()[:12]
    root = places.cache() / "data" / f"smoke-{synthetic.VERSION}-{key}"
    synthetic.make_smoke(spec, root)
    return root


def _open_made(spec: DataSpec, root: Path, *, smoke: bool) -> Dataset:
    from mae_bench.data import synthetic
    from mae_bench.data.dataset import fingerprint

    content = synthetic.check(root)
    found = _read(spec, root, smoke=smoke)
    parts = (spec.train, spec.val, spec.train_annotations, spec.val_annotations)
    made = Contents(found.classes, found.splits, fingerprint((), found.classes, (content, *parts)))
    return _dataset(spec, root, made, synthetic=smoke)


def _read(spec: DataSpec, root: Path, *, smoke: bool = False) -> Contents:
    from mae_bench.data import ade20k, coco, folders, huggingface, tars

    if spec.format == "image_folder":
        return folders.read(spec, root, allow_empty=smoke)
    if spec.format == "hf":
        return huggingface.read(spec, root, smoke=smoke)
    return {"tar": tars.read, "coco": coco.read, "ade20k": ade20k.read}[spec.format](spec, root)


def _dataset(spec: DataSpec, root: Path, found: Contents, *, synthetic: bool) -> Dataset:
    counts = {str(split): found.splits[split].count for split in found.splits}
    matches = not synthetic and all(counts[split] == number for split, number in spec.expected.items())
    return Dataset(spec, root, found.classes, counts, found.fingerprint, synthetic, matches, found.splits)
