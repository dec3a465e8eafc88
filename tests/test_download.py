"""Downloads from a real server on this machine that breaks off, stalls, lies, and changes its file."""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fetch_toys import BODY, ETAG, OTHER, SHA, Answer, machine, refused, serve, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from mae_bench import download
from mae_bench.errors import UserError
from mae_bench.fetch import fetch

GOOD = Answer(BODY)


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return machine(tmp_path, monkeypatch)


def test_a_broken_connection_goes_on_where_it_stopped(weights: Path) -> None:
    broken = Answer(BODY, send=50_000)
    with serve(broken, broken, Answer(status=503), GOOD) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("Range") == [None, "bytes=50000-", "bytes=100000-", "bytes=100000-"]
    assert server.header("If-Range") == [None, ETAG, ETAG, ETAG]


def test_after_the_last_retry_the_same_command_goes_on(weights: Path) -> None:
    with serve(*[Answer(BODY, send=10_000)] * 6, GOOD) as server:
        message = refused(toy(weights, server))
        assert f"60000 of 200000 bytes are at {weights / 'toy.pth.part'}, the same command goes on" in message
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("Range")[-1] == "bytes=60000-"
    assert len(server.asked) == 7


def test_a_stall_counts_as_broken(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STALL", 0.2)
    end = threading.Event()
    with serve(Answer(BODY, send=70_000, hold=end), GOOD) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
        end.set()
    assert server.header("Range") == [None, "bytes=70000-"]


@pytest.mark.parametrize(
    ("second", "ranges"),
    [
        pytest.param(Answer(BODY, ranges=False), [None, "bytes=99-"], id="knows no ranges"),
        pytest.param(Answer(BODY, etag='"new"'), [None, "bytes=99-"], id="changed"),
        pytest.param(Answer(BODY, etag='"new"', if_range=False), [None, "bytes=99-", None], id="changed, unsaid"),
        pytest.param(
            Answer(BODY, headers={"Content-Range": "bytes 98-199999/200000"}),
            [None, "bytes=99-", None],
            id="other start",
        ),
        pytest.param(
            Answer(BODY, headers={"Content-Range": "bytes 99-199999/200001"}),
            [None, "bytes=99-", None],
            id="other size",
        ),
        pytest.param(Answer(BODY[:5], if_range=False), [None, "bytes=99-", None], id="416"),
    ],
)
def test_where_the_server_cannot_go_on_it_starts_anew(weights: Path, second: Answer, ranges: list[str | None]) -> None:
    with serve(Answer(OTHER, send=99), second, Answer(BODY, etag='"new"')) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("Range") == ranges


def test_no_more_is_taken_than_the_file_has(weights: Path) -> None:
    longer = Answer(BODY + b"more", headers={"Content-Range": "bytes 99-199999/200000"})
    with serve(Answer(BODY, send=99), longer) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY


def test_a_server_without_a_strong_etag_is_asked_by_date_or_not_at_all(weights: Path) -> None:
    dated = {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
    weak = Answer(BODY, send=99, etag='W/"weak"', headers=dated)
    with serve(weak, Answer(BODY, etag='W/"weak"', headers=dated)) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("If-Range") == [None, dated["Last-Modified"]]
    with serve(*[Answer(BODY, etag="", send=99)] * 6, Answer(BODY, etag="")) as server:
        backbone = toy(weights, server, file="second.pth")
        assert "nothing of use is at" in refused(backbone)
        assert fetch(backbone, quiet=True).read_bytes() == BODY
    assert server.header("Range") == [None] * 7


@pytest.mark.parametrize(
    "state", ["", "[]", "{}", '{"url": 3}', '{"url": "URL", "size": 200000, "validator": "a\\nb"}']
)
def test_a_part_of_unknown_origin_is_no_beginning(weights: Path, state: str) -> None:
    weights.mkdir()
    (weights / "toy.pth.part").write_bytes(OTHER[:99])
    with serve(GOOD) as server:
        (weights / "toy.pth.part.json").write_text(state.replace("URL", f"{server.url}/file"))
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("Range") == [None]


def test_a_part_of_another_address_is_no_beginning(weights: Path) -> None:
    with serve(*[Answer(OTHER, send=9999)] * 6, moved=[GOOD]) as server:
        refused(toy(weights, server))
        assert fetch(toy(weights, f"{server.url}/moved"), quiet=True).read_bytes() == BODY
    assert server.header("Range")[-1] is None


def test_a_whole_part_needs_no_server(weights: Path) -> None:
    """A process that ended between the last byte and the hash."""
    with serve(*[Answer(BODY, send=99)] * 6) as server:
        refused(toy(weights, server))
    (weights / "toy.pth.part").write_bytes(BODY)
    assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert len(server.asked) == 6


VERSIONS = {'"a"': BODY[:5000], '"b"': OTHER[:5000]}
ANSWERS = st.builds(
    lambda etag, **rest: Answer(VERSIONS[etag], etag=etag, **rest),
    etag=st.sampled_from(list(VERSIONS)),
    status=st.sampled_from([200, 200, 200, 503]),
    ranges=st.booleans(),
    if_range=st.booleans(),
    send=st.none() | st.integers(0, 5000),
    headers=st.sampled_from([{}, {}, {"Content-Range": "bytes 0-4999/5000"}, {"Content-Length": "4000"}]),
)


@settings(max_examples=60)
@given(st.lists(ANSWERS, min_size=1, max_size=8))
def test_whatever_a_server_does_no_mixture_of_two_versions_arrives(answers: list[Answer]) -> None:
    """Without a hash to save the day: the file is one version from its start, or there is none."""
    with serve(*answers) as server, tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "file.part"
        try:
            download.Download(f"{server.url}/file", "", part, "", lambda have, size: None).run()
        except UserError:
            return
        content = part.read_bytes()
        assert len(content) in (4000, 5000) and any(body.startswith(content) for body in VERSIONS.values())


# What is no weight file, and servers that say so


SAFETENSORS = (60).to_bytes(8, "little") + b"{" + BODY  # its first byte is "<"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(b"Please log in", headers={"Content-Type": "text/html; charset=utf-8"}), "a web page"),
        (Answer(b"\xef\xbb\xbf\n <html><body>"), "a web page"),
        (Answer(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "a Git LFS pointer"),
        (
            Answer(OTHER),
            f"sha256 is {hashlib.sha256(OTHER).hexdigest()}, the recipe means {SHA}; the download is deleted",
        ),
        (Answer(BODY, headers={"Content-Length": "150000"}), f"the recipe means {SHA}"),
        (Answer(BODY, headers={"Content-Length": ""}), "without its size"),
        (Answer(b""), "without its size"),
        (Answer(BODY, headers={"Content-Encoding": "gzip"}), "packed ('gzip')"),
        (Answer(status=404), "404 (Not Found); correct url of the backbone recipe, or put the file at"),
        (Answer(status=403), "403 (Forbidden): it has moved, or is not open to everyone"),
        (Answer(status=999), "999 (unknown); correct url"),
        (Answer(status=302), "302 (Found); correct url"),
        (Answer(status=204), "204 (No Content); correct url"),
        (
            Answer(status=302, headers={"Location": "file:///etc/passwd"}),
            "redirects to 'file:///etc/passwd', which is no",
        ),
        (Answer(status=302, headers={"Location": "http://[x"}), "redirects to 'http://[x', which is no address"),
        (
            Answer(status=302, headers={"Location": "ftp://example.org/m"}),
            "redirects to 'ftp://example.org/m': what does",
        ),
        (
            Answer(status=302, headers={"Location": "http://example.org/m"}),
            "'http://example.org/m': what does not come",
        ),
        (Answer(status=302, headers={"Location": "https://u@example.org/m"}), "which is no address to fetch from"),
    ],
)
def test_anything_else_is_refused_and_nothing_kept(weights: Path, answer: Answer, expected: str) -> None:
    with serve(answer) as server:
        assert expected in refused(toy(weights, server))
    assert [path.name for path in weights.iterdir()] == ["toy.pth.lock"]


def test_what_comes_in_small_pieces_is_known_too(weights: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    with serve(Answer(pointer, send=8), Answer(pointer)) as server:
        assert "a Git LFS pointer" in refused(toy(weights, server))


def test_a_safetensors_file_may_start_like_a_page(weights: Path) -> None:
    with serve(Answer(SAFETENSORS)) as server:
        path = fetch(toy(weights, server, sha256=hashlib.sha256(SAFETENSORS).hexdigest()), quiet=True)
    assert path.read_bytes()[:1] == b"<"


def test_a_page_in_between_does_not_cost_the_part(weights: Path) -> None:
    """The login page of a network, say."""
    page = Answer(b"<html>", headers={"Content-Type": "text/html"}, ranges=False)
    with serve(Answer(BODY, send=99), page, Answer(b"<html>", ranges=False), GOOD) as server:
        for _ in range(2):
            assert "a web page" in refused(toy(weights, server))
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY
    assert server.header("Range") == [None, "bytes=99-", "bytes=99-", "bytes=99-"]


@pytest.mark.parametrize("length", ["250000", "9" * 30])
def test_a_length_that_never_comes(weights: Path, length: str) -> None:
    """More is stated than is sent, each time; or more than any disk holds."""
    with serve(Answer(BODY, headers={"Content-Length": length}, ranges=False)) as server:
        message = refused(toy(weights, server))
    assert "200000 of 250000 bytes are at" in message or "has room for" in message
    assert not (weights / "toy.pth").exists()


def test_a_server_that_stays_busy_is_named(weights: Path) -> None:
    with serve(Answer(status=503)) as server:
        assert "6 connections failed" in (message := refused(toy(weights, server)))
    assert "503 (Service Unavailable)" in message and "nothing of use is at" in message
    assert len(server.asked) == 6


def test_redirects_are_followed_without_reading_what_they_carry(weights: Path) -> None:
    """Five of them, each with a body that never ends."""
    end = threading.Event()
    pages = {
        f"r{n}": [Answer(b"x" * 999, status=302, send=9, hold=end, headers={"Location": f"/r{n + 1}"})]
        for n in range(5)
    }
    with serve(r5=[Answer(BODY, send=99), GOOD], **pages) as server:
        started = time.monotonic()
        path = fetch(toy(weights, f"{server.url}/r0"), quiet=True)
        assert time.monotonic() - started < 5
        end.set()
    assert path.read_bytes() == BODY
    assert server.header("Range") == [None] * 6 + ["bytes=99-"] * 6
    with serve(Answer(status=302, headers={"Location": "/file"})) as server:
        assert "redirects more than 5 times" in refused(toy(weights, server, file="second.pth"))
    assert len(server.asked) == 6


def test_redirects_that_are_not_ascii(weights: Path) -> None:
    location = "/a é".encode().decode("latin-1")  # the bytes are UTF-8
    with serve(Answer(status=308, headers={"Location": location}), **{"a%20%C3%A9": [GOOD]}) as server:
        assert fetch(toy(weights, server), quiet=True).read_bytes() == BODY


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_is_checked_and_never_left(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out cert -subj /CN=test"
    words += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with serve(GOOD) as plain, serve(GOOD, tls=context, away=[]) as safe:
        safe.paths["/away"] = [Answer(status=302, headers={"Location": f"{plain.url}/file"})]
        assert "certificate verify failed" in refused(toy(weights, safe))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
        assert fetch(toy(weights, safe), quiet=True).read_bytes() == BODY
        message = refused(toy(weights, f"{safe.url}/away", file="second.pth"))
    assert f"{safe.url}/away redirects to '{plain.url}/file': what does not come over https" in message
    assert not plain.asked
