"""What a pipeline is given and what it gives back. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mae_bench.recipes import ResolvedTask
from mae_bench.schema import Backbone

if TYPE_CHECKING:
    from PIL.Image import Image

    from mae_bench.data import Dataset


@dataclass(frozen=True)
class Options:
    """How a run is carried out. Nothing here may change a protocol's number except ``weights``, ``smoke`` and
    ``eval_only``, which the record states."""

    data: Path | None = None  # data root instead of $MAE_BENCH_DATA/<folder>
    out: Path = Path("runs")
    weights: Path | None = None  # encoder weights instead of the recipe's; with eval_only: the trained model
    eval_only: bool = False
    resume: bool = False
    smoke: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = 2  # data loading processes
    micro_batch: int = (
        0  # largest batch per device and forward pass; 0 = the protocol's. Accumulation makes up the rest
    )
    quiet: bool = False  # no progress display
    fsdp: bool = False  # spread weights, gradients and optimiser state over the processes (training only)
    compile: bool = False  # the model's blocks by torch.compile (training only)
    log: tuple[str, ...] = ()  # curves for other programs, beside log.txt: "tensorboard", "wandb"


@dataclass
class Job:
    """One run: task x backbone x seed. ``folder`` exists and belongs to this run alone.

    ``encoder_file`` is an already checked safetensors or .pth file in the layout that ``backbone.weights`` declares,
    or None for a from-scratch run (``checkpoints.load.build_encoder`` reads it). ``task.values`` are the protocol's
    values, already reduced where ``options.smoke`` is set.
    """

    task: ResolvedTask
    backbone: Backbone
    seed: int
    options: Options
    folder: Path
    dataset: Dataset
    encoder_file: Path | None
    notes: list[str] = field(default_factory=list)

    @property
    def foreign_data(self) -> bool:
        """Data that the protocol does not name: a folder given for made data, or a recipe that takes any data."""
        spec = self.task.task.data
        return self.options.data is not None if spec.made else not spec.expected

    @property
    def data_matches(self) -> bool:
        """The data are those that the protocol names."""
        return self.dataset.matches and not self.foreign_data

    @property
    def protocol(self) -> str:
        """Protocol id of the run: overrides, other data and smoke runs leave the published protocol's column."""
        protocol = self.task.protocol
        if not self.options.smoke and not self.data_matches:
            protocol += f"+data:{self.dataset.fingerprint[:8]}"
        return protocol + ("+smoke" if self.options.smoke else "")

    @property
    def identity(self) -> dict[str, str]:
        """What a trained model's file says of its run, and an evaluation of it must share: the protocol with every
        overridden value, and whether anything was trained at all."""
        return {"protocol": self.task.protocol, "smoke": str(self.options.smoke)}

    @property
    def origin(self) -> dict[str, str]:
        """What the file of an encoder that this run trained says of where it comes from."""
        backbone = self.backbone
        stated = {
            "task": self.task.task.name,
            "backbone": backbone.name,
            "init": backbone.init,
            "input": backbone.input.model_dump_json(),
            "data": json.dumps(
                {
                    "name": self.dataset.name,
                    "fingerprint": self.dataset.fingerprint,
                    "matches": self.data_matches,
                }
            ),
        }
        return stated | self.identity

    def note(self, message: str) -> None:
        """Say something that a reader of the number must know (a fallback, a skipped image); kept in the record."""
        if message not in self.notes:
            self.notes.append(message)


@dataclass
class Outcome:
    """What a pipeline measured.

    ``metrics`` are the values after the last step: they are the result. ``best`` holds, per metric, the best value of
    all evaluations and stands beside it only. Percentages are in [0, 100].
    """

    metrics: dict[str, float]
    best: dict[str, float] = field(default_factory=dict)
    # {"step", "loss", "lr"} points and {"step", <metric>…} evaluations, thinned to at most 1000 points
    history: list[dict[str, float]] = field(default_factory=list)
    # what the recipe came to on this machine: lr, steps, batch, micro_batch, accumulation, precision, device, …
    effective: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)  # LoadReport.as_dict() of the encoder
    parameters: dict[str, int] = field(default_factory=dict)  # {"total", "trainable"}
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)  # class name -> metric -> value
    baseline: dict[str, float] = field(
        default_factory=dict
    )  # metric -> value of a trivial prediction (majority, empty)
    # classification: sha256 of the validation pictures' names, and in the same order whether each one was right
    images: tuple[str, list[bool]] | None = None
    weights: Path | None = None  # the trained model, safetensors, in the run folder
    # Draws what the evaluated model makes of a few validation pictures; called once the number is on disk, in the main
    # process alone. None where there is nothing to look at.
    samples: Callable[[], Image] | None = field(default=None, compare=False)


Pipeline = Callable[[Job], Outcome]
