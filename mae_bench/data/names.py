"""Class names from a text file."""

from __future__ import annotations

import re
from pathlib import Path

from mae_bench.errors import UserError

MAX_NAMES_BYTES = 1 << 20


def read_names(file: Path, *, first: int = 0) -> tuple[str, ...]:
    """Names of the classes from number ``first`` on. A line is a name, or ``index name``; ADE20K's own list will do.

    Raises:
        UserError: unreadable, or numbered with gaps or repeats.
    """
    try:
        if file.stat().st_size > MAX_NAMES_BYTES:
            raise UserError(f"{file} is larger than {MAX_NAMES_BYTES} bytes: not a list of class names")
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read class names {file}: {error}") from error
    if lines and lines[0].startswith("Idx"):  # objectInfo150: Idx, Ratio, Train, Val, Stuff, Name
        return tuple(line.split("\t")[-1].strip() for line in lines[1:])
    numbered = [re.fullmatch(r"(\d+)[\s:,]+(.+)", line) for line in lines]
    if not all(numbered):
        return tuple(lines)
    table = {int(match[1]): match[2] for match in numbered if match}
    expected = list(range(first, first + len(table) - (first and 0 in table)))
    if sorted(number for number in table if number >= first) != expected or len(table) != len(lines):
        raise UserError(f"{file}: class indices must run from {first} without gaps or repeats")
    return tuple(table[number] for number in expected)
