"""Tar shards in webdataset's layout, read by index: ``key.jpg`` beside ``key.cls``, nothing is extracted.

The members of a sample stand next to each other and share the name up to the first dot of its last part. A shard is
walked once for the offsets of its pictures; the index is kept in the cache under the shard's path, and used for as long
as its size, its times of change and its place on the disk stay the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mae_bench import places
from mae_bench.data.dataset import SPLITS, Contents, Split, fingerprint
from mae_bench.data.folders import PICTURES
from mae_bench.data.images import MAX_BYTES
from mae_bench.data.names import read_names
from mae_bench.data.sources import NO_LABEL, class_names
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

VERSION = 2  # of the index in the cache
MAX_NAME = 255  # bytes of a member's name; every name takes the room of the longest
MAX_LABEL_BYTES = 20
MAX_HEADER_BYTES = 1 << 16  # of a long name, or of a member's extended attributes
KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # key and suffix, as webdataset splits them
BLOCK = 1 << 20


@dataclass(frozen=True)
class Index:
    """The pictures of one shard, in its order."""

    # Of the shard: version of the index, bytes, times of change of content and of status in nanoseconds, inode. Copying
    # tools set the first time to what it was before a shard was relabelled, and no label need change the bytes.
    stamp: NDArray[np.int64]
    offsets: NDArray[np.int64]  # of the pictures' bytes, from the start of the shard
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]  # or NO_LABEL
    names: NDArray[np.bytes_]

    def valid(self) -> bool:
        """Whether arrays that were read from a file are an index of a shard of that size."""
        numbers = (self.stamp, self.offsets, self.sizes, self.labels)
        return (
            all(array.dtype == np.int64 and array.ndim == 1 for array in numbers)
            and (self.names.dtype.kind, self.names.ndim) == ("S", 1)
            and len(self.stamp) == 5
            and len({len(self.offsets), len(self.sizes), len(self.labels), len(self.names)}) == 1
            and bool(np.all(self.labels >= NO_LABEL))
            and bool(np.all((self.sizes > 0) & (self.sizes <= MAX_BYTES) & (self.offsets > 0)))
            and bool(np.all(self.offsets + self.sizes <= self.stamp[1]))
        )


class Tars:
    """The pictures of tar shards, one after the other (a ``Source``)."""

    def __init__(self, shards: Sequence[Path]) -> None:
        indices = [open_index(shard) for shard in shards]
        if not indices:
            raise UserError("no tar shards were given; name at least one")
        self._shards = [os.fspath(shard) for shard in shards]
        self._stamps = np.stack([index.stamp[1:4] for index in indices])  # some network file systems renumber inodes
        self._starts = np.cumsum([0, *(len(index.offsets) for index in indices)])
        self._offsets, self._sizes, self.labels, self._names = (
            np.concatenate([getattr(index, kind) for index in indices])
            for kind in ("offsets", "sizes", "labels", "names")
        )

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> bytes:
        shard, index = self._locate(index)
        path, size = self._shards[shard], int(self._sizes[index])
        try:
            with open(path, "rb", buffering=0) as file:  # once a picture  # noqa: PTH123
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns, status.st_ctime_ns) != tuple(self._stamps[shard]):
                    raise UserError(f"{path} has changed since the run began; start it again with the shard at rest")
                file.seek(int(self._offsets[index]))
                data = file.read(size)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if len(data) != size:
            raise UserError(f"cannot read {self.name(index)}: {len(data)} bytes came instead of {size}; try again")
        return data

    def name(self, index: int) -> str:
        shard, index = self._locate(index)
        return f"{self._shards[shard]}/{os.fsdecode(self._names[index])}"

    def digest(self) -> str:
        """sha256 (hex) over name, bytes and class of the pictures, in order; how they are spread over shards is left
        out."""
        total = hashlib.sha256(np.stack([self._sizes, self.labels]).astype("<i8").tobytes())
        total.update(b"\0".join(self._names.tolist()))
        return total.hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        index = range(len(self))[index]
        return int(np.searchsorted(self._starts, index, "right")) - 1, index


def read(spec: DataSpec, root: Path) -> Contents:
    """Index the shards of both splits and check their classes. Names come from ``classes.txt`` in the root, if any."""
    shards = {split: find_shards(root, getattr(spec, split)) for split in SPLITS}
    if both := sorted(set(shards["train"]) & set(shards["val"])):
        raise UserError(f"{both[0]} is in both splits: {spec.train!r} and {spec.val!r} match it; make them differ")
    sources = {split: Tars(shards[split]) for split in SPLITS}
    file = root / "classes.txt"
    classes = class_names(spec.classes, read_names(file) if file.is_file() else (), sources.values(), str(file))
    splits = {split: Split(source=sources[split]) for split in SPLITS}
    return Contents(classes, splits, fingerprint((), classes, [sources[split].digest() for split in SPLITS]))


def find_shards(root: Path, pattern: str) -> list[Path]:
    """Shards below ``root`` by a glob pattern such as ``train/*.tar``, sorted by name."""
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise UserError(f"the shards {pattern!r} leave the data folder; give a pattern below {root} without '..'")
    found = matching(root, pattern)
    if not found:
        raise UserError(
            f"no tar shards: nothing below {root} matches {pattern!r}, expected such as train/*.tar; --data FOLDER "
            "names another place, and --smoke tries the run without data"
        )
    return found


def matching(root: Path, pattern: str) -> list[Path]:
    """What a glob pattern below ``root`` matches, sorted by name."""
    if not Path(pattern).parts:  # '' or '.', at which Path.glob fails
        return []
    try:
        return sorted(root.glob(pattern))
    except ValueError as error:  # such as a/**.tar
        raise UserError(f"{pattern!r:.80} is no pattern of shards ({error}); write such as train/*.tar") from error


def open_index(shard: Path) -> Index:
    """The shard's index: from the cache, or made and kept there (half a minute for a million pictures)."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"cannot read {shard}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{shard} is no regular file; expected an uncompressed tar file")
    stamp = np.array(
        [VERSION, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino & (1 << 63) - 1], dtype=np.int64
    )
    key = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    file = places.cache() / "tars" / f"{key}.npz"
    if (kept := _load(file)) is not None and np.array_equal(kept.stamp, stamp):
        return kept
    made = make_index(shard, stamp)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        _save(file, made)
    return made


def _load(file: Path) -> Index | None:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            index = Index(**{kind.name: arrays[kind.name] for kind in fields(Index)})
    except (OSError, ValueError, KeyError, EOFError, SyntaxError, BadZipFile):
        return None  # absent or damaged: it is made again
    return index if index.valid() else None


def _save(file: Path, index: Index) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{file.stem}.", suffix=".npz", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            arrays: dict[str, Any] = {kind.name: getattr(index, kind.name) for kind in fields(Index)}
            np.savez(out, **arrays)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class _Headers:
    """A shard as tarfile reads it: headers alone, so that no length that one claims brings a whole shard to memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self._file.read(size)


def make_index(shard: Path, stamp: NDArray[np.int64]) -> Index:
    """Walk a shard from the first to the last header. Anything but a sound tar of samples is a ``UserError``."""
    try:
        with shard.open("rb") as file:
            with tarfile.open(fileobj=_Headers(file), mode="r:") as tar:  # type: ignore[call-overload]
                rows = [_sample(shard, key, members, file) for key, members in groupby(_members(shard, tar), _key)]
                end = tar.offset
            _check_end(shard, file, end)
    except (OSError, tarfile.TarError, ValueError, EOFError, OverflowError, LookupError, RecursionError) as error:
        raise UserError(f"{shard} is no uncompressed tar file, or damaged: {error}; pack it again") from error
    if not rows:
        raise UserError(f"{shard} holds no samples; expected members such as 000001.jpg and 000001.cls")
    _refuse_repeats(shard, [row[3] for row in rows])
    offsets, sizes, labels = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
    return Index(stamp, offsets, sizes, labels, np.array([row[3] for row in rows], dtype=bytes))


Member = tuple[str, str, tarfile.TarInfo]  # key, suffix in lower case, header


def _members(shard: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep an object for every member
        if member.size < 0:  # tarfile would go back by it, and round for ever
            raise UserError(f"{shard}: {member.name!r:.80} claims {member.size} bytes; pack the shard again")
        split = KEY.fullmatch(member.name)
        if member.isdir() or split is None:
            continue
        if not member.isreg() or member.issparse():
            raise UserError(f"{shard}: {member.name!r:.80} is a link or no plain file; pack the files themselves")
        if not member.name.isprintable() or len(os.fsencode(member.name)) > MAX_NAME:
            raise UserError(f"{shard}: the name {member.name!r:.80} is not printable or longer than {MAX_NAME} bytes")
        yield split[1], split[2].lower(), member


def _key(member: Member) -> str:
    return member[0]


def _sample(shard: Path, key: str, members: Iterator[Member], file: BinaryIO) -> tuple[int, int, int, bytes]:
    """(offset, bytes, label, name) of the one picture among a sample's members."""
    picture: tarfile.TarInfo | None = None
    label: int | None = None
    for _, suffix, member in members:
        if f".{suffix}" in PICTURES:
            if picture is not None:
                raise UserError(f"{shard}: sample {key!r:.80} has two pictures; expected one a sample")
            if not 0 < member.size <= MAX_BYTES:
                raise UserError(f"{shard}: picture {member.name!r:.80} has {member.size} bytes; pack the shard again")
            picture = member
        elif suffix == "cls":
            if label is not None:
                raise UserError(f"{shard}: sample {key!r:.80} has two classes ({member.name!r:.80}); keep one .cls")
            file.seek(member.offset_data)
            label = _label(shard, member.name, file.read(min(member.size, MAX_LABEL_BYTES + 1)))
    if picture is None:
        raise UserError(f"{shard}: sample {key!r:.80} has no picture ({', '.join(sorted(PICTURES))}); remove it")
    return picture.offset_data, picture.size, NO_LABEL if label is None else label, os.fsencode(picture.name)


def _label(shard: Path, name: str, text: bytes) -> int:
    if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
        raise UserError(f"{shard}: {name!r:.80} holds {text!r:.40}; expected the number of the class, 0 or above")
    return int(text)


def _refuse_repeats(shard: Path, names: list[bytes]) -> None:
    seen: set[bytes] = set()
    for name in names:
        if name in seen:
            raise UserError(f"{shard} holds {os.fsdecode(name)!r:.80} twice; pack it again")
        seen.add(name)


def _check_end(shard: Path, file: BinaryIO, end: int) -> None:
    """A tar ends in empty blocks. tarfile takes any damaged header for the end, and never looks behind it."""
    file.seek(end)
    total = 0
    while block := file.read(BLOCK):
        if block.count(0) != len(block):
            raise UserError(
                f"{shard} goes on behind its end or a damaged header, at byte {end}; pack it again "
                "(tar files must not be joined by cat)"
            )
        total += len(block)
    if total < tarfile.BLOCKSIZE:
        raise UserError(f"{shard} is cut off: a tar file ends in empty blocks; copy or pack it again")
