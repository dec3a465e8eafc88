"""Copy records to where they are kept: a user's runs into the repository, or another machine's. Imports no torch.

Whoever made the files is not trusted: each record is validated, its names must be able to name a file, and a picture
beside it is taken along only if it is a whole PNG of bounded size. All records of a call are copied, or none.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mae_bench import places
from mae_bench.errors import UserError
from mae_bench.reporting import agreement
from mae_bench.reporting.files import write_whole
from mae_bench.reporting.record import Record, one_line, read_record, write_record
from mae_bench.reporting.store import digest, files_below, is_record, record_files

NAME = re.compile(r"\w[\w.+@=-]{0,200}")
SAMPLES = "samples.png"  # what a run leaves beside its record.json; beside a promoted <run_id>.json it is <run_id>.png
MAX_PICTURE_BYTES = 1 << 20
MAX_PICTURE_SIDE = 1 << 14
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


class Known(NamedTuple):
    """A record that is there, or is about to be."""

    run_id: str
    content: str  # `store.digest`
    file: Path


Contents = dict[object, Known]  # by each of what identifies a run, `_keys`


@dataclass
class Copied:
    """What `promote` and `import_records` did."""

    files: list[Path] = field(default_factory=list)  # the records written
    pictures: list[Path] = field(default_factory=list)
    identical: int = 0  # records that were there already
    notes: list[str] = field(default_factory=list)  # one line for each file that was left where it is


def promote(paths: Iterable[Path | str], into: Path) -> Copied:
    """Copy the records below ``paths`` to ``into/<task>/<backbone>/<run_id>.json``, with their pictures.

    Raises:
        UserError: a damaged record, one that contradicts itself (`agreement`), a smoke run, a name that cannot be a
            file's, a run that is there already (the same run, or the same task, protocol, backbone, given weights, seed
            and recipe), or a full disk. Nothing is then copied.
    """
    there, accepted = _contents(into), list[tuple[Record, Path]]()
    for file in record_files(paths):
        record = read_record(file)
        _accept(record, file, into, there)
        accepted.append((record, file))
    return _write_all(accepted, into, Copied())


def import_records(paths: Iterable[Path | str], into: Path) -> Copied:
    """`promote` for records from elsewhere, such as the results folder of another machine.

    Records that are in ``into`` already with the same content are counted and left out. No link is followed. Records of
    earlier schema versions are written as today's.

    Raises:
        UserError: as `promote`; a run id that is known with other content is refused by name.
    """
    there, accepted, copied = _contents(into), list[tuple[Record, Path]](), Copied()
    for file in _own_files(map(Path, paths), copied.notes):
        record = read_record(file)
        known = there.get(record.run_id)
        if known and known.content == digest(record):
            copied.identical += 1
        else:
            _accept(record, file, into, there)
            accepted.append((record, file))
    return _write_all(accepted, into, copied)


def results_folder(into: Path | None = None) -> Path:
    """``into`` as a folder below the checkout's ``results/``, by default ``results/runs``.

    Raises:
        UserError: there is no checkout, or the folder lies elsewhere.
    """
    root = places.checkout()
    if root is None:
        raise UserError("promote copies records into a checkout's results/; this is an installed wheel")
    folder = (into or root / "results" / "runs").resolve()
    if not folder.is_relative_to(root / "results") or folder == root / "results":
        raise UserError(f"--into {into}: give a folder below {root / 'results'}, e.g. --into results/suites/NAME")
    return folder


def _contents(folder: Path) -> Contents:
    files = record_files([folder]) if folder.is_dir() else ()
    records = ((read_record(file), file) for file in files)
    return {key: Known(record.run_id, digest(record), file) for record, file in records for key in _keys(record)}


def _keys(record: Record) -> tuple[object, ...]:
    """A run is there once: by its id, and as the one run of its cell, seed and recipe. Given weights are a cell."""
    given = record.weights.sha256 if record.eval_only or record.weights.kind == "given" else ""
    seed = None if record.eval_only else record.seed
    return record.run_id, (record.task, record.protocol, record.backbone, given, seed, record.recipe_hash)


def _accept(record: Record, file: Path, into: Path, there: Contents) -> None:
    """Refuse what must not be copied; else enter the run into ``there``."""
    run = f"run '{one_line(record.run_id, 100)}'"
    if record.smoke:
        raise UserError(f"{run} is a smoke run: it measures nothing and is not copied into {into}")
    for name in (record.task, record.backbone, record.run_id):
        if not NAME.fullmatch(name):
            raise UserError(f"{run}: '{one_line(name, 100)}' cannot name a file below {into}; rename the recipe")
    for fault in agreement.contradictions(record):
        raise UserError(one_line(f"{run} in {file}: {fault}; take the file as the run wrote it, or run again", 600))
    content = digest(record)
    for key in _keys(record):
        if key in there:
            known = there[key]
            other = "" if known.run_id == record.run_id else f" as '{one_line(known.run_id, 100)}'"
            how = "" if known.content == content else " with other content"
            raise UserError(f"{run} is there already{other}{how}, in {known.file}; remove one of the two first")
        there[key] = Known(record.run_id, content, file)


def _own_files(paths: Iterable[Path], notes: list[str]) -> Iterator[Path]:
    """Record files below ``paths`` that are no links, and what no link leads to."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a link; name what it leads to")
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise UserError(f"{path}: no such file or folder")
        for file in files_below(path):  # none below a file
            if file.is_symlink():
                notes.append(one_line(f"{file}: a link, not followed"))
            elif is_record(file):
                yield file


