"""Suites: pre-trainings that differ in one value each, and the transfers of their encoders, from one TOML file.

Every run is done once: a record below ``out`` with the same recipe, seed and weights stands for it, so that a suite
goes on where it stopped. A run is a process of its own, started with the command that a user would type; what it says
is kept in ``out/suites``. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from mae_bench import places, provenance, runs
from mae_bench.engine.job import Options
from mae_bench.errors import UserError, nearest
from mae_bench.hashing import file_hash
from mae_bench.recipes import digest, explain, load_backbone, read_toml, resolve_task
from mae_bench.reporting import ablations, store
from mae_bench.reporting.grid import Table
from mae_bench.reporting.record import Record, one_line, read_record
from mae_bench.reporting.render import render
from mae_bench.schema.suite import Cell, Settings, Suite, in_words

OWN = "mae_bench: "  # begins an error of ours
GRACE = 20.0  # seconds that interrupted runs have to end by themselves


@dataclass(frozen=True)
class Step:
    """One run of a chain, for any seed. ``any_data``: the recipe names no data, so that a record need not match it."""

    command: Literal["pretrain", "run"]
    task: str
    backbone: str
    settings: tuple[str, ...]
    folder: str  # of its runs, below `out`
    recipe_hash: str
    any_data: bool

    def words(self, seed: int, weights: Path | None, options: Options) -> list[str]:
        """The words of the command line after ``python -m mae_bench``."""
        how = ["--out", str(options.out), "--device", options.device, "--workers", str(options.workers)]
        if options.micro_batch:
            how += ["--micro-batch", str(options.micro_batch)]
        if weights is not None:
            how += ["--weights", str(weights)]
        names = ["--task", self.task, "--backbone", self.backbone, "--seeds", str(seed)]
        sets = [word for setting in self.settings for word in ("--set", setting)]
        return [self.command, *names, *sets, *how, "--resume"]


@dataclass
class Chain:
    """A pre-training and its transfers, and the names of all cells that they stand for."""

    pretraining: Step
    transfers: tuple[Step, ...]
    labels: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        more = len(self.labels) - 1
        return self.labels[0] + (f" (and {more} more)" if more else "")


@dataclass(frozen=True)
class Result:
    """What became of a chain with one seed. ``text``: its numbers, or why it failed."""

    chain: Chain
    seed: int
    state: Literal["done", "skipped", "failed"]
    minutes: float
    text: str

    def line(self, width: int) -> str:
        return f"{self.chain.name:<{width}}  {self.seed:>4}  {self.state:<7}  {self.minutes:7.1f}  {self.text}"


def files() -> dict[str, Path]:
    """Name -> file of every suite on the recipe search path, by name."""
    found = {path.stem: path for root in reversed(places.recipe_roots()) for path in root.glob("suites/*.toml")}
    return dict(sorted(found.items()))


def load(name: str) -> Suite:
    """Read and validate a suite, by name (``suites/`` on the recipe search path) or by path to a ``.toml`` file."""
    known = files()
    path = Path(name).expanduser() if name.endswith(".toml") or "/" in name else known.get(name)
    if path is None:
        raise UserError(f"unknown suite '{name}'{nearest(name, known)}; known: {', '.join(known) or 'none'}")
    if not path.is_file():
        raise UserError(f"no suite at {name}; give a name ({', '.join(known)}) or a .toml file")
    try:
        suite = Suite.model_validate(read_toml(path))
    except ValidationError as error:
        raise explain(error, Suite, str(path)) from error
    if suite.name != path.stem:
        raise UserError(f"{path}: name '{suite.name}' differs from the file's name '{path.stem}'; make them equal")
    return suite


def plan(suite: Suite, *, tiny: bool = False, only: str = "") -> list[tuple[Cell, Chain | None]]:
    """The cells whose label contains ``only`` (a shell pattern, in any case), each with its chain; equal recipes share
    one. None: the cell has no tiny form. Every fault of a recipe or a value is found here, before anything runs."""
    form = suite.tiny if tiny else suite
    if form is None:
        raise UserError(f"suite '{suite.name}' has no tiny form; leave out --tiny, or add a [tiny] section")
    chains: dict[tuple[str, ...], Chain] = {}
    planned: list[tuple[Cell, Chain | None]] = []
    for cell in suite.cells:
        if not fnmatchcase(cell.label.lower(), f"*{only.lower()}*"):
            continue
        changes = cell.changes(tiny)
        if changes is None:
            planned.append((cell, None))
            continue
        try:
            task = form.task if tiny else cell.task or form.task
            backbone = form.backbone if tiny else cell.backbone or form.backbone
            first = _step("pretrain", task, backbone, form.settings | changes)
            rest = tuple(_step("run", each.task, backbone, each.settings) for each in form.transfer)
        except UserError as error:
            raise UserError(f"suite '{suite.name}', {cell.label}: {error}") from error
        key = tuple(step.recipe_hash for step in (first, *rest))
        chain = chains.setdefault(key, Chain(first, rest))
        chain.labels.append(cell.label)
        planned.append((cell, chain))
    if not planned:
        raise UserError(f"--only {only}: no cell of suite '{suite.name}' has such a name; --dry-run lists them")
    return planned


def _step(command: Literal["pretrain", "run"], task: str, backbone: str, settings: Settings) -> Step:
    recipe = load_backbone(backbone)
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    resolved = resolve_task(task, recipe, words)
    if command == "pretrain":
        recipe = runs.untrained(recipe)
        # Without a setting `pretrain` would put the declared weights into the cache, not below `out`.
        words = words or [f"batch={resolved.values.batch}"]
    data = resolved.task.data
    return Step(
        command=command,
        task=task,
        backbone=backbone,
        settings=tuple(words),
        folder=f"{resolved.task.name}/{recipe.name}",
        recipe_hash=digest(runs.recipe_of(resolved, recipe)),
        any_data=not data.made and not data.expected,
    )


class Records:
    """The records below ``out``, by recipe, seed and weights. Files are read once; threads may share it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._read: set[Path] = set()
        self._found: dict[tuple[str, int, str], tuple[str, Path]] = {}

    def find(self, step: Step, seed: int, weights: str) -> Path | None:
        """The newest record of a step; ``weights`` is the sha256 of the encoder that it starts from."""
        with self._lock:
            for path in sorted((self._out / step.folder).glob(f"seed{seed}-*/{runs.RECORD_FILE}")):
                if path not in self._read:
                    self._add(path, step.any_data)
            found = self._found.get((step.recipe_hash, seed, weights))
        return found[1] if found else None

    def _add(self, path: Path, any_data: bool) -> None:
        record = read_record(path)
        self._read.add(path)
        if record.smoke or record.eval_only or not (record.data.matches or any_data):
            return
        key = record.recipe_hash, record.seed, record.weights.sha256
        self._found[key] = max((record.created, path), self._found.get(key, ("", path)))


