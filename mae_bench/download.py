"""Bring one file of a server to one place on disk, in as many connections as it takes.

The bytes so far are ``part``; ``<part>.json`` beside it says what they belong to. A download goes on by ``Range`` and
``If-Range`` (RFC 9110, sections 14.2 and 13.1.5). Nothing that a server says is trusted. Imports no torch.
"""

from __future__ import annotations

import http.client
import re
import shutil
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPMessage, HTTPResponse
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from pydantic import Field
from rich.filesize import decimal

from mae_bench.errors import UserError
from mae_bench.schema.base import Strict

RETRIES = 5  # of a connection that broke off
BACKOFF = 1.0  # seconds before the first retry; then 3, 7, 15, 31 times as long
STALL = 30.0  # seconds without a byte after which a connection counts as broken
REDIRECTS = 5
CHUNK = 1 << 20
HEAD = 16  # bytes that tell a web page from a weight file
TRANSIENT = {416, 429, 500, 502, 503, 504}  # statuses that another attempt may mend
VALIDATOR = "[ -~]{1,200}"  # an ETag or a date that can be sent back
MOVED = {301, 302, 303, 307, 308}
LOCAL = ("localhost", "127.0.0.1", "::1")  # hosts that plain http is allowed to

Show = Callable[[int, int], object]  # is told the bytes that are there, and those of the whole file


def discard(part: Path) -> None:
    """Remove a part and what is said of it."""
    part.unlink(missing_ok=True)
    _beside(part).unlink(missing_ok=True)


def copy(url: str, part: Path) -> None:
    """Bring the file of a ``file://`` address to ``part``."""
    source = Path(unquote(url.removeprefix("file://").removeprefix("localhost")))
    if not (source.is_absolute() and source.is_file()):
        raise UserError(f"{url!r:.200}: no such file; expected file:///whole/path, correct the backbone recipe")
    size = source.stat().st_size
    with source.open("rb") as stream:
        _check_head(stream.read(HEAD), size, url)
    _check_room(part, size)
    with _writing(part):
        shutil.copyfile(source, part)


@dataclass(frozen=True)
class Download:
    """The file at ``url`` on its way to ``part``."""

    url: str
    token: str
    part: Path
    by_hand: str  # what to do where the server cannot be used
    show: Show

    def run(self) -> None:
        """Connect as often as it takes, each time for what is still missing."""
        reason = ""
        for retry in range(RETRIES + 1):
            time.sleep(BACKOFF * (2**retry - 1))
            try:
                return self._attempt()
            except _BrokenError as error:
                reason = str(error)
                if isinstance(error, _UnreachableError) and not retry:
                    raise UserError(
                        f"cannot reach {reason}; fetch {self.url} on a machine that is online and {self.by_hand}"
                    ) from error
        origin = self._recall()
        there = f"{_size(self.part)} of {origin.size} bytes are" if origin else "nothing of use is"
        how = "goes on from there" if origin else "starts anew"
        raise UserError(
            f"{self.url}: {RETRIES + 1} connections failed ({reason}); {there} at {self.part}, the same command {how}"
        )

    def _recall(self) -> _Origin | None:
        """What the part belongs to; None = there is none that can be gone on with."""
        try:
            origin = _Origin.model_validate_json(_beside(self.part).read_bytes())
        except (OSError, ValueError):
            return None
        usable = origin.url == self.url and origin.validator and 0 < _size(self.part) <= origin.size
        return origin if usable else None

    def _attempt(self) -> None:
        """One connection: append what is missing, or start anew where the server has another file or knows no ranges.

        Raises:
            _BrokenError: it ended early; what came is kept.
        """
        origin = self._recall()
        have = _size(self.part) if origin else 0
        if origin and have == origin.size:
            return
        asked = {"Range": f"bytes={have}-", "If-Range": origin.validator} if origin else {}
        with self._open(asked) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                origin = self._start(response)
            elif origin is None or not self._continues(response, origin):
                discard(self.part)
                raise _BrokenError("the server sent another part than it was asked for")
            self._append(response, origin.size)

    def _append(self, response: HTTPResponse, size: int) -> None:
        _check_room(self.part, size)
        have = _size(self.part)
        with _writing(self.part), self.part.open("ab") as file:
            while have < size:
                self.show(have, size)
                with _network():
                    chunk = response.read1(min(CHUNK, size - have))
                if not chunk:
                    raise _BrokenError("the connection ended early")
                have += file.write(chunk)
        self.show(have, size)

    def _continues(self, response: HTTPResponse, origin: _Origin) -> bool:
        """Whether the answer goes on exactly where the part stops, within the same version of the file."""
        found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", str(response.headers.get("Content-Range", "")))
        fits = found is not None and (int(found[1]), int(found[2])) == (_size(self.part), origin.size)
        return fits and _validator(response.headers) in ("", origin.validator)

    def _start(self, response: HTTPResponse) -> _Origin:
        """Begin the part with the first bytes of an answer, if they are a weight file's."""
        if response.headers.get_content_type() == "text/html":
            raise UserError(f"{self.url} answered with a web page, not a weight file; {self.by_hand}")
        encoding = response.headers.get("Content-Encoding", "identity")
        if not response.length or encoding != "identity":
            raise UserError(
                f"{self.url} sends the file without its size, or packed ({encoding!r:.40}), so that a broken download "
                f"could not be told from a whole one; {self.by_hand}"
            )
        origin = _Origin(url=self.url, size=response.length, validator=_validator(response.headers))
        with _network():
            head = response.read(HEAD)
        if len(head) < min(HEAD, origin.size):
            raise _BrokenError("the connection ended early")
        _check_head(head, origin.size, self.url)
        with _writing(self.part):
            self.part.write_bytes(b"")  # first, so that old bytes never stand beside a new origin
            _beside(self.part).write_text(origin.model_dump_json(), encoding="utf-8")
            self.part.write_bytes(head)
        return origin

    def _open(self, asked: dict[str, str]) -> HTTPResponse:
        """The answer to one request, after redirects; its status is 200 or 206."""
        url, headers = self.url, {"User-Agent": "mae_bench", **asked}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        for _ in range(REDIRECTS + 1):
            response = _get(url, headers)
            if response.status in (http.client.OK, http.client.PARTIAL_CONTENT):
                return response
            response.close()  # unread: it may be of any size
            location = response.headers.get("Location")
            if response.status not in MOVED or not location:
                raise self._refusal(response.status)
            before, url = url, _joined(url, location)
            check_address(url, before)
            if urlsplit(url)[:2] != urlsplit(before)[:2]:
                headers.pop("Authorization", None)
        raise UserError(
            f"{self.url} redirects more than {REDIRECTS} times; correct the recipe's url, or {self.by_hand}"
        )

    def _refusal(self, code: int) -> Exception:
        """What to raise for a status that brings no file."""
        answer = f"{self.url} answered {code} ({http.client.responses.get(code, 'unknown')})"
        if code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            discard(self.part)
        if code in TRANSIENT:
            return _BrokenError(answer)
        if code in (401, 403):
            return UserError(
                f"{answer}: it has moved, or is not open to everyone; for a gated Hugging Face repository accept its "
                f"terms there and set $HF_TOKEN, otherwise {self.by_hand}"
            )
        return UserError(f"{answer}; correct url of the backbone recipe, or {self.by_hand}")


