"""What an inspection of a weight file found, as data and as text.

Names of tensors come from a file of others: they are shown printable and short.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mae_bench.schema import Architecture

MAX_KINDS = 60  # of tensors in the text; a ViT has about 20
MAX_PATTERNS = 2  # of names in one line


@dataclass(frozen=True)
class TensorLine:
    """One encoder tensor: our name, the file's keys that it is made from, and what its values are like."""

    name: str
    sources: list[str]
    shape: list[int]
    dtype: str
    mean: float | None  # None where it is not finite
    std: float | None
    note: str  # "all zero", "constant", "NaN or infinite", "empty", or ""


@dataclass(frozen=True)
class Declared:
    """A file loaded as a backbone: what the recipe says of its weights, and how the file compares."""

    backbone: str
    report: str  # the load report in one line
    about: dict[str, str]  # the recipe's facts for people
    hash: str  # what of it is published: "sha256", "sha256 prefix", "md5 prefix", or "" = nothing
    published: bool | None  # whether the file has that hash; None: nothing to compare
    fingerprint: list[float]
    expected: bool | None  # whether it is the recipe's; None: the recipe states none
    first_seen: str  # date in the file's lock; "" = no lock
    unchanged: bool | None  # whether the file has the hash in its lock; None: no lock


@dataclass(frozen=True)
class Comparison:
    """Features of the fixed picture: our encoder's and the original implementation's."""

    proven: bool | None  # whether they are the same; None: not compared
    original: str = ""  # name and version
    features: int = 0  # how many
    difference: float | None = None  # the largest
    limit: float | None = None
    reason: str = ""  # why there is no difference to tell


@dataclass(frozen=True)
class Inspection:
    """What ``python -m mae_bench inspect`` prints."""

    file: str
    size: int  # bytes
    sha256: str
    wrapper: str  # key that held the tensors
    beside: str  # the keys next to it
    layout: str
    detail: str
    prefix: str
    encoder: str  # size in words
    facts: dict[str, Any]  # what the shapes tell, by the names of `Architecture`
    parameters: int
    tensors: list[TensorLine]
    changes: list[str]
    unused: dict[str, str]
    fits: list[str]  # recipes of this layout and these shapes
    declared: Declared | None = None
    comparison: Comparison | None = None

    @property
    def proven(self) -> bool | None:
        """Whether the original implementation gives the same features; None where nothing was compared."""
        return self.comparison.proven if self.comparison else None

    @property
    def sound(self) -> bool:
        """Whether nothing that was compared differs: hash, fingerprint, lock, features of the original."""
        one = self.declared
        compared = [self.proven, *([one.published, one.expected, one.unchanged] if one else [])]
        return False not in compared

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"proven": self.proven, "sound": self.sound}

    def text(self) -> str:
        """For people: short; tensors that differ by the number of their block alone are on one line."""
        parts = [f"{shown(self.file)}   {self.size:,} bytes", *self._head(), "", *self._table(), *self._beside(), ""]
        if self.declared:
            parts += _declared(self.declared)
        else:
            fits = ", ".join(self.fits) or "none of the recipes; docs/adding_a_backbone.md says how to write one"
            parts += _aligned([("fits", fits)])
        if self.comparison:
            parts += ["", *_aligned([("original", _compared(self.comparison))])]
        return "\n".join(parts)

    def _head(self) -> list[str]:
        dtypes = Counter(line.dtype for line in self.tensors)
        types = ", ".join(f"{dtype} x {count}" if len(dtypes) > 1 else dtype for dtype, count in dtypes.items())
        return _aligned(
            [
                ("sha256", self.sha256),
                ("layout", f"{self.layout}: {self.detail}"),
                ("wrapper", self.wrapper),
                ("beside it", shown(self.beside, 200)),
                ("prefix", self.prefix),
                ("encoder", self.encoder),
                ("features", _features(self.facts)),
                ("values", f"{self.parameters:,} in {len(self.tensors)} tensors, {types}"),
                ("changed", "; ".join(self.changes)),
            ]
        )

    def _table(self) -> list[str]:
        """Our names, shapes, and the file's names behind its prefix where they differ from ours."""
        kinds: Counter[tuple[str, str, str]] = Counter()
        for line in self.tensors:
            keys = joined([key.removeprefix(self.prefix) for key in line.sources])
            kinds[starred(line.name), f"({', '.join(map(str, line.shape))})", starred(keys)] += 1
        rows = [
            (name, f"{count} x {shape}" if count > 1 else shape, f"<- {shown(keys, 120)}" if keys != name else "")
            for (name, shape, keys), count in list(kinds.items())[:MAX_KINDS]
        ]
        names, shapes = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        lines = [f"  {name:<{names}}  {shape:>{shapes}}  {keys}".rstrip() for name, shape, keys in rows]
        return lines + [f"  and {len(kinds) - len(rows)} more kinds"] * (len(kinds) > len(rows))

    def _beside(self) -> list[str]:
        """Unused tensors by reason, and encoder tensors with suspicious values."""
        groups: dict[str, list[str]] = {}
        for key, reason in self.unused.items():
            groups.setdefault(f"not used ({reason})", []).append(key)
        for line in self.tensors:
            if line.note:
                groups.setdefault(line.note, []).append(line.name)
        return [""] * bool(groups) + [f"  {len(keys)} {what}: {_patterns(keys)}" for what, keys in groups.items()]


