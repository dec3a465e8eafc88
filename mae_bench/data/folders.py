"""Class folders (ImageNet's layout): ``<split>/<class>/<picture>``; classes are numbered in sorted order of names.

Only the directory tree is read, so that opening ImageNet takes seconds.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mae_bench.data.dataset import SPLITS, Contents, Split, SplitName, fingerprint, locate, missing
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
VAL_HINT = "sort its pictures into class folders first (for ImageNet: the `valprep.sh` script, or the devkit's labels)"


def is_picture(name: str) -> bool:
    """By suffix, hidden files excepted (macOS leaves ``._name.jpg`` behind)."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in PICTURES  # a million calls  # noqa: PTH122


def scan(folder: Path, prefix: str) -> tuple[list[tuple[str, int]], list[str]]:
    """((prefix/name, bytes) of the pictures, names of the subfolders) directly in a folder, both sorted."""
    files: list[tuple[str, int]] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif is_picture(entry.name):
                    if not stat.S_ISREG(entry.stat().st_mode):
                        raise UserError(f"{entry.path} is no regular file; remove it")
                    files.append((f"{prefix}/{entry.name}", entry.stat().st_size))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror} (a broken link?)") from error
    return sorted(files), sorted(folders)


def read(spec: DataSpec, root: Path, *, allow_empty: bool = False) -> Contents:
    """Check the layout and list the pictures. ``allow_empty`` admits class folders without pictures (smoke data)."""
    folders = {split: locate(spec, root, split) for split in SPLITS}
    for folder in folders.values():
        if not folder.is_dir():
            raise missing(spec, root, folder)
    names = {split: _classes(folder) for split, folder in folders.items()}
    _same_classes(names["train"], names["val"], folders)
    classes = tuple(names["train"])
    if spec.classes and len(classes) != spec.classes:
        raise UserError(
            f"{folders['train']} has {len(classes)} class folders, the task recipe expects {spec.classes}; "
            "complete the folder, or copy the recipe and set its classes"
        )
    files: list[tuple[str, int]] = []
    splits: dict[SplitName, Split] = {}
    for split, folder in folders.items():
        images: list[str] = []
        targets: list[int] = []
        for target, name in enumerate(classes):
            found = _pictures(folder / name, f"{getattr(spec, split)}/{name}", allow_empty)
            files += found
            images += [path for path, _ in found]
            targets += [target] * len(found)
        splits[split] = Split(tuple(images), tuple(targets))
    return Contents(classes, splits, fingerprint(files, classes))


def _classes(folder: Path) -> list[str]:
    files, folders = scan(folder, folder.name)
    if files and not folders:
        raise UserError(f"{folder} is flat: {len(files)} pictures and no class folders; {VAL_HINT}")
    if files:
        raise UserError(
            f"{folder} has pictures beside its class folders ({files[0][0]}); move them into a class folder"
        )
    if not folders:
        raise UserError(f"{folder} has no class folders; expected {folder}/<class>/<picture>")
    return folders


def _same_classes(train: list[str], val: list[str], folders: dict[SplitName, Path]) -> None:
    for here, there, name in (
        (folders["train"], folders["val"], sorted(set(train) - set(val))),
        (folders["val"], folders["train"], sorted(set(val) - set(train))),
    ):
        if name:
            raise UserError(
                f"class folder '{name[0]}' is in {here} but not in {there} ({len(name)} such, "
                f"{len(train)} classes in train, {len(val)} in val); both need the same"
            )


def _pictures(folder: Path, prefix: str, allow_empty: bool) -> list[tuple[str, int]]:
    files, folders = scan(folder, prefix)
    if folders:
        raise UserError(f"{folder} holds folders ('{folders[0]}'); pictures must lie directly in their class folder")
    if not files and not allow_empty:
        raise UserError(f"class folder {folder} has no pictures ({', '.join(sorted(PICTURES))}); fill or remove it")
    return files
