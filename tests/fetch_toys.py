"""A real HTTP server on this machine whose faults are stated, a recipe that points to it, and what it serves."""

from __future__ import annotations

import hashlib
import json
import random
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mae_bench import download
from mae_bench.errors import UserError
from mae_bench.fetch import fetch
from mae_bench.recipes import load_backbone
from mae_bench.schema import Backbone

ROOT = Path(__file__).resolve().parent.parent
ETAG = '"first"'
BODY = random.Random(0).randbytes(200_000)
OTHER = random.Random(1).randbytes(200_000)  # of the same size: a mixture shows in nothing but its hash
SHA = hashlib.sha256(BODY).hexdigest()


@dataclass(frozen=True)
class Answer:
    """One answer. The defaults are an honest server that knows ranges."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)  # beside, or in place of, the server's own; "" = not sent
    etag: str = ETAG
    ranges: bool = True
    if_range: bool = True  # honours If-Range
    send: int | None = None  # bytes of the body after which the connection ends
    hold: threading.Event | None = None  # where it ends, wait for this first


class Server(ThreadingHTTPServer):
    """Answers each path with its list of answers in turn; the last one is repeated."""

    daemon_threads = True
    scheme = "http"

    def __init__(self, paths: dict[str, list[Answer]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths = paths
        self.asked: list[tuple[str, dict[str, str]]] = []  # path and headers of every request
        self.sent = threading.Event()  # what an answer sends has left

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def header(self, name: str) -> list[str | None]:
        """One header of every request."""
        return [headers.get(name) for _, headers in self.asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        answers = self.server.paths.get(self.path, [Answer(status=404)])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        status, start = answer.status, 0
        headers = {"Content-Type": "application/octet-stream", "ETag": answer.etag}
        known = (None, answer.etag, answer.headers.get("Last-Modified"))
        same = not answer.if_range or self.headers.get("If-Range") in known
        if answer.ranges and same and "Range" in self.headers and status == 200:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            status = 206 if start < len(answer.body) else 416
            headers["Content-Range"] = f"bytes {start}-{len(answer.body) - 1}/{len(answer.body)}"
        body = b"" if status == 416 else answer.body[start:]
        headers |= {"Content-Length": str(len(body))} | answer.headers
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(body[: answer.send])
            self.wfile.flush()
            self.server.sent.set()
            if answer.hold:
                answer.hold.wait(20)
                if answer.send is not None:
                    self.wfile.write(body[answer.send :])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the other side has had enough


@contextmanager
def serve(*answers: Answer, tls: ssl.SSLContext | None = None, **more: list[Answer]) -> Iterator[Server]:
    """A server with ``answers`` at ``/file``; ``more`` are other paths, without the slash."""
    paths = {f"/{name}": list(listed) for name, listed in more.items()}
    with Server({"/file": list(answers), **paths}) as server:
        if tls:
            server.scheme = "https"
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def machine(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A weights folder, an environment without proxies and tokens, and retries without waiting."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        patch.delenv(name, raising=False)
    patch.setenv("no_proxy", "*")
    patch.setenv("MAE_BENCH_WEIGHTS", str(folder / "weights"))
    patch.setattr(download, "BACKOFF", 1e-3)
    return folder / "weights"


def recipe(folder: Path, url: str, **changes: str) -> Path:
    """A recipe file like vit_b_mae's, with the toy's address and hash."""
    text = (ROOT / "backbones" / "mae" / "vit_b_mae.toml").read_text(encoding="utf-8")
    stated = {"name": "toy", "file": "toy.pth", "url": url, "sha256": SHA, "md5_prefix": ""} | changes
    text = re.sub(r"^(name|file|url|md5_prefix) = .*\n", "", text, flags=re.MULTILINE)
    text = f"name = {json.dumps(stated.pop('name'))}\n{text}"
    text = text.replace("[weights]\n", "[weights]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in stated.items()))
    folder.mkdir(exist_ok=True)
    (folder / "toy.toml").write_text(text, encoding="utf-8")
    return folder / "toy.toml"


def toy(weights: Path, server: Server | str, **changes: str) -> Backbone:
    url = server if isinstance(server, str) else f"{server.url}/file"
    return load_backbone(str(recipe(weights.parent / "recipe", url, **changes)))


def refused(backbone: Backbone) -> str:
    """The message of a fetch that must fail; it is one line."""
    with pytest.raises(UserError) as caught:
        fetch(backbone, quiet=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)
