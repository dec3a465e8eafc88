"""The command line: parse, call one function, print. Nothing here imports torch."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_bench import __version__
from mae_bench.engine.signals import EXIT_STOPPED, StoppedError
from mae_bench.errors import UserError, nearest

if TYPE_CHECKING:
    from mae_bench.engine.job import Options
    from mae_bench.runs import Run

EXIT_USER_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are our one line, with the nearest known word."""

    def error(self, message: str) -> Any:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            word = message.removeprefix(prefix).split()[0]
            known = _option_strings(self)
            message = f"unknown argument '{word}'{nearest(word, known)}; see `{self.prog} --help`"
        raise UserError(message)


def _option_strings(parser: argparse.ArgumentParser) -> set[str]:
    """Options of the parser and of its commands."""
    known = set()
    for action in parser._actions:
        known |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            known |= {option for command in action.choices.values() for option in _option_strings(command)}
    return known


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 = done, 2 = the user can mend it (one line on stderr), 1 = a check failed, 75 = stopped by a
    signal and to be gone on with, 130 = Ctrl-C."""
    # timm and mmcv decorate functions with it at import; nothing a user can act on
    warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated", category=FutureWarning)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± or √ still gets the table
    try:
        args = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = args.command
        code = command(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"mae_bench: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except StoppedError as stopped:
        from mae_bench.engine import distributed

        if distributed.main_process():
            print(f"mae_bench: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print("mae_bench: interrupted; the same command goes on (run and pretrain: with --resume)", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (`| head`) has left
        return 0
    except OSError as error:  # a full disk, a path that cannot be: the system's words name it
        print(f"mae_bench: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mae_bench", description="How well does this Masked Autoencoder transfer?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"mae_bench {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=function)
        return command

    listing = add("list", _list, "name every backbone and task recipe on the search path")
    listing.add_argument("kind", nargs="?", choices=["backbones", "tasks"], help="only these")

    show = add("show", _show, "print a recipe as it resolves, with the origin of every value")
    show.add_argument("name", help="a task or backbone, by name or path")
    show.add_argument("--backbone", default="vit_b_mae", help="whose size and initialisation a task is resolved for")
    _add_settings(show)

    run = add("run", _run, "train and evaluate a backbone on a task, one record per seed")
    run.add_argument("--task", required=True)
    run.add_argument("--backbone", required=True)
    _add_run_options(run)
    run.add_argument("--eval-only", action="store_true", help="evaluate the trained model given with --weights")

    pretrain = add("pretrain", _pretrain, "pre-train a backbone; leaves encoder.safetensors")
    pretrain.add_argument("--backbone", required=True)
    pretrain.add_argument("--task", help="the pre-training task; default: the one the backbone's recipe names")
    _add_run_options(pretrain)

    fetch = add("fetch", _fetch, "bring the weights of backbones: resumable, hashed, into the weights folder")
    fetch.add_argument("backbones", nargs="+", metavar="BACKBONE")
    fetch.add_argument("--quiet", action="store_true", help="no progress display")

    inspect = add("inspect", _inspect, "say what a weight file holds, and whether it is what a backbone means")
    inspect.add_argument("file", type=Path)
    inspect.add_argument("--as", dest="backbone", metavar="BACKBONE", help="load it as this backbone, key by key")
    inspect.add_argument("--prove", action="store_true", help="compare features with the original implementation")
    inspect.add_argument("--json", action="store_true", help="everything as JSON")

    export = add("export", _export, "write an encoder in the layout of FAIR, timm or Hugging Face")
    export.add_argument("file", type=Path, help="a weight file of the backbone, e.g. a run's encoder.safetensors")
    export.add_argument("--backbone", required=True)
    export.add_argument("--to", required=True, choices=["fair", "timm", "hf"])
    export.add_argument("--out", required=True, type=Path, help="a new folder")

    cost = add("cost", _cost, "count what a recipe costs, and predict its hours from a few real steps")
    cost.add_argument("--backbone", required=True)
    cost.add_argument("--task", default="pretrain", help="a task; pretrain (default) means imagenet_pretrain")
    _add_settings(cost)
    cost.add_argument("--no-measure", action="store_true", help="by formula alone")
    cost.add_argument("--json", action="store_true", help="everything as JSON")

    pictures = add("reconstruct", _reconstruct, "show what a Masked Autoencoder predicts for pictures")
    pictures.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    pictures.add_argument("--backbone", required=True)
    pictures.add_argument("--weights", type=Path, help="a file with encoder and decoder instead of the recipe's")
    pictures.add_argument("--mask-ratio", type=float, help="share of hidden patches (default: the training's)")
    pictures.add_argument("--seed", type=int, default=0, help="of the masks")
    pictures.add_argument("--out", type=Path, default=Path("reconstructions.png"), help="the grid, a PNG")

    suite = add("suite", _suite, "pre-trainings and transfers of a suite file, each run once")
    suite.add_argument("name", help="a suite, by name or path")
    suite.add_argument("--tiny", action="store_true", help="its small form")
    suite.add_argument("--only", default="", metavar="PATTERN", help="cells whose name contains this")
    suite.add_argument("--seeds", default="0")
    suite.add_argument("--jobs", type=int, default=1, help="cells at once (default: 1)")
    suite.add_argument("--out", type=Path, default=Path("runs"))
    suite.add_argument("--dry-run", action="store_true", help="print the commands and what is done")
    suite.add_argument("--table", action="store_true", help="print the results beside the published numbers")
    suite.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    suite.add_argument("--workers", type=int, default=2)
    suite.add_argument("--micro-batch", type=int, default=0)

    table = add("table", _table, "make the comparison table from records, beside the published numbers")
    table.add_argument("--records", nargs="+", type=Path, help="record files or folders (default: results/runs)")
    table.add_argument("--format", choices=["markdown", "csv"], default="markdown")
    table.add_argument("--layout", choices=["wide", "long"], default="wide", help="a column or a row a cell")
    table.add_argument("--compare", nargs=2, metavar=("INIT", "INIT"), help="difference of two initialisations")
    table.add_argument("--out", type=Path, help="write to this file instead of printing")

    promote = add("promote", _promote, "copy records into results/runs, to be committed on purpose")
    promote.add_argument("records", nargs="+", type=Path, help="record files or folders of runs")

    doctor = add("doctor", _doctor, "say what is installed and found, and the command for what is missing")
    doctor.add_argument("--task", help="look only at what this task needs")
    doctor.add_argument(
        "--install", choices=["detectron2"], help="install what no package index offers for this Python"
    )

    quick = add(
        "quickstart", _quickstart, "pre-train a tiny MAE, run four tiny tasks x three initialisations, print the table"
    )
    quick.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    quick.add_argument("--seeds", default="0")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override a protocol value"
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser)
    parser.add_argument("--seeds", default="0", help="comma-separated, one run each (default: 0)")
    parser.add_argument("--data", type=Path, help="data root (default: $MAE_BENCH_DATA/<folder of the recipe>)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs are written (default: runs)")
    parser.add_argument("--weights", type=Path, help="weight file instead of the recipe's")
    parser.add_argument("--resume", action="store_true", help="go on with the newest run of the same recipe and seed")
    parser.add_argument("--smoke", action="store_true", help="two steps of the real graph on made data; never tabled")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--workers", type=int, default=2, help="data loading processes (default: 2)")
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="largest batch per device at once; accumulation makes up the rest"
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="under torchrun: spread weights and state over the processes"
    )
    parser.add_argument(
        "--log", action="append", default=[], choices=["tensorboard", "wandb"], help="curves for another program"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")


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
        log=tuple(args.log),
    )


def _list(args: argparse.Namespace) -> int:
    from mae_bench import recipes

    lines = []
    for kind, heading in (("backbone", "backbones"), ("task", "tasks")):
        if args.kind not in (None, heading):
            continue
        lines.append(heading)
        for name, path in sorted(recipes.index(kind).items()):  # type: ignore[arg-type]
            raw = recipes.read_toml(path)
            note = f"refused: {raw['refused']}" if raw.get("refused") else raw.get("summary", "")
            lines.append(f"  {name:<22} {note}")
    print("\n".join(lines))
    return 0


def _show(args: argparse.Namespace) -> int:
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


def _run(args: argparse.Namespace) -> int:
    from mae_bench import runs

    finished = runs.run(
        args.task, args.backbone, seeds=_seeds(args.seeds), settings=args.settings, options=_options(args)
    )
    _print_runs(finished)
    return 0


def _pretrain(args: argparse.Namespace) -> int:
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


def _fetch(args: argparse.Namespace) -> int:
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


def _inspect(args: argparse.Namespace) -> int:
    from mae_bench import recipes
    from mae_bench.checkpoints import inspection

    backbone = recipes.load_backbone(args.backbone) if args.backbone else None
    found = inspection.inspect(args.file, backbone, prove=args.prove)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.text())
    return 0 if found.sound else 1


def _export(args: argparse.Namespace) -> int:
    from mae_bench import recipes
    from mae_bench.checkpoints import export

    for path in export.export(args.file, recipes.load_backbone(args.backbone), args.to, args.out):
        print(path)
    return 0


def _cost(args: argparse.Namespace) -> int:
    from mae_bench import doctor, recipes

    doctor.require(recipes.load_task("imagenet_pretrain"))  # the next import needs torch
    from mae_bench import cost

    found = cost.estimate(args.task, args.backbone, args.settings, measure=not args.no_measure)
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.text())
    return 0


def _reconstruct(args: argparse.Namespace) -> int:
    from mae_bench import doctor, recipes

    doctor.require(recipes.load_task("imagenet_pretrain"))
    from mae_bench import reconstruct

    options = {"weights": args.weights, "mask_ratio": args.mask_ratio, "seed": args.seed, "out": args.out}
    print(reconstruct.run(args.backbone, args.images, **options))
    return 0


def _suite(args: argparse.Namespace) -> int:
    from mae_bench import suite
    from mae_bench.engine.job import Options

    if args.table:
        print(suite.table(args.name, tiny=args.tiny, only=args.only, out=args.out), end="")
        return 0
    options = Options(out=args.out, device=args.device, workers=args.workers, micro_batch=args.micro_batch)
    how = {"seeds": _seeds(args.seeds), "jobs": args.jobs, "dry_run": args.dry_run, "options": options}
    return 1 if suite.run(args.name, tiny=args.tiny, only=args.only, **how) else 0


def _table(args: argparse.Namespace) -> int:
    from mae_bench import api

    for path in args.records or []:
        if not path.exists():
            raise UserError(f"--records {path}: no such file or folder")
    if args.out is not None and args.out.suffix == ".json":
        raise UserError(f"--out {args.out}: .json files are records; a table is Markdown or CSV, name it .md or .csv")
    text = api.table(args.records, form=args.format, layout=args.layout, compare=args.compare)
    if args.out is None:
        print(text, end="")
        return 0
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --out {args.out}: {error.strerror}") from error
    return 0


def _promote(args: argparse.Namespace) -> int:
    from mae_bench import places
    from mae_bench.reporting import store

    root = places.checkout()
    if root is None:
        raise UserError("promote copies records into a checkout's results/runs; this is an installed wheel")
    promoted = store.promote(store.load_records(args.records), root / "results" / "runs")
    if not promoted:
        raise UserError(f"no records below {', '.join(map(str, args.records))}")
    for path in promoted:
        print(path.relative_to(root))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from mae_bench import doctor

    if args.install and args.task:
        raise UserError("--install and --task are two commands: give one")
    if args.install:
        doctor.install_detectron2()
        return 0
    return doctor.report(args.task)


def _quickstart(args: argparse.Namespace) -> int:
    from mae_bench import quickstart

    quickstart.run(args.out, _seeds(args.seeds))
    return 0
