"""Read a file of bounded size; give a file its content in one step. Imports no torch."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from mae_bench.errors import UserError

PREFIX, SUFFIX = ".unfinished-", ".tmp"  # of what a writer that was killed may leave behind
NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


def read_bounded(path: Path, most: int, what: str, mend: str = "") -> bytes:
    """Content of a file of at most ``most`` bytes.

    Raises:
        UserError: unreadable, followed by ``mend``; or larger, and so ``what`` (e.g. "not a record").
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}{mend}") from error
    if len(content) > most:
        raise UserError(f"{path} is larger than {most} bytes: {what}")
    return content


def write_whole(target: Path, content: str | bytes, *, exclusive: bool = False) -> bool:
    """Write ``target``, whole or not at all: readers and crashes see the old content or the new, never a part.

    Text is written in UTF-8 with the line ends that it has. Safe when several processes write at once. A link is
    followed; what is no plain file (``/dev/stdout``) is written as it is.

    Args:
        exclusive: never over another file; of several processes exactly one gets the name.

    Returns:
        False if ``exclusive`` and the name is taken.

    Raises:
        OSError: no such folder, a full disk, no permission. Nothing is then left behind.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    mode = 0o644  # mkstemp's 0600 would hide the file from the group
    if not exclusive:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return True
        target = target.resolve()
        mode = target.stat().st_mode & 0o777 if target.exists() else mode
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix=SUFFIX, dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        if exclusive and not _claim(temporary, target):
            return False
        if not exclusive:
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return True


def _claim(temporary: Path, target: Path) -> bool:
    """Give the finished file its name; False if the name is taken. A hard link is both atomic and exclusive."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        # File systems without hard links (exFAT, mounted cloud drives): claim the name, then move the file onto it.
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        temporary.replace(target)
    return True


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