class Processes:
    """Runs of ``mae_bench`` in processes of their own, which end together."""

    def __init__(self, jobs: int) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen[bytes]] = set()
        paths = [str(places.PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if jobs > 1:  # beside each other: a share of the cores each
            self._environment.setdefault("OMP_NUM_THREADS", str(max(1, provenance.hardware()["cores"] // jobs)))

    def run(self, words: list[str], log: Path) -> str:
        """Run one command to its end. "" = it succeeded, else why not, in a line; all that it says goes to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            with self._lock:
                if self.stopped:
                    return "stopped"
                process = subprocess.Popen(
                    [sys.executable, "-m", "mae_bench", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                )
                self._live.add(process)
            code = process.wait()
            with self._lock:
                self._live.discard(process)
        if code < 0:
            return f"ended by signal {signal.Signals(-code).name} (log: {log})"
        return f"{_last_line(log)} (log: {log})" if code else ""

    def stop(self) -> None:
        """End every run. Those that share the terminal have its Ctrl-C already; each keeps what it needs to resume."""
        with self._lock:
            self.stopped = True
            live = list(self._live)
        end = time.monotonic() + GRACE
        for process in live:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()


def _last_line(log: Path) -> str:
    """What a run said last: its own line of an error, which libraries may follow with theirs, or else the last one."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
    own = [line.removeprefix(OWN) for line in lines if line.startswith(OWN)]
    return one_line((own or lines)[-1])


def run(
    name: str,
    *,
    tiny: bool = False,
    only: str = "",
    seeds: Sequence[int] = (0,),
    jobs: int = 1,
    dry_run: bool = False,
    options: Options | None = None,
) -> int:
    """Carry out a suite, ``jobs`` chains at once, and print what became of each. Returns the number that failed.

    Of ``options`` only ``out``, ``device``, ``workers`` and ``micro_batch`` are taken. ``dry_run`` prints the commands
    instead, and which runs are done.
    """
    options = options or Options()
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: give 1 or more")
    suite = load(name)
    chains = list({id(chain): chain for _, chain in plan(suite, tiny=tiny, only=only) if chain}.values())
    records = Records(options.out)
    work = [(chain, seed) for seed in dict.fromkeys(seeds) for chain in chains]
    if dry_run:
        for chain, seed in work:
            print("\n".join(_dry(chain, seed, records, options)))
        return 0
    results: list[Result] = []
    processes, started = Processes(jobs), time.monotonic()
    logs = options.out / "suites" / suite.name
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_carry_out, chain, seed, records, processes, options, logs) for chain, seed in work]
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                results.append(done.result())
                print(f"[{number}/{len(work)}] {results[-1].line(0)}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise
        finally:
            order = {(id(chain), seed): place for place, (chain, seed) in enumerate(work)}
            results.sort(key=lambda result: order[id(result.chain), result.seed])
            print(_summary(results, len(work), (time.monotonic() - started) / 60), flush=True)
    return sum(result.state == "failed" for result in results)


def _carry_out(chain: Chain, seed: int, records: Records, processes: Processes, options: Options, logs: Path) -> Result:
    """Pre-train, then every transfer; one that fails does not keep the others back."""
    texts, faults, ran, started = [], [], False, time.monotonic()
    weights, sha256 = None, ""
    for step in (chain.pretraining, *chain.transfers):
        try:
            found = records.find(step, seed, sha256)
            if found is None:
                ran = True
                log = logs / f"{chain.pretraining.recipe_hash[:8]}-seed{seed}-{step.folder.partition('/')[0]}.log"
                fault = processes.run(step.words(seed, weights, options), log)
                found = records.find(step, seed, sha256)
                if fault or found is None:
                    raise UserError(fault or f"it left no record below {options.out} (log: {log})")
            if step is chain.pretraining:
                weights, sha256 = _encoder(found)
            texts.append(_number(read_record(found)))
        except (UserError, OSError) as error:
            faults.append(f"{step.task}: {one_line(error)}")
            if step is chain.pretraining:
                break
    state: Literal["done", "skipped", "failed"] = "failed" if faults else "done" if ran else "skipped"
    return Result(chain, seed, state, (time.monotonic() - started) / 60, "; ".join(faults or texts))


def _number(record: Record) -> str:
    value = "undefined" if record.value is None else f"{record.value:.4g}"
    return f"{record.task} {record.metric} {value}"


def _encoder(record: Path) -> tuple[Path, str]:
    """The weights that a pre-training left beside its record, and their sha256."""
    file = record.with_name(runs.ENCODER_FILE)
    if not file.is_file():
        raise UserError(f"{record.parent} holds a record but no {runs.ENCODER_FILE}; move that folder away")
    return file, file_hash(file)


def _dry(chain: Chain, seed: int, records: Records, options: Options) -> list[str]:
    """The cells of a chain, and for each of its runs the record or the command that makes it."""
    lines = [f"{', '.join(chain.labels)}; seed {seed}"]
    made = records.find(chain.pretraining, seed, "")
    weights, sha256 = _encoder(made) if made else (options.out / "…" / runs.ENCODER_FILE, "?")
    for step in (chain.pretraining, *chain.transfers):
        first = step is chain.pretraining
        found = records.find(step, seed, "" if first else sha256)
        command = shlex.join(["python", "-m", "mae_bench", *step.words(seed, None if first else weights, options)])
        lines.append(f"  done    {found}" if found else f"  to run  {command}")
    return lines


def _summary(results: list[Result], total: int, minutes: float) -> str:
    width = max([4, *(len(result.chain.name) for result in results)])
    counts = {state: sum(result.state == state for result in results) for state in ("done", "skipped", "failed")}
    left = total - sum(counts.values())
    words = [f"{count} {state}" for state, count in counts.items()] + ([f"{left} not carried out"] if left else [])
    head = f"{'cell':<{width}}  {'seed':>4}  {'state':<7}  {'minutes':>7}"
    lines = [result.line(width) for result in results]
    return "\n".join(["", head, *lines, f"{', '.join(words)}; {minutes:.1f} minutes"])


def table(name: str, *, tiny: bool = False, only: str = "", out: Path = Path("runs")) -> str:
    """A suite's results below ``out`` beside the published numbers, as Markdown."""
    return render(tabulate(name, tiny=tiny, only=only, out=out), "markdown", title=True)


def tabulate(name: str, *, tiny: bool = False, only: str = "", out: Path = Path("runs")) -> Table:
    """A suite's results below ``out`` beside the published numbers."""
    suite = load(name)
    form = suite.tiny if tiny and suite.tiny else suite
    rows, any_data = [], set[str]()
    for cell, chain in plan(suite, tiny=tiny, only=only):
        steps = (chain.pretraining, *chain.transfers) if chain else ()
        any_data |= {step.recipe_hash for step in steps if step.any_data}
        changes = cell.changes(tiny)
        rows.append(
            ablations.Row(
                table=cell.table,
                cell=cell.cell,
                changed="(not in this form)" if changes is None else in_words(changes),
                published=cell.published,
                published_epochs=cell.published_epochs,
                pretraining=steps[0].recipe_hash if steps else "",
                transfers=tuple(step.recipe_hash for step in steps[1:]),
            )
        )
    columns = [ablations.Column(each.task, each.published) for each in form.transfer]
    records = store.load_records([out]) if out.exists() else ()
    title = f"{suite.name}: {form.backbone} by {form.task}, {in_words(form.settings) or 'as the recipe says'}"
    return ablations.suite_table(
        title,
        rows,
        columns,
        records,
        source=suite.source,
        comparable=not tiny,
        name=suite.name + "_tiny" * tiny,
        code_hash=runs.code_hash,
        any_data=any_data,
    )
