"""A real HTTP server on this machine whose faults are stated: what it answers, where it breaks off or stalls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ETAG = '"first"'


@dataclass(frozen=True)
class Answer:
    """One answer. The defaults are an honest server that knows ranges."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)  # beside, or in place of, the server's own; "" = not sent
    etag: str = ETAG
    ranges: bool = True
    send: int | None = None  # bytes of the body after which the connection ends
    hold: threading.Event | None = None  # where it ends, wait for this first


class Server(ThreadingHTTPServer):
    """Answers each path with its list of answers in turn; the last one is repeated."""

    daemon_threads = True

    def __init__(self, paths: dict[str, list[Answer]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths = paths
        self.asked: list[tuple[str, dict[str, str]]] = []  # path and headers of every request
        self.sent = threading.Event()  # what an answer sends has left

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def header(self, name: str) -> list[str | None]:
        """One header of every request."""
        return [headers.get(name) for _, headers in self.asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked.append((self.path, dict(self.headers)))
        answers = self.server.paths.get(self.path, [Answer(status=404)])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        status, start = answer.status, 0
        headers = {"Content-Type": "application/octet-stream", "ETag": answer.etag}
        same = self.headers.get("If-Range") in (None, answer.etag)
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
def serve(*answers: Answer, **more: list[Answer]) -> Iterator[Server]:
    """A server with ``answers`` at ``/file``; ``more`` are other paths, without the slash."""
    paths = {f"/{name}": list(listed) for name, listed in more.items()}
    with Server({"/file": list(answers), **paths}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
