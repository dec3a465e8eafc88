"""What each command of the line does: call one function, print. Nothing here imports torch before it is needed."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_bench.errors import UserError, nearest

if TYPE_CHECKING:
    from mae_bench.engine.job import Options
    from mae_bench.reporting.transfer import Copied
    from mae_bench.runs import Run


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text}: expected whole numbers, e.g. --seeds 0,1,2") from None


def _options(args: argparse.Namespace) -> Options:
    from mae_bench.engine.job import Options

    if args.workers < 0 or args.micro_batch < 0:
        raise UserError("--workers and --micro-batch count things: give 0 or more")
    if args.data is not None and not args.data.is_dir():
        raise UserError(f"--data {args.data}: no such folder")
    return Options(
        data=args.data,
        out=args.out,
        weights=args.weights,
        eval_only=getattr(args, "eval_only", False),
        resume=args.resume,
        smoke=args.smoke,
        device=args.device,
        workers=args.workers,
        micro_batch=args.micro_batch,
        quiet=args.quiet,
        fsdp=args.fsdp,
        compile=args.compile,
        log=tuple(args.log),
    )


def list_recipes(args: argparse.Namespace) -> int:
    from mae_bench import recipes
    from mae_bench.reporting.record import one_line

    lines = []
    for kind, heading in (("backbone", "backbones"), ("task", "tasks")):
        if args.kind not in (None, heading):
            continue
        lines.append(heading)
        for name, path in sorted(recipes.index(kind).items()):  # type: ignore[arg-type]
            raw = recipes.read_toml(path)
            note = f"refused: {raw['refused']}" if raw.get("refused") else raw.get("summary", "")
            lines.append(f"  {name:<22} {one_line(note)}")
    if args.kind == "tables":  # needs pandas, which a list of recipes should not wait for
        from mae_bench import tabulate

        lines += ["tables", *(f"  {name:<22} {one_line(title)}" for name, title in sorted(tabulate.names().items()))]
    print("\n".join(lines))
    return 0


def show(args: argparse.Namespace) -> int:
    from mae_bench import recipes

    known = recipes.index("backbone")
    if args.name in known or (args.name.endswith(".toml") and Path(args.name).name != "task.toml"):
        if args.settings:
            raise UserError(f"--set changes a task's values; '{args.name}' is a backbone")
        backbone = recipes.load_backbone(args.name)
        print(f"backbone {backbone.name}   ({recipes.find('backbone', args.name)})")
        _print_nested(backbone.model_dump(mode="json"))
        return 0
    if args.name not in recipes.index("task") and "/" not in args.name and not args.name.endswith(".toml"):
        everything = [*known, *recipes.index("task")]
        raise UserError(
            f"unknown recipe '{args.name}'{nearest(args.name, everything)}; `python -m mae_bench list` shows all"
        )
    backbone = recipes.load_backbone(args.backbone)
    task = recipes.resolve_task(args.name, backbone, args.settings)
    print(f"task {task.task.name} for {backbone.name}   ({task.path})")
    print(f"protocol   {task.protocol}\nmetric     {task.task.metric}\nreference  {task.task.reference}\n")
    for key in type(task.values).model_fields:
        value = getattr(task.values, key)
        origin = task.origins[key]
        print(f"{key:<18} {json.dumps(value):<22} {origin.source}   [{origin.place}]")
    print(f"{'lr':<18} {task.values.lr:<22g} from base_lr, batch and lr_per")
    return 0


def _print_nested(value: dict[str, Any], indent: str = "") -> None:
    for key, inner in value.items():
        if isinstance(inner, dict):
            print(f"{indent}{key}")
            _print_nested(inner, indent + "  ")
        else:
            print(f"{indent}{key:<18} {json.dumps(inner)}")


def run(args: argparse.Namespace) -> int:
    from mae_bench import runs

    finished = runs.run(
        args.task, args.backbone, seeds=_seeds(args.seeds), settings=args.settings, options=_options(args)
    )
    _print_runs(finished)
    return 0


def pretrain(args: argparse.Namespace) -> int:
    from mae_bench import runs

    finished = runs.pretrain(
        args.backbone, task=args.task, seeds=_seeds(args.seeds), settings=args.settings, options=_options(args)
    )
    _print_runs(finished)
    return 0


def _print_runs(finished: list[Run]) -> None:
    from mae_bench.engine import distributed

    if not distributed.main_process():
        distributed.shutdown()
        return
    for one in finished:
        record = one.record
        value = "undefined" if record.value is None else f"{record.value:.4g}"
        print(f"{record.task} {record.backbone} seed {record.seed}: {record.metric} {value}   {record.protocol}")
        for note in record.notes:
            print(f"  note: {note}")
        print(f"  record: {one.record_file}")
    distributed.shutdown()


def fetch(args: argparse.Namespace) -> int:
    from mae_bench import fetch, recipes

    backbones = [recipes.load_backbone(name) for name in args.backbones]  # a misspelt one stops before any download
    for backbone in backbones:
        path = fetch.fetch(backbone, quiet=args.quiet)
        print(path)
        if (
            find_spec("torch") and backbone.architecture.rel_pos != "decomposed"
        ):  # a ViTDet has no meaning without a task
            from mae_bench.checkpoints.load import build_encoder

            print(build_encoder(backbone, path, seed=0)[1].line())  # loads it key by key, and locks it
    return 0


def inspect(args: argparse.Namespace) -> int:
    from mae_bench import recipes
    from mae_bench.checkpoints import inspection

    backbone = recipes.load_backbone(args.backbone) if args.backbone else None
    found = inspection.inspect(args.file, backbone, prove=args.prove)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.text())
    return 0 if found.sound else 1


def export(args: argparse.Namespace) -> int:
    from mae_bench import recipes
    from mae_bench.checkpoints import export

    for path in export.export(args.file, recipes.load_backbone(args.backbone), args.to, args.out):
        print(path)
    return 0


def cost(args: argparse.Namespace) -> int:
    from mae_bench import doctor, recipes

    doctor.require(recipes.load_task("imagenet_pretrain"))  # the next import needs torch
    from mae_bench import cost

    found = cost.estimate(args.task, args.backbone, args.settings, measure=not args.no_measure)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.text())
    return 0


def reconstruct(args: argparse.Namespace) -> int:
    from mae_bench import doctor, recipes

    doctor.require(recipes.load_task("imagenet_pretrain"))
    from mae_bench import reconstruct

    options = {"weights": args.weights, "mask_ratio": args.mask_ratio, "seed": args.seed}
    print(reconstruct.run(args.backbone, args.images, **options, out=args.out, device=args.device))
    return 0


def suite(args: argparse.Namespace) -> int:
    from mae_bench import suite
    from mae_bench.engine.job import Options

    if args.table:
        print(suite.table(args.name, tiny=args.tiny, only=args.only, out=args.out), end="")
        return 0
    options = Options(out=args.out, device=args.device, workers=args.workers, micro_batch=args.micro_batch)
    how = {"seeds": _seeds(args.seeds), "jobs": args.jobs, "dry_run": args.dry_run, "options": options}
    return 1 if suite.run(args.name, tiny=args.tiny, only=args.only, **how) else 0


def table(args: argparse.Namespace) -> int:
    from mae_bench import tabulate
    from mae_bench.reporting.files import write_whole

    if args.all or args.check:
        return _committed_tables(args)
    _check_records(args.records)
    if args.out is not None and args.out.suffix == ".json":
        raise UserError(f"--out {args.out}: .json files are records; name a table .md, .tex, .csv or .html")
    text = tabulate.text(
        args.name,
        args.records or (),
        form=args.format,
        layout=args.layout,
        rows=args.rows,
        columns=args.cols,
        metric=args.metric,
        compare=tuple(args.compare) if args.compare else None,
        stale=args.stale,
        links=args.out.parent.resolve() if args.out else None,
    )
    if args.out is None:
        print(text, end="")
        return 0
    try:
        write_whole(args.out, text)
    except OSError as error:
        raise UserError(f"cannot write --out {args.out}: {error.strerror}") from error
    return 0


def _check_records(paths: list[Path] | None) -> None:
    for path in paths or []:
        if not path.exists():
            raise UserError(f"--records {path}: no such file or folder")


def _committed_tables(args: argparse.Namespace) -> int:
    from mae_bench import places, tabulate

    word = "--check" if args.check else "--all"
    others = {"a name": args.name, "--records": args.records, "--rows": args.rows, "--cols": args.cols}
    others |= {"--layout": args.layout, "--metric": args.metric, "--compare": args.compare, "--out": args.out}
    others |= {"--stale": args.stale, "--format": args.format != "markdown"}
    if given := [name for name, value in others.items() if value]:
        raise UserError(f"table {word} is about every committed table; leave out {', '.join(given)}")
    root = places.checkout()
    if root is None:
        raise UserError(f"table {word} is about a checkout's tables; this is an installed wheel")
    lines = tabulate.check(root) if args.check else [str(path.relative_to(root)) for path in tabulate.write(root)]
    if lines:
        print("\n".join(lines))
    return int(args.check and bool(lines))


def report(args: argparse.Namespace) -> int:
    from mae_bench import tabulate
    from mae_bench.reporting import page

    _check_records(args.records)
    page.write(tabulate.report(args.records or (), only=args.only, stale=args.stale), args.out)
    print(args.out)
    return 0


def compare(args: argparse.Namespace) -> int:
    from mae_bench.reporting.compare import compare

    found = compare(args.first, args.second)
    print(json.dumps(found.as_dict(), indent=2, allow_nan=False) if args.json else found.text().rstrip())
    return 0


def gate(args: argparse.Namespace) -> int:
    from mae_bench import api, tabulate
    from mae_bench.reporting.gate import gate

    _check_records(args.records)
    paths = api.record_paths(args.records)
    text, code = gate(
        args.against, lambda metrics: tabulate.frame(paths, metrics), allow_missing=args.allow_missing, write=args.write
    )
    print(text, end="")
    return code


def publish(args: argparse.Namespace) -> int:
    from mae_bench import tabulate
    from mae_bench.reporting.publish import publish

    print("\n".join(publish(tabulate.frame(args.records), args.to, args.out)))
    return 0


def promote(args: argparse.Namespace) -> int:
    from mae_bench.reporting import transfer

    copied = transfer.promote(args.records, transfer.results_folder(args.into))
    if not copied.files:
        raise UserError(f"no records below {', '.join(map(str, args.records))}")
    _print_copied(copied)
    return 0


def import_results(args: argparse.Namespace) -> int:
    from mae_bench.reporting import transfer

    copied = transfer.import_records(args.paths, args.into)
    if not copied.files and not copied.identical:
        raise UserError(f"no records below {', '.join(map(str, args.paths))}")
    _print_copied(copied)
    print(f"{len(copied.files)} imported, {copied.identical} there already")
    return 0


def _print_copied(copied: Copied) -> None:
    for path in (*copied.files, *copied.pictures):
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    for note in copied.notes:
        print(f"note: {note}")


def check_results(args: argparse.Namespace) -> int:
    from mae_bench import places
    from mae_bench.reporting import check

    results = (places.checkout() or Path()) / "results"
    paths = args.paths or check.committed(results)
    if not paths:
        raise UserError(f"no records below {results.resolve()}: name folders or record files")
    found = check.check(paths)
    print(check.report(found))
    return int(check.failed(found))


def doctor(args: argparse.Namespace) -> int:
    from mae_bench import doctor

    if args.install and args.task:
        raise UserError("--install and --task are two commands: give one")
    if args.install:
        doctor.install_detectron2()
        return 0
    return doctor.report(args.task)


def quickstart(args: argparse.Namespace) -> int:
    from mae_bench import quickstart

    quickstart.run(args.out, _seeds(args.seeds))
    return 0
