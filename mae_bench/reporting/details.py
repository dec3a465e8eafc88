"""What a page says of one record, as plain JSON that its script shows as text; and the picture beside the record.

Every text is one printable line of bounded length, so that nothing in a record can reorder or break what is read.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mae_bench.errors import UserError
from mae_bench.reporting import shown, transfer
from mae_bench.reporting.record import Record, Value, Values, one_line

MOST_CLASSES = 60  # of a record that are listed: the highest and the lowest half
MOST_PICTURE_BYTES = 300_000
LONG = 2000  # characters of a note
LONGEST_COMMAND = 4000
Json = dict[str, Any]
Rows = list[list[str]]


def anchor_of(run_id: str, digest: str, taken: set[str]) -> str:
    """``run-<run id>`` where that can stand in an address and is free, else one made of the record's hash."""
    name = f"run-{run_id}" if re.fullmatch(r"[\w.+=-]{1,200}", run_id, re.ASCII) else f"run-{digest[:16]}"
    return name if name not in taken else f"{name}-{digest[:16]}"


def details(record: Record) -> Json:
    """Run id, command, facts, metrics and scores per class of a record."""
    command, exact = _command(record.command)
    names, rows, more = _per_class(record.per_class)
    return {
        "title": one_line(record.run_id),
        "command": command,
        "exact": exact,
        "notes": [one_line(note, LONG) for note in record.notes],
        "metrics": [
            [one_line(name), *(_number(values.get(name)) for values in (record.metrics, record.best, record.baseline))]
            for name in record.metrics
        ],
        "facts": {"run": _run(record), "weights": _weights(record), "data": _data(record), "made with": _made(record)},
        "classes": {"names": names, "rows": rows, "more": more},
        "recipe": record.recipe_hash,
    }


def recipe(record: Record) -> Rows:
    """Key, value and source of every value of a record's recipe."""
    values, origins = record.recipe.get("values"), record.recipe.get("origins")
    sources = origins if isinstance(origins, dict) else {}
    found = values if isinstance(values, dict) else {}
    return [[one_line(key), _text(value), _source(sources.get(key))] for key, value in found.items()]


def _source(origin: object) -> str:
    if not isinstance(origin, dict):
        return ""
    return one_line(f"{origin.get('source', '')} [{origin.get('place', '')}]")


def _command(command: Sequence[str]) -> tuple[str, bool]:
    """The command as a shell takes it, and whether it is exactly that; else it is only to be read."""
    text = shlex.join(command)
    exact = text.isprintable() and len(text) <= LONGEST_COMMAND
    return (text if exact else one_line(text, LONGEST_COMMAND)), exact


def _number(value: Value) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.6g}"


