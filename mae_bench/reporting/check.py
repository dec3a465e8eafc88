"""Look through folders of records for copies, edits, leftovers and what does not belong there. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mae_bench import places, recipes
from mae_bench.errors import UserError
from mae_bench.reporting import agreement, migrate
from mae_bench.reporting.record import Record, one_line, read_record
from mae_bench.reporting.store import digest, files_below, is_record
from mae_bench.reporting.transfer import read_picture

Severity = Literal["error", "warning"]
VERSION = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*(\d+)')
LEFTOVER = re.compile(r"\.(unfinished|record)-.*\.tmp")  # `write_whole` was killed; `record` by earlier versions
RESTORE = "restore the file from its copy (git checkout), or delete it and run again"
KEEP_ONE = "keep the right one and delete the other"


@dataclass(frozen=True)
class Finding:
    """One fault of one file. An error makes a number wrong or doubtful, a warning wants a look."""

    severity: Severity
    file: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return one_line(f"{self.severity}: {self.file}: {self.what}; {self.remedy}", 600)


def check(paths: Iterable[Path | str]) -> list[Finding]:
    """All findings in record files and in folders searched to any depth, in the order of the files.

    Promoted records are those below the checkout's ``results``, those in a folder without any ``record.json`` below it,
    and those that share their folder with one of another name. Among them every ``.json`` must be a record, which
    carries its run's id as its name and lies below its task and backbone.

    Raises:
        UserError: a path does not exist, a folder cannot be listed, or nothing like a record is in it.
    """
    search = _Search()
    for path in map(Path, paths):
        if path.is_dir():
            seen = search.records, len(search.findings)
            search.folder(path)
            if seen == (search.records, len(search.findings)):
                raise UserError(f"no records below {path}: name a folder of runs or of promoted records")
        elif path.exists():
            search.record(path, promoted=path.name != "record.json")
        else:
            raise UserError(f"{path}: no such file or folder")
    return search.findings


def committed(results: Path) -> list[Path]:
    """The folders of records below a checkout's ``results``: all that hold JSON, but for what is made from records and
    for what others published."""
    folders = sorted(path for path in results.glob("*") if path.is_dir() and path.name not in ("published", "tables"))
    return [folder for folder in folders if any(folder.rglob("*.json"))]


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def report(findings: Sequence[Finding]) -> str:
    """One line a finding and one for all."""
    errors = sum(finding.severity == "error" for finding in findings)
    total = f"{errors} errors, {len(findings) - errors} warnings" if findings else "nothing found"
    return "\n".join([*map(str, findings), total])


@dataclass
class _Search:
    """What was seen so far; of each record only what tells copies apart."""

    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    contents: dict[str, Path] = field(default_factory=dict)  # digest -> first file
    ids: dict[str, Path] = field(default_factory=dict)  # run id -> first file
    # one cell, seed and recipe -> first file, its numbers, and all else that moves them
    samples: dict[str, tuple[Path, str, str]] = field(default_factory=dict)

    def add(self, severity: Severity, file: Path, what: str, remedy: str) -> None:
        self.findings.append(Finding(severity, file, what, remedy))

    def folder(self, folder: Path) -> None:
        kinds = {file: _kind(file) for file in files_below(folder)}
        homes = {file.parent for file, kind in kinds.items() if kind == "record"}
        shelves = {file.parent for file, kind in kinds.items() if kind == "record" and file.name != "record.json"}
        if _is_committed(folder) or all(file.name != "record.json" for file in kinds):
            shelves = {file.parent for file in kinds}
        for file, kind in kinds.items():
            promoted = file.parent in shelves
            if LEFTOVER.fullmatch(file.name):
                self.add("warning", file, "left by a write that was cut off", "delete it")
            elif kind == "record":
                self.record(file, promoted=promoted)
            elif kind:
                self.add("error", file, kind, RESTORE)
            elif file.suffix == ".json" and (promoted or (file.is_file() and not file.stat().st_size)):
                self.add("error", file, "no record, or its beginning is damaged", RESTORE)
            elif promoted and file.parent in homes:
                self.foreign(file)

    def foreign(self, file: Path) -> None:
        """A file among promoted records: a record's picture belongs there."""
        if file.suffix != ".png" or not file.with_suffix(".json").is_file():
            self.add("warning", file, "not a record and no record's picture", "move it elsewhere")
            return
        fault = read_picture(file)[1]
        if fault:
            self.add("warning", file, fault, "delete it")

    def record(self, file: Path, *, promoted: bool) -> None:
        self.records += 1
        try:
            record = read_record(file)
            with file.open("rb") as stream:
                version = VERSION.match(stream.read(128))
        except UserError as error:
            self.add("error", file, str(error).removeprefix(f"{file} "), RESTORE)
            return
        for what in agreement.contradictions(record):
            self.add("error", file, what, RESTORE)
        for what in agreement.oddities(record):
            self.add("warning", file, what, "look at the run's log")
        if version and int(version[1]) != migrate.CURRENT:
            what = f"schema {int(version[1])}, read as {migrate.CURRENT}"
            self.add("warning", file, what, "nothing need be done; `results import` into another folder rewrites it")
        if record.git.dirty:
            self.add("warning", file, "made by a checkout with changes that no commit holds", "run again from a commit")
        if record.smoke:
            severity: Severity = "error" if promoted else "warning"
            self.add(severity, file, "a smoke run measures nothing", "delete it; no table counts it")
        if promoted:
            self.place(file, record)
        self.copies(file, record)

    def place(self, file: Path, record: Record) -> None:
        if file.name != f"{record.run_id}.json":
            self.add("error", file, f"its run_id is '{record.run_id}'", "name the file after its run")
        if file.absolute().parts[-3:-1] != (record.task, record.backbone):
            self.add("warning", file, f"belongs below {record.task}/{record.backbone}", "move it there")

    def copies(self, file: Path, record: Record) -> None:
        content = digest(record)
        same = self.contents.setdefault(content, file)
        if same != file:
            self.add("warning", file, f"a copy of {same}", "delete one; tables count it once")
            return
        namesake = self.ids.setdefault(record.run_id, file)
        if namesake != file:
            self.add("error", file, f"run '{record.run_id}' is {namesake} too, with other content", KEEP_ONE)
            return
        numbers, conditions = recipes.digest(record.metrics), _conditions(record)
        other, its_numbers, its_conditions = self.samples.setdefault(_sample(record), (file, numbers, conditions))
        if its_numbers == numbers:
            return
        what = f"same task, protocol, backbone, seed and recipe as {other}, with other numbers"
        if its_conditions == conditions:
            self.add("error", file, f"{what} by the same code and computer", KEEP_ONE)
        else:
            self.add("warning", file, what, "tables count the newest; delete the other")


def _kind(file: Path) -> str:
    """What a file is: "record", nothing, or why that cannot be told."""
    try:
        return "record" if is_record(file) else ""
    except UserError as error:
        return str(error).removeprefix(f"{file} ")


def _is_committed(folder: Path) -> bool:
    root = places.checkout()
    return root is not None and folder.resolve().is_relative_to(root / "results")


def _sample(record: Record) -> str:
    """The place of a run among all: two runs of one place should give one number."""
    run = (record.task, record.protocol, record.backbone, record.seed, record.eval_only, record.smoke)
    return recipes.digest([*run, record.recipe_hash, record.weights.sha256, record.data.fingerprint])


def _conditions(record: Record) -> str:
    return recipes.digest([record.code_hash, record.versions, record.hardware, record.effective])