def _write_all(records: list[tuple[Record, Path]], into: Path, copied: Copied) -> Copied:
    try:
        with ExitStack() as undo:  # whatever interrupts, what this call wrote goes again
            for record, source in records:
                folder = into / record.task / record.backbone
                copied.files.append(write_record(record, folder, f"{record.run_id}.json"))
                undo.callback(_remove, copied.files[-1])
                picture = _picture(source, copied.notes)
                if picture:
                    copied.pictures.append(_write_picture(picture, folder / f"{record.run_id}.png"))
                    undo.callback(_remove, copied.pictures[-1])
            undo.pop_all()
    except UserError as error:
        raise UserError(f"{error}; nothing was copied") from error
    return copied


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot take back {path}: {error.strerror}; delete it before another try") from error


def _picture(record_file: Path, notes: list[str]) -> bytes:
    """The picture beside a record; empty where there is none, or none that can be trusted (which is noted)."""
    beside = record_file.with_name(SAMPLES) if record_file.name == "record.json" else record_file.with_suffix(".png")
    if not os.path.lexists(beside):
        return b""
    data, fault = read_picture(beside)
    if fault:
        notes.append(one_line(f"{beside}: {fault}, left where it is"))
    return b"" if fault else data


def read_picture(file: Path) -> tuple[bytes, str]:
    """Content of a picture, and why it cannot be taken; the reason is empty where it can."""
    if file.is_symlink() or not file.is_file():
        return b"", "no plain file"
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_PICTURE_BYTES + 1)
    except OSError as error:
        return b"", f"cannot be read ({error.strerror})"
    return data, png_fault(data)


def png_fault(data: bytes) -> str:
    """Why ``data`` is no whole PNG of bounded size (PNG specification, sections 5.2 to 5.4), or an empty string."""
    if len(data) > MAX_PICTURE_BYTES:
        return f"larger than {MAX_PICTURE_BYTES} bytes"
    if not data.startswith(PNG_HEAD):
        return "no PNG"
    place, end = len(PNG_HEAD), 0
    while place + 12 <= len(data):  # length, kind, content, checksum
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if end > len(data):
            break
        if zlib.crc32(data[place + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            return "a damaged PNG"
        if place == len(PNG_HEAD):
            if kind != b"IHDR" or length != 13:
                return "no PNG"
            if not all(0 < side <= MAX_PICTURE_SIDE for side in struct.unpack_from(">II", data, place + 8)):
                return f"not of 1 to {MAX_PICTURE_SIDE} pixels a side"
        if kind == b"IEND":
            return "" if end == len(data) else "a PNG with something behind its end"
        place = end
    return "a PNG that is cut off"


def _write_picture(data: bytes, target: Path) -> Path:
    try:
        written = write_whole(target, data, exclusive=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; free space") from error
    if not written:
        raise UserError(f"{target} is in the way, without a record; delete it")
    return target