class _BrokenError(Exception):
    """A connection failed in a way that another attempt may mend."""


class _UnreachableError(_BrokenError):
    """There was no connection."""


class _Origin(Strict):
    """What the bytes of a part belong to; kept beside it."""

    url: str
    size: int = Field(gt=0)  # bytes of the whole file
    validator: str = Field(pattern=f"^({VALIDATOR})?$")  # the server's word for this version; "" = it has none


def _validator(headers: HTTPMessage) -> str:
    """What ``If-Range`` may name: a strong ETag, else the date of the last change."""
    for name in ("ETag", "Last-Modified"):
        value = str(headers.get(name, ""))
        if re.fullmatch(VALIDATOR, value) and not value.startswith("W/"):
            return value
    return ""


def _get(url: str, headers: dict[str, str]) -> HTTPResponse:
    """The answer to one request, whatever its status. Proxies are those of the environment."""
    opener = OpenerDirector()  # a bare one: urllib's own also follows redirects, to ftp too
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):
        opener.add_handler(handler)
    try:
        response: HTTPResponse = opener.open(Request(url, headers=headers), timeout=STALL)
    except (URLError, UnicodeError) as error:  # UnicodeError: a host name that cannot be
        reason = error.reason if isinstance(error, URLError) else error
        raise _UnreachableError(f"{urlsplit(url).hostname}: {str(reason)!r:.200}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"{str(error)!r:.120}") from error
    return response


def _joined(url: str, location: str) -> str:
    """The address that a redirect means, in printable ASCII; header bytes were decoded as Latin-1."""
    location = quote(location, safe=string.punctuation, encoding="latin-1")
    try:
        return urljoin(url, location)
    except ValueError:  # no address; `check_address` refuses it
        return location


def _beside(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def check_address(url: str, before: str = "") -> None:
    """Refuse every address but https ones, and plain http to this very machine. ``before`` redirected to it."""
    where = f"{before} redirects to {url!r:.200}" if before else f"{url!r:.200}"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or "@" in parts.netloc or not (url.isascii() and url.isprintable()):
        raise UserError(f"{where}, which is no address to fetch from; correct url of the backbone recipe")
    local = parts.scheme == "http" and host in LOCAL and not before.startswith("https:")
    if parts.scheme != "https" and not local:
        raise UserError(f"{where}: what does not come over https can be changed on its way; use an https address")


def _check_head(head: bytes, size: int, url: str) -> None:
    """Refuse what servers are known to send in place of a weight file."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return  # safetensors: the length of its header comes first and may look like anything
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise UserError(
            f"{url} gave a web page, not a weight file; nothing was kept, correct url of the backbone recipe"
        )
    if head.startswith(b"version https://g"[:HEAD]):
        raise UserError(
            f"{url} gave a Git LFS pointer, not the file itself; nothing was kept, correct the recipe's url"
        )


def _check_room(part: Path, size: int) -> None:
    free = shutil.disk_usage(part.parent).free + _size(part)
    if size > free:
        raise UserError(
            f"{part.parent} has room for {decimal(free)}, the file has {decimal(size)}; make room, "
            "or choose another folder with $MAE_BENCH_WEIGHTS"
        )


@contextmanager
def _writing(part: Path) -> Iterator[None]:
    """Faults of the disk as one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {part}: {error.strerror}; mend that and fetch again: it goes on where it stopped"
        ) from error


@contextmanager
def _network() -> Iterator[None]:
    """Faults of a connection as what another attempt may mend."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"{str(error)!r:.120}") from error
