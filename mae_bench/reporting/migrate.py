"""Records of earlier schema versions, brought to this one as they are read. Their files never change.

A change of `Record`'s fields is a new version: `CURRENT` goes up by one, and `STEPS` gains the function that leads to
it. A step fills in what the earlier version did not say with the value for "not recorded", and makes up nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mae_bench.errors import UserError

Json = dict[str, Any]
Step = Callable[[Json], Json]  # a record of version n -> one of version n + 1; pure

CURRENT = 2
BEYOND_REASON = 1_000_000


def _to_2(record: Json) -> Json:
    """``images``: which validation pictures were right. Earlier runs did not keep it."""
    if "images" in record:
        raise ValueError("unknown key 'images': a record of schema 1 has none")
    return record | {"schema_version": 2, "images": None}


STEPS: dict[int, Step] = {1: _to_2}  # version -> the step that leads on from it


def to_current(record: object) -> Json:
    """A parsed record of any version, as this version has it.

    Raises:
        ValueError: no record of any version.
        UserError: a record of a newer version.
    """
    if not isinstance(record, dict) or "schema_version" not in record:
        raise ValueError("it states no schema_version")
    version = record["schema_version"]
    if type(version) is not int or not 1 <= version < BEYOND_REASON:
        raise ValueError(f"schema_version is {repr(version)[:40]}; expected a whole number from 1 to {CURRENT}")
    if version > CURRENT:
        raise UserError(
            f"this record was written by a newer mae_bench (schema {version}, this one reads 1 to {CURRENT}): upgrade"
        )
    while version < CURRENT:
        record = STEPS[version](record)
        version += 1
    return record
