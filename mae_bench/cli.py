"""The command line: parse, call one function, print. Nothing here imports torch."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mae_bench import __version__, commands
from mae_bench.engine.signals import EXIT_STOPPED, StoppedError
from mae_bench.errors import UserError, nearest

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


Command = Callable[[argparse.Namespace], int]
Add = Callable[[str, Command, str], argparse.ArgumentParser]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mae_bench", description="How well does this Masked Autoencoder transfer?", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"mae_bench {__version__}")
    group = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, function: Command, text: str) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=function)
        return command

    _add_runs(add)
    _add_weights(add)
    _add_results(add)
    _add_records(add)
    _add_whole(add)
    return parser


def _add_runs(add: Add) -> None:
    """Recipes, and training with them."""
    listing = add(
        "list", commands.list_recipes, "name every backbone and task recipe on the search path, or every table"
    )
    listing.add_argument("kind", nargs="?", choices=["backbones", "tasks", "tables"], help="only these")

    show = add("show", commands.show, "print a recipe as it resolves, with the origin of every value")
    show.add_argument("name", help="a task or backbone, by name or path")
    show.add_argument("--backbone", default="vit_b_mae", help="whose size and initialisation a task is resolved for")
    _add_settings(show)

    run = add("run", commands.run, "train and evaluate a backbone on a task, one record per seed")
    run.add_argument("--task", required=True)
    run.add_argument("--backbone", required=True)
    _add_run_options(run)
    run.add_argument("--eval-only", action="store_true", help="evaluate the trained model given with --weights")

    pretrain = add("pretrain", commands.pretrain, "pre-train a backbone; leaves encoder.safetensors")
    pretrain.add_argument("--backbone", required=True)
    pretrain.add_argument("--task", help="the pre-training task; default: the one the backbone's recipe names")
    _add_run_options(pretrain)


def _add_weights(add: Add) -> None:
    """Weight files, and what a Masked Autoencoder costs and shows."""
    fetch = add("fetch", commands.fetch, "bring the weights of backbones: resumable, hashed, into the weights folder")
    fetch.add_argument("backbones", nargs="+", metavar="BACKBONE")
    fetch.add_argument("--quiet", action="store_true", help="no progress display")

    inspect = add("inspect", commands.inspect, "say what a weight file holds, and whether it is what a backbone means")
    inspect.add_argument("file", type=Path)
    inspect.add_argument("--as", dest="backbone", metavar="BACKBONE", help="load it as this backbone, key by key")
    inspect.add_argument("--prove", action="store_true", help="compare features with the original implementation")
    inspect.add_argument("--json", action="store_true", help="everything as JSON")

    export = add("export", commands.export, "write an encoder in the layout of FAIR, timm or Hugging Face")
    export.add_argument("file", type=Path, help="a weight file of the backbone, e.g. a run's encoder.safetensors")
    export.add_argument("--backbone", required=True)
    export.add_argument("--to", required=True, choices=["fair", "timm", "hf"])
    export.add_argument("--out", required=True, type=Path, help="a new folder")

    cost = add("cost", commands.cost, "count what a recipe costs, and predict its hours from a few real steps")
    cost.add_argument("--backbone", required=True)
    cost.add_argument("--task", default="pretrain", help="a task; pretrain (default) means imagenet_pretrain")
    _add_settings(cost)
    cost.add_argument("--no-measure", action="store_true", help="by formula alone")
    cost.add_argument("--json", action="store_true", help="everything as JSON")

    pictures = add("reconstruct", commands.reconstruct, "show what a Masked Autoencoder predicts for pictures")
    pictures.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    pictures.add_argument("--backbone", required=True)
    pictures.add_argument("--weights", type=Path, help="a file with encoder and decoder instead of the recipe's")
    pictures.add_argument("--mask-ratio", type=float, help="share of hidden patches (default: the training's)")
    pictures.add_argument("--seed", type=int, default=0, help="of the masks")
    pictures.add_argument("--out", type=Path, default=Path("reconstructions.png"), help="the grid, a PNG")
    pictures.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def _add_results(add: Add) -> None:
    """What is made from records."""
    table = add("table", commands.table, "make a table from records, beside the published numbers")
    table.add_argument("name", nargs="?", default="", help="a paper's table or a suite (`list tables`); default: all")
    table.add_argument("--records", nargs="+", type=Path, help="record files or folders (default: results/runs)")
    table.add_argument("--format", choices=["markdown", "latex", "csv", "html"], default="markdown")
    table.add_argument("--layout", choices=["wide", "long", "full"], help="a column, a row, or all numbers of a cell")
    table.add_argument("--rows", default="", metavar="NAMES", help="of task,protocol,metric,backbone,init,size,seed")
    table.add_argument("--cols", default="", metavar="NAMES", help="the same, for columns")
    table.add_argument("--metric", help="instead of each task's primary one")
    table.add_argument("--compare", nargs=2, metavar=("INIT", "INIT"), help="difference of two initialisations")
    table.add_argument("--stale", action="store_true", help="take in runs whose recipe has changed since, marked")
    table.add_argument("--out", type=Path, help="write to this file instead of printing")
    whole = table.add_mutually_exclusive_group()
    whole.add_argument("--all", action="store_true", help="write every committed table and the README's")
    whole.add_argument("--check", action="store_true", help="exit code 1 where a committed table is out of date")

    report = add("report", commands.report, "write one HTML page of results that loads nothing else")
    report.add_argument("--records", nargs="+", type=Path, help="record files or folders (default: results/runs)")
    report.add_argument("--only", metavar="TEXT", help="runs whose task, backbone, protocol or id contains this")
    report.add_argument("--stale", action="store_true", help="take in runs whose recipe has changed since, marked")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")

    comparing = add("compare", commands.compare, "set two runs side by side: what differs, and whether the models do")
    comparing.add_argument("first", metavar="RUN", help="a record file, a run folder or a run id")
    comparing.add_argument("second", metavar="RUN")
    comparing.add_argument("--json", action="store_true", help="everything as JSON")

    gating = add("gate", commands.gate, "exit with 1 when a metric has fallen below its baseline by more than allowed")
    gating.add_argument("--against", type=Path, default=Path("results/baselines.json"), help="the baselines (JSON)")
    gating.add_argument("--records", nargs="+", type=Path, help="record files or folders (default: results/runs)")
    gating.add_argument("--allow-missing", action="store_true", help="a baseline without a run is no failure")
    gating.add_argument("--write", action="store_true", help="bring the file to what the records hold")

    sending = add("publish", commands.publish, "hand records to W&B, MLflow or a Hugging Face model card")
    sending.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    sending.add_argument("--to", required=True, choices=["wandb", "mlflow", "model-card"])
    sending.add_argument("--out", type=Path, help="file of the model card (default: MODEL_CARD.md)")


def _add_records(add: Add) -> None:
    """Records themselves."""
    promote = add("promote", commands.promote, "copy records into results/, to be committed on purpose")
    promote.add_argument("records", nargs="+", type=Path, help="record files or folders of runs")
    promote.add_argument("--into", type=Path, help="a folder below results/ (default: results/runs)")

    records = add("results", commands.check_results, "look over records, or take in those of another machine")
    actions = records.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=_Parser)
    text = "find duplicates, edits, old schemas, smoke runs and leftovers among records; exit code 1 at an error"
    checking = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    checking.add_argument("paths", nargs="*", type=Path, help="record files or folders (default: those below results/)")
    text = "check records of another machine and copy those that are new: all, or none"
    importing = actions.add_parser("import", help=text, description=text, allow_abbrev=False)
    importing.add_argument("paths", nargs="+", type=Path, help="record files or folders")
    importing.add_argument("--into", type=Path, default=Path("runs/imported"), help="(default: runs/imported)")
    importing.set_defaults(command=commands.import_results)


def _add_whole(add: Add) -> None:
    """Many runs at once, and this environment."""
    suite = add("suite", commands.suite, "pre-trainings and transfers of a suite file, each run once")
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

    doctor = add("doctor", commands.doctor, "say what is installed and found, and the command for what is missing")
    doctor.add_argument("--task", help="look only at what this task needs")
    doctor.add_argument(
        "--install", choices=["detectron2"], help="install what no package index offers for this Python"
    )

    quick = add(
        "quickstart",
        commands.quickstart,
        "pre-train a tiny MAE, run four tiny tasks x three initialisations, print a table",
    )
    quick.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    quick.add_argument("--seeds", default="0")


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
    parser.add_argument("--compile", action="store_true", help="train the blocks of the model by torch.compile")
    parser.add_argument(
        "--log", action="append", default=[], choices=["tensorboard", "wandb"], help="curves for another program"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress display")