def _per_class(classes: dict[str, Values]) -> tuple[list[str], Rows, int]:
    """Names of the measures, one row a class, and how many classes are left out."""
    names = list(dict.fromkeys(name for scores in classes.values() for name in scores))[:4]
    kept = list(classes.items())
    if len(kept) > MOST_CLASSES:
        order = sorted(kept, key=lambda one: (-_score(one[1], names[0]) if names else 0.0, one[0]))
        kept = order[: MOST_CLASSES // 2] + order[-MOST_CLASSES // 2 :]
    rows = [[one_line(name, 100), *(_number(scores.get(key)) for key in names)] for name, scores in kept]
    return [one_line(name, 60) for name in names], rows, len(classes) - len(kept)


def _score(scores: Values, name: str) -> float:
    value = scores.get(name)
    return -1.0 if value is None else value


def _run(record: Record) -> Rows:
    return _rows(
        ("protocol", record.protocol),
        ("recipe hash", record.recipe_hash),
        ("changed by --set", ", ".join(record.overridden)),
        ("values that nobody published", ", ".join(record.ours)),
        ("steps, batch, rate", _pairs(record.effective, ("steps", "batch", "lr", "precision", "device"))),
        ("created", record.created),
        ("duration", f"{record.times.seconds:.0f} s"),
        ("kind", "evaluation of a trained model" if record.eval_only else "smoke run" if record.smoke else ""),
    )


def _weights(record: Record) -> Rows:
    used = record.weights
    return _rows(
        ("start", used.kind),
        ("proof", _proof(used.load)),
        ("sha256", used.sha256),
        ("made by", used.maker.get("run_id", "")),
        ("its recipe hash", used.maker.get("recipe_hash", "")),
    )


def _proof(load: Json) -> str:
    """How many of the encoder's tensors came from the file, in a line; the record has all of their names."""
    if not load:
        return ""
    total, new, unused = load.get("total"), load.get("new"), load.get("unused")
    if not load.get("file"):
        return one_line(f"no weights loaded: {total} encoder tensors are random ({load.get('layout', '')})")
    parts = [
        f"{load.get('matched')} of {total} encoder tensors loaded from {load['file']} ({load.get('layout', '')})",
        str(load.get("verified") or ""),
        f"{len(new)} new: {', '.join(map(str, new))}" if isinstance(new, list) and new else "",
        f"{len(unused)} unused: {', '.join(map(str, unused))}" if isinstance(unused, dict) and unused else "",
    ]
    return one_line("; ".join(filter(None, parts)), LONG)


def _data(record: Record) -> Rows:
    data = record.data
    return _rows(
        ("data", data.name),
        ("pictures", _pairs(dict(data.counts), tuple(data.counts))),
        ("fingerprint", data.fingerprint),
        ("as the protocol names them", "yes" if data.matches else "no"),
        ("made for a smoke run", "yes" if data.synthetic else ""),
    )


def _made(record: Record) -> Rows:
    hardware = record.hardware
    machine = f"{hardware.cpu}, {hardware.cores} cores, {hardware.memory_gib:g} GiB, {hardware.platform}"
    return _rows(
        ("code hash", record.code_hash),
        ("commit", record.git.commit + (" with uncommitted changes" if record.git.dirty else "")),
        ("parameters", _pairs(dict(record.parameters), tuple(record.parameters))),
        ("machine", machine + (f", {hardware.gpu}" if hardware.gpu else "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
    )


def _rows(*pairs: tuple[str, object]) -> Rows:
    return [[name, one_line(value, LONG)] for name, value in pairs if value not in ("", None)]


def _pairs(values: Json, keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {_text(values[key])}" for key in keys if key in values)


def _text(value: object) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def picture(record_file: Path) -> tuple[str, str]:
    """The picture beside a record as a ``data:`` address, or empty with the reason why there is none to show.

    A record without a picture has neither.
    """
    beside = record_file.with_suffix(".png")
    if record_file.name == "record.json":
        beside = record_file.with_name(transfer.SAMPLES)
    if beside.is_symlink():
        return "", "a link, which is not followed"
    if not beside.is_file():
        return "", ""
    try:
        with beside.open("rb") as file:
            data = file.read(MOST_PICTURE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {beside}: {error.strerror}") from error
    if len(data) > MOST_PICTURE_BYTES:
        return "", f"larger than {MOST_PICTURE_BYTES} bytes"
    fault = transfer.png_fault(data)
    return ("", fault) if fault else (f"data:image/png;base64,{base64.b64encode(data).decode()}", "")


def alternative(record: Record) -> str:
    """What a picture shows, in words."""
    kinds = {
        "pretraining": "Validation pictures, what the encoder saw of them, and their reconstruction",
        "classification": "Validation pictures with the predicted classes",
        "detection": "Validation pictures with annotated and detected objects",
        "segmentation": "Validation pictures, their labels and the predicted ones",
    }
    value = "" if record.value is None else f"; {record.metric} {shown.number(record.value)}"
    return one_line(f"{kinds[record.engine]}: {record.backbone} on {record.task}, seed {record.seed}{value}")
