"""Sources of pictures: files, and tar shards read in place."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from mae_bench import places
from mae_bench.data import tars
from mae_bench.data.decode import inspect, read_picture
from mae_bench.data.sources import NO_LABEL, Files, Source
from mae_bench.data.tars import Tars, find_shards
from mae_bench.errors import UserError


def jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), (shade, 40, 90)).save(buffer, "JPEG")
    return buffer.getvalue()


def pack(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(first: int, count: int) -> list[tuple[str, bytes]]:
    """Members in webdataset's layout; every third sample has no class, every second one a caption."""
    members = []
    for number in range(first, first + count):
        members.append((f"./photos.v1/{number:06d}.JPEG", jpeg(number)))
        if number % 2:
            members.append((f"./photos.v1/{number:06d}.txt", b"a caption"))
        if number % 3:
            members.append((f"./photos.v1/{number:06d}.cls", b"%d\n" % (number + 5)))
    return members


@pytest.fixture(autouse=True)
def _own_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_BENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    (tmp_path / "train").mkdir()
    pack(tmp_path / "train/b.tar", samples(4, 5))
    pack(tmp_path / "train/a.tar", samples(0, 4))
    return find_shards(tmp_path, "train/*.tar")


def test_files(tmp_path: Path) -> None:
    paths = [tmp_path / "é.jpg", tmp_path / "longer name.jpg"]
    for shade, path in enumerate(paths):
        path.write_bytes(jpeg(shade))
    source: Source = Files(paths, [3, 1])
    assert len(source) == 2
    assert [source.read(index) for index in range(2)] == [jpeg(0), jpeg(1)]
    assert [source.name(index) for index in range(2)] == [str(path) for path in paths]
    assert source.labels.tolist() == [3, 1]
    assert Files(paths).labels.tolist() == [NO_LABEL] * 2
    with pytest.raises(IndexError):
        source.read(2)
    paths[0].unlink()
    with pytest.raises(UserError, match=r"é\.jpg: No such file"):
        source.read(0)


def test_tars_read_what_was_packed(shards: list[Path]) -> None:
    source: Source = Tars(shards)
    assert len(source) == 9
    for index in (8, 0, 4, 3, 7, 1, 2, 6, 5):  # any order
        assert source.read(index) == jpeg(index)
        assert source.labels[index] == (index + 5 if index % 3 else NO_LABEL)
        assert source.name(index) == f"{shards[index > 3]}/./photos.v1/{index:06d}.JPEG"
    for index in (9, -10):
        with pytest.raises(IndexError):
            source.read(index)


class Shades:
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> int:
        return int(read_picture(inspect(self.source.read(index), self.source.name(index)))[1, 0, 0]) + index


def test_workers_read_the_same(shards: list[Path]) -> None:
    data: Any = Shades(pickle.loads(pickle.dumps(Tars(shards))))  # noqa: S301
    assert [int(batch) for batch in DataLoader(data, num_workers=2)] == [data[index] for index in range(9)]


def test_nothing_is_kept_that_python_counts_references_of(shards: list[Path]) -> None:
    """Lists of a million objects are copied into every forked worker as their counts change."""
    held = [value for name, value in vars(Tars(shards)).items() if name != "_shards"]
    assert all(isinstance(value, np.ndarray) and value.dtype != object for value in held)


