"""Run a backbone on a task, per seed, and write the record. Every engine is reached through ``PIPELINES``."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from mae_bench import doctor, provenance, samples, weights
from mae_bench.engine.job import Job, Options, Outcome, Pipeline
from mae_bench.errors import UserError
from mae_bench.hashing import file_hash
from mae_bench.recipes import ResolvedTask, digest, load_backbone, resolve_task
from mae_bench.reporting.record import (
    DataUsed,
    Git,
    Hardware,
    PerImage,
    Record,
    Times,
    WeightsUsed,
    read_record,
    record_from,
    write_record,
)
from mae_bench.schema import Backbone, MadeWeights, NoWeights

# engine = "…" of a task recipe -> module with `run(job)` and `smoke(values, backbone)`
PIPELINES = {
    "classification": "mae_bench.classification.run",
    "detection": "mae_bench.detection.run",
    "segmentation": "mae_bench.segmentation.run",
    "pretraining": "mae_bench.pretraining.run",
}


@dataclass(frozen=True)
class Run:
    """A finished run: its record and the folder that holds it, the log and the trained model."""

    record: Record
    folder: Path

    @property
    def record_file(self) -> Path:
        return self.folder / RECORD_FILE


RECORD_FILE = "record.json"
MAX_SEED = 1 << 32
ENCODER_FILE = "encoder.safetensors"  # what a run that makes weights leaves in its folder


def run(
    task: str,
    backbone: str,
    *,
    seeds: Sequence[int] = (0,),
    settings: Iterable[str] = (),
    options: Options | None = None,
) -> list[Run]:
    """Train and evaluate ``backbone`` on ``task`` once per seed; one record each, written below ``options.out``.

    ``task`` and ``backbone`` are recipe names or paths; ``settings`` are ``key=value`` strings that override protocol
    values (the record then leaves the protocol's column). Raises `UserError` for anything the caller can mend.
    """
    options = options or Options()
    recipe = _runnable(load_backbone(backbone))
    resolved = resolve_task(task, recipe, list(settings))
    if resolved.task.engine == "pretraining" and not isinstance(recipe.weights, NoWeights):
        raise UserError(
            f"task '{resolved.task.name}' pre-trains from random weights, and '{recipe.name}' brings its own; "
            f"use `python -m mae_bench pretrain --task {resolved.task.name} --backbone {recipe.name}`"
        )
    _check_options(resolved, options, seeds)
    return [_run_seed(resolved, recipe, seed, options) for seed in seeds]


def pretrain(
    backbone: str,
    *,
    task: str | None = None,
    seeds: Sequence[int] = (0,),
    settings: Iterable[str] = (),
    options: Options | None = None,
) -> list[Run]:
    """Pre-train ``backbone``; the encoder is left as ``encoder.safetensors`` beside each record.

    ``task`` defaults to the one that the backbone's recipe names as the maker of its weights. As the recipe says it
    (no other task, data, values or seeds), the result goes into the cache, where every later `run` finds it; otherwise
    it is a run below ``options.out``, whose encoder `run` takes with ``weights``. So is one with ``compile``, ``fsdp``
    or ``log``: what the cache holds does not depend on who asked first.
    """
    recipe = _runnable(load_backbone(backbone))
    options = options or Options()
    if options.weights is not None:
        raise UserError("pretrain starts from random weights: leave out --weights")
    settings = list(settings)
    maker = recipe.weights.task if isinstance(recipe.weights, MadeWeights) else None
    if task is None and maker is None:
        raise UserError(f"'{backbone}' does not say which task pre-trains it; give one, e.g. --task imagenet_pretrain")
    as_declared = task in (None, maker) and not settings and tuple(seeds) == (0,)
    own_way = options.compile or options.fsdp or options.log
    if as_declared and options.data is None and not options.smoke and not own_way:
        folder = _make_weights(recipe, options).parent
        return [Run(read_record(folder / RECORD_FILE), folder)]
    resolved = resolve_task(task or str(maker), recipe, settings)
    if resolved.task.engine != "pretraining" and resolved.task.name != maker:
        raise UserError(f"task '{resolved.task.name}' pre-trains nothing; use `run`, not `pretrain`")
    _check_options(resolved, options, seeds)
    return [_run_seed(resolved, untrained(recipe), seed, options) for seed in seeds]


def _runnable(backbone: Backbone) -> Backbone:
    if backbone.refused:
        raise UserError(f"backbone '{backbone.name}' cannot be run: {backbone.refused}")
    return backbone


def untrained(backbone: Backbone) -> Backbone:
    """The same backbone before its weights exist."""
    return _runnable(backbone).model_copy(update={"weights": NoWeights(kind="none")})


def _check_options(task: ResolvedTask, options: Options, seeds: Sequence[int]) -> None:
    doctor.require(task.task)
    if not all(0 <= seed < MAX_SEED for seed in seeds):
        raise UserError(f"--seeds {','.join(map(str, seeds))}: seeds are whole numbers from 0 to {MAX_SEED - 1}")
    if options.smoke and options.data is not None:
        raise UserError("--smoke makes its own data: leave out --data, or run without --smoke")
    if len(set(seeds)) != len(seeds) or not seeds:
        raise UserError(f"--seeds {','.join(map(str, seeds))}: give each seed once, e.g. --seeds 0,1,2")
    if options.eval_only and (options.weights is None or len(seeds) > 1):
        raise UserError("--eval-only needs one seed and --weights FILE, the model.safetensors that a run left")
    if task.task.engine == "detection":
        rewinds = task.values.on_nonfinite == "rewind"
        for name, given in (("--fsdp", options.fsdp), ("--log", options.log), ("on_nonfinite=rewind", rewinds)):
            if given:
                raise UserError(f"{name}: detection trains on detectron2's own trainer, which has none; leave it out")
    if options.eval_only and (options.fsdp or options.log or options.compile):
        raise UserError("--eval-only trains nothing: leave out --fsdp, --log and --compile")
    if options.eval_only and task.task.engine == "pretraining":
        raise UserError(f"--eval-only: task '{task.task.name}' pre-trains; there is nothing to evaluate alone")


def _run_seed(task: ResolvedTask, backbone: Backbone, seed: int, options: Options) -> Run:
    from mae_bench.data import open_dataset
    from mae_bench.engine import distributed

    weights.locate(backbone, options)  # a missing file is told before minutes are spent on data or pre-training
    distributed.init(options)
    dataset = open_dataset(task.task.data, options.data, smoke=options.smoke)
    distributed.check_same("data set", dataset.fingerprint, f"give every node the same files in {dataset.root}")
    # Found, made and named by the first process; torchrun ends the others should it fail.
    main = distributed.main_process()
    source = distributed.gather_objects(find_weights(backbone, options) if main else None)[0]
    own = source.sha256 if main or source.file is None else file_hash(source.file)
    distributed.check_same("weight file", own, f"give every node the same {source.file}")
    pipeline = import_module(PIPELINES[task.task.engine])
    if options.smoke:
        task, options = _smoke(task, backbone, options, pipeline.smoke(task.values, backbone))
    key = digest(
        [recipe_of(task, backbone), seed, source.sha256, dataset.fingerprint, options.smoke, options.eval_only]
    )
    stem = options.out / task.task.name / backbone.name / f"seed{seed}-{key[:8]}"
    folder = distributed.gather_objects(_folder(stem, options.resume) if main else None)[0]
    job = Job(task, backbone, seed, options, folder, dataset, source.file)
    with weights.locked(folder / "run", wait=False) if main else nullcontext():
        if distributed.gather_objects((folder / RECORD_FILE).exists())[0]:
            return _finished(job)  # --resume of a finished run
        return _train(job, source)


def _finished(job: Job) -> Run:
    """The run that lies in the job's folder already; its record must be this job's."""
    record = read_record(job.folder / RECORD_FILE)
    meant = (digest(recipe_of(job.task, job.backbone)), job.seed, job.options.smoke, job.options.eval_only)
    if (record.recipe_hash, record.seed, record.smoke, record.eval_only) != meant:
        raise UserError(f"{job.folder / RECORD_FILE} is of another run; move that folder away, or run without --resume")
    return Run(record, job.folder)


def _folder(stem: Path, resume: bool) -> Path:
    """The run's folder. ``resume`` takes the newest one of the same key; else a new one is made, never an old one."""
    number, folder, newest = 1, stem, None
    while True:
        while folder.is_dir():
            newest, number = folder, number + 1
            folder = stem.with_name(f"{stem.name}-{number}")
        if resume and newest is not None:
            return newest
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.is_dir():  # else another run was faster: take the next number
                raise UserError(f"{folder} is in the way of a run folder; move it, or choose another --out") from None
        except OSError as error:
            raise UserError(
                f"cannot make the run folder {folder}: {error.strerror}; choose another place with --out"
            ) from error
        else:
            return folder


def _smoke(
    task: ResolvedTask, backbone: Backbone, options: Options, reduced: dict[str, Any]
) -> tuple[ResolvedTask, Options]:
    """Two steps of the same graph: short, small batches; only sizes that memory demands are reduced."""
    short = {
        "epochs": 0.0,
        "steps": 2,
        "warmup_epochs": 0.0,
        "warmup_steps": 1,
        "eval_every_epochs": 0.0,
        "eval_every_steps": 0,
        "batch": min(task.values.batch, 4),
        # The lr stays what the recipe's batch gives: two steps of it cannot diverge, and nothing else is rescaled.
        "base_lr": task.values.lr,
        "lr_per": 0,
    }
    return task.changed(**(short | reduced)), replace(options, workers=0, micro_batch=2)


def find_weights(backbone: Backbone, options: Options) -> weights.Source:
    """The encoder file that ``backbone`` starts from under ``options``, made now if its recipe says so."""
    return weights.find(backbone, options, lambda recipe: _make_weights(recipe, options))


def _make_weights(backbone: Backbone, options: Options) -> Path:
    """Train the weights of a ``kind = "made"`` backbone, or take them from the cache.

    The cache key covers the task's values and protocol, the architecture and the data, so that a change of any of them
    makes new weights. Seed 0 is used: a backbone is one set of weights.
    """
    assert isinstance(backbone.weights, MadeWeights)
    task = resolve_task(backbone.weights.task, backbone)
    doctor.require(task.task)
    from mae_bench.data import open_dataset
    from mae_bench.engine import distributed

    distributed.init(options)
    fresh = untrained(backbone)
    dataset = open_dataset(task.task.data, None)
    key = digest([recipe_of(task, fresh), dataset.fingerprint])
    folder = weights.made_folder(backbone, key)
    with weights.locked(folder):
        file = folder / ENCODER_FILE
        if not (folder / RECORD_FILE).is_file():
            if distributed.world_size() > 1:
                raise UserError(
                    f"the weights of '{backbone.name}' are made on demand, in one process: first run "
                    f"`python -m mae_bench pretrain --backbone {backbone.name}` without torchrun"
                )
            print(
                f"making the weights of '{backbone.name}' with task '{task.task.name}' (kept in {folder})", flush=True
            )
            folder.mkdir(parents=True, exist_ok=True)
            # What the machine asks for is the caller's; everything else would stay in weights that all share.
            how = Options(
                out=folder,
                resume=True,
                device=options.device,
                workers=options.workers,
                micro_batch=options.micro_batch,
                quiet=options.quiet,
            )
            _train(Job(task, fresh, 0, how, folder, dataset, None), weights.Source("none", None))
        if not file.is_file():
            raise UserError(f"{folder} holds a record but no {ENCODER_FILE}; delete the folder to make it again")
    return file


def code_hash(engine: str) -> str:
    """`provenance.code_hash` of an engine's room: what a record of it would hold today."""
    return provenance.code_hash(PIPELINES[engine].rpartition(".")[0])


def _train(job: Job, source: weights.Source) -> Run:
    """Run the pipeline and write the record; under torchrun every process runs, the main one writes."""
    from mae_bench.engine import distributed, resume

    started, clock = datetime.now(UTC), time.monotonic()
    module = PIPELINES[job.task.task.engine]
    # Read before the run, and once a process: sources may be edited while it goes on.
    code_hash(job.task.task.engine)
    provenance.git_state()
    run_pipeline: Pipeline = import_module(module).run
    outcome = run_pipeline(job)
    record = _record(job, outcome, source, started, time.monotonic() - clock)
    if distributed.main_process():
        write_record(record, job.folder)
        shutil.rmtree(resume.folder(job), ignore_errors=True)  # nothing is left to resume
        samples.write(outcome, job.folder)
    distributed.barrier()
    del outcome  # it may hold the model
    gc.collect()  # runner, hooks and loaders refer to each other: their memory goes before the next seed
    return Run(record, job.folder)


def recipe_of(task: ResolvedTask, backbone: Backbone) -> dict[str, Any]:
    """Everything that makes the protocol's number: what `recipe_hash` is taken of.

    Paths, workers and the device are options and never part of it; words about a backbone (summary, licence, address)
    are left out, so that correcting them does not make old results stale.
    """
    words: Any = {
        "summary": True,
        "refused": True,
        "fingerprint": True,
        "published": True,
        "weights": {"url", "licence", "source"},
    }
    return {
        "task": task.task.name,
        "protocol": task.task.protocol,
        "data": task.task.data.model_dump(mode="json"),
        "values": task.values.model_dump(mode="json"),
        "backbone": backbone.model_dump(mode="json", exclude=words),
    }


def _record(job: Job, outcome: Outcome, source: weights.Source, started: datetime, seconds: float) -> Record:
    task, backbone = job.task, job.backbone
    recipe = recipe_of(task, backbone)
    created = datetime.now(UTC)
    return record_from(
        {
            "run_id": f"{task.task.name}.{backbone.name}.{job.folder.name}.{created:%Y%m%dT%H%M%SZ}",
            "created": created.isoformat(timespec="seconds"),
            "task": task.task.name,
            "engine": task.task.engine,
            "metric": task.task.metric,
            "protocol": job.protocol,
            "recipe_protocol": task.task.protocol,
            "backbone": backbone.name,
            "size": backbone.size,
            "init": backbone.init,
            "seed": job.seed,
            "smoke": job.options.smoke,
            "eval_only": job.options.eval_only,
            "metrics": outcome.metrics,
            "best": outcome.best,
            "baseline": outcome.baseline,
            "per_class": outcome.per_class,
            "images": PerImage.of(*outcome.images) if outcome.images else None,
            "history": outcome.history,
            "recipe": recipe | {"origins": {name: asdict(origin) for name, origin in task.origins.items()}},
            "recipe_hash": digest(recipe),
            "ours": list(task.ours),
            "overridden": list(task.overridden),
            "code_hash": code_hash(task.task.engine),
            "weights": WeightsUsed(kind=source.kind, sha256=source.sha256, maker=_maker(source), load=outcome.load),
            "data": DataUsed(
                name=job.dataset.name,
                fingerprint=job.dataset.fingerprint,
                counts=job.dataset.counts,
                synthetic=job.dataset.synthetic,
                matches=job.data_matches,
            ),
            "effective": outcome.effective,
            "parameters": outcome.parameters,
            "git": Git(**provenance.git_state()),
            "versions": provenance.versions(),
            "hardware": Hardware(**provenance.hardware()),
            "times": Times(started=started.isoformat(timespec="seconds"), seconds=round(seconds, 2)),
            "command": provenance.command(),
            "notes": job.notes,
        }
    )


def _maker(source: weights.Source) -> dict[str, Any]:
    """The run that made the weights: of its record, where that lies beside the file, else what the file itself says."""
    if source.file is None or not (beside := source.file.with_name(RECORD_FILE)).is_file():
        return source.stated
    try:
        record = read_record(beside)
    except UserError:
        return source.stated  # a file of somebody else's that happens to bear the name
    facts = {"run_id", "recipe_hash", "code_hash", "git", "protocol"}
    maker = record.model_dump(mode="json", include=facts)
    data = record.data.model_dump(mode="json", include={"name", "fingerprint", "matches"})
    if source.stated and source.stated["data"] != data:
        return source.stated  # the record of another run: the file was moved here
    return maker | {"data": data}