def shown(text: str, most: int = 80) -> str:
    """Text of others: as it is where it is printable and short."""
    return text if text.isprintable() and len(text) <= most else f"{text!r:.{most}}…"


def starred(key: str) -> str:
    """The number of the block as ``*``: the first number that is a whole part of the name (and where DINOv2 has blocks
    in chunks, the second)."""
    found = re.search(r"(?<=\.)\d+(\.\d+)?(?=\.)|(?<=encoderblock_)\d+", key)
    return key[: found.start()] + ("*.*" if found[1] else "*") + key[found.end() :] if found else key


def joined(keys: list[str]) -> str:
    """``a.query.weight`` and ``a.key.weight`` as ``a.{query,key}.weight``; keys of another form with a plus."""
    split = [re.split(r"([./])", key) for key in keys]
    if len({len(parts) for parts in split}) > 1:
        return " + ".join(keys)
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    return "".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns)


def _patterns(keys: list[str]) -> str:
    patterns = list(dict.fromkeys(map(starred, keys)))
    return ", ".join(map(shown, patterns[:MAX_PATTERNS])) + (", …" if len(patterns) > MAX_PATTERNS else "")


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12} {value}" for name, value in pairs if value]


def _features(facts: Mapping[str, Any]) -> str:
    """What is not ViT's own architecture, and the heads where the file tells them."""
    plain = {name: field.default for name, field in Architecture.model_fields.items() if not field.is_required()}
    if not facts.get("rows"):
        plain["class_position"] = facts.get("class_position")  # no positions at all: `encoder` says so
    told = {key: value for key, value in facts.items() if key in plain and value != plain[key]}
    told |= {"heads": facts["heads"]} if "heads" in facts else {}
    return ", ".join(f"{key} {str(value).lower()}" for key, value in told.items())


def _declared(one: Declared) -> list[str]:
    # What follows in the report is told above.
    pairs = [("report", shown(one.report.partition("; ")[0], 300))]
    pairs += [(name, shown(value, 300)) for name, value in one.about.items()]
    pairs += [
        (
            "hash",
            f"{one.hash}: {_verdict(one.published)} the published one" if one.hash else "none published: unverified",
        ),
        ("fingerprint", "the recipe states none" if one.expected is None else f"{_verdict(one.expected)} the recipe's"),
        ("", "[" + ", ".join(f"{number:g}" for number in one.fingerprint) + "]"),
        (
            "first seen",
            f"{one.first_seen}: {_verdict(one.unchanged)} that file" if one.first_seen else "no lock beside it",
        ),
    ]
    return [f"as {one.backbone}", *_aligned(pairs)]


def _verdict(equal: bool | None) -> str:
    return "equal to" if equal else "DIFFERS FROM"


def _compared(comparison: Comparison) -> str:
    if comparison.proven is None:
        return f"not compared: {comparison.reason}"
    verdict = "the same features" if comparison.proven else "NOT THE SAME FEATURES"
    told = f"{comparison.original}: {verdict}" if comparison.original else verdict
    if comparison.difference is None or comparison.limit is None:
        return f"{told}: {comparison.reason}"
    return (
        f"{told}, largest difference {comparison.difference:.1e} of {comparison.features:,} "
        f"(limit {comparison.limit:.1e})"
    )