def test_an_index_is_made_once(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [Tars(shards).name(index) for index in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr(tars, "make_index", None)  # a call would be an error
        again = Tars(shards)
    assert [again.name(index) for index in range(9)] == names
    assert again.labels.tolist() == [NO_LABEL, 6, 7, NO_LABEL, 9, 10, NO_LABEL, 12, 13]


def test_an_index_follows_its_shard(shards: list[Path]) -> None:
    before = Tars(shards)
    pack(shards[0], samples(100, 2))
    with pytest.raises(UserError, match=r"a\.tar has changed since the run began"):
        before.read(0)
    after = Tars(shards)
    assert len(after) == 7
    assert after.read(0) == jpeg(100)
    shards[0].unlink()
    with pytest.raises(UserError, match=r"a\.tar: No such file"):
        after.read(0)
    with pytest.raises(UserError, match=r"a\.tar: No such file"):
        Tars(shards)


@pytest.mark.parametrize(
    "damage", ["empty", "text", "half", "pickle", "beyond the shard", "other lengths", "version", "labels"]
)
def test_a_damaged_index_is_made_again(shards: list[Path], damage: str) -> None:
    Tars(shards)
    for file in (places.cache() / "tars").iterdir():
        data = file.read_bytes()
        arrays = dict(np.load(file))
        if damage == "empty":
            file.write_bytes(b"")
        elif damage == "text":
            file.write_bytes(b"an index")
        elif damage == "half":
            file.write_bytes(data[: len(data) // 2])
        elif damage == "pickle":
            np.savez(file, **(arrays | {"names": np.array([{}] * len(arrays["names"]))}))
        elif damage == "beyond the shard":
            np.savez(file, **(arrays | {"offsets": arrays["offsets"] + (1 << 40)}))
        elif damage == "other lengths":
            np.savez(file, **(arrays | {"labels": arrays["labels"][1:]}))
        elif damage == "labels":
            np.savez(file, **(arrays | {"labels": arrays["labels"] - 100}))
        else:
            np.savez(
                file,
                **(arrays | {"stamp": arrays["stamp"] + np.array([1, 0, 0, 0, 0]), "labels": arrays["labels"] + 1}),
            )
    source = Tars(shards)
    assert [source.read(index) for index in range(9)] == [jpeg(index) for index in range(9)]
    assert source.labels[1] == 6


def test_a_cache_that_cannot_be_written_costs_time_only(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (shards[0].parent / "file").write_text("")
    monkeypatch.setenv("MAE_BENCH_CACHE", str(shards[0].parent / "file"))
    assert len(Tars(shards)) == 9


def link(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    return path


def joined(path: Path) -> Path:
    once = pack(path, samples(0, 2)).read_bytes()
    path.write_bytes(once + once)
    return path


def cut(path: Path, keep: float) -> Path:
    data = pack(path, samples(0, 4)).read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def without_end(path: Path) -> Path:
    data = pack(path, [("a.jpg", jpeg(0))]).read_bytes()
    path.write_bytes(data[: 512 + -(-len(jpeg(0)) // 512) * 512])
    return path


def header_damaged(path: Path) -> Path:
    data = bytearray(pack(path, samples(0, 4)).read_bytes())
    at = data.index(b"./photos.v1/000002.JPEG")
    data[at + 150] ^= 1  # its checksum: tarfile takes the header for the end
    path.write_bytes(bytes(data))
    return path


def compressed(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    return path


def header(name: str, kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def headers(path: Path, *blocks: bytes) -> Path:
    path.write_bytes(b"".join(blocks) + bytes(2 * 512))
    return path


def backwards(path: Path) -> Path:
    """Its one member ends where it began: tarfile would return it for ever."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {"size": "-1536"}
        tar.addfile(info)
    return path


def nested(path: Path) -> Path:
    """A long name of a long name of …, each of which tarfile reads inside the one before."""
    return headers(path, *[header("././@LongLink", tarfile.GNUTYPE_LONGNAME, 0)] * 1500)


def cut_in_a_map(path: Path) -> Path:
    """A sparse file whose map goes on behind the end of the shard."""
    block = bytearray(header("a.jpg", tarfile.GNUTYPE_SPARSE, 0))
    block[482] = 1
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(bytes(block))
    return path


FAULTS = {
    "going back": (backwards, "'a.txt' claims -1536 bytes"),
    "nested": (nested, "no uncompressed tar file, or damaged"),
    "a map cut off": (cut_in_a_map, "no uncompressed tar file, or damaged"),
    "a name of any size": (
        lambda path: headers(path, header("././@LongLink", tarfile.GNUTYPE_LONGNAME, 1 << 20), bytes(1 << 20)),
        "a header claims 1048576 bytes",
    ),
    "a name of no size": (
        lambda path: headers(path, header("././@LongLink", tarfile.GNUTYPE_LONGNAME, -512)),
        "a header claims -512 bytes",
    ),
    "a pipe": (lambda path: os.mkfifo(path) or path, "is no regular file"),
    "two classes": (
        lambda path: pack(path, [("a.jpg", b"1"), ("a.cls", b"1"), ("a.cls", b"1")]),
        r"'a' has two classes \('a\.cls'\)",
    ),
    "no samples": (lambda path: pack(path, [("README", b"text")]), "holds no samples"),
    "empty": (lambda path: pack(path, []), "holds no samples"),
    "no tar": (lambda path: path.write_bytes(b"text" * 500) and path, "no uncompressed tar file"),
    "nothing": (lambda path: path.write_bytes(b"") or path, "no uncompressed tar file"),
    "compressed": (compressed, "no uncompressed tar file"),
    "two pictures": (lambda path: pack(path, [("a.jpg", b"1"), ("a.png", b"2")]), "'a' has two pictures"),
    "no picture": (lambda path: pack(path, [("a.jpg", b"1"), ("b.cls", b"2")]), "'b' has no picture"),
    "an empty picture": (lambda path: pack(path, [("a.jpg", b"")]), "'a.jpg' has 0 bytes"),
    "a word for a class": (lambda path: pack(path, [("a.jpg", b"1"), ("a.cls", b"cat")]), "holds b'cat'"),
    "a negative class": (lambda path: pack(path, [("a.jpg", b"1"), ("a.cls", b"-1")]), "holds b'-1'"),
    "a huge class": (lambda path: pack(path, [("a.jpg", b"1"), ("a.cls", b"9" * 5000)]), "holds b'999"),
    "the same twice": (lambda path: pack(path, [("a.jpg", b"1"), ("b.jpg", b"1"), ("a.jpg", b"1")]), "'a.jpg' twice"),
    "a link": (link, "'a.jpg' is a link"),
    "a name of lines": (lambda path: pack(path, [("a\n.jpg", b"1")]), r"'a\\n.jpg' is not printable"),
    "a long name": (lambda path: pack(path, [("a" * 300 + ".jpg", b"1")]), "longer than 255 bytes"),
    "joined": (joined, "goes on behind its end"),
    "cut in a picture": (lambda path: cut(path, 0.13), "no uncompressed tar file, or damaged"),
    "cut between": (without_end, "is cut off"),
    "a damaged header": (header_damaged, "goes on behind its end or a damaged header"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_shards_are_named(tmp_path: Path, fault: str) -> None:
    make, message = FAULTS[fault]
    with pytest.raises(UserError, match=message) as caught:
        Tars([make(tmp_path / "shard.tar")])
    assert "shard.tar" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_in_every_tar_format(tmp_path: Path, form: int) -> None:
    """Long names and letters beyond ASCII can take headers of their own."""
    name = f"{'x' * 60}/{'é' * 40}.jpg"
    source = Tars([pack(tmp_path / "a.tar", [(name, jpeg(1)), ("._hidden.jpg", b"of macOS")], format=form)])
    assert source.name(0) == f"{tmp_path / 'a.tar'}/{name}"
    assert source.read(0) == jpeg(1)
    assert len(source) == 1


@given(at=st.integers(0, 6000), noise=st.binary(min_size=1, max_size=30))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_never_escapes_as_another_error(tmp_path: Path, at: int, noise: bytes) -> None:
    data = bytearray(pack(tmp_path / "a.tar", samples(0, 4)).read_bytes())
    data[at : at + len(noise)] = noise
    (tmp_path / "a.tar").write_bytes(bytes(data))
    with contextlib.suppress(UserError):
        source = Tars([tmp_path / "a.tar"])
        assert all(source.read(index) for index in range(len(source)))


def test_names_are_compared_once() -> None:
    class Name(bytes):
        compared = 0
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return bytes.__eq__(self, other)

    names = [Name(b"%d" % number) for number in [*range(1000), 999]]
    with pytest.raises(UserError, match="'999' twice"):
        tars._refuse_repeats(Path("a.tar"), names)
    assert Name.compared < len(names)


@pytest.mark.parametrize("pattern", ["", ".", "./", "**.tar", "train/**.tar", "val/*.tar", "/etc/*.tar", "../*.tar"])
def test_shards_that_are_not_there(shards: list[Path], pattern: str) -> None:
    with pytest.raises(UserError, match="shards"):
        find_shards(shards[0].parent.parent, pattern)
    with pytest.raises(UserError, match="no tar shards"):
        Tars([])
