"""``python -m mae_bench cost``: what a recipe costs by formula, and a prediction of its hours from a few real steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mae_bench import provenance, recipes
from mae_bench.encoders.vit import random_encoder
from mae_bench.engine import distributed, onednn
from mae_bench.engine.job import Options
from mae_bench.engine.optim import build_optimizer, parameter_groups
from mae_bench.engine.plan import make_plan
from mae_bench.engine.precision import autocast
from mae_bench.pretraining.cost import PLAIN, Cost, encoder, grid_of, memory, pretraining, total, training_macs
from mae_bench.pretraining.images import Noise, collate
from mae_bench.pretraining.objectives import build_model, refuse_idle, refuse_variants, training_grid
from mae_bench.recipes import ResolvedTask
from mae_bench.schema import Backbone, PretrainingValues

PRETRAIN = "imagenet_pretrain"  # what `--task pretrain` means
BUDGET = 20.0  # seconds that a measurement may take
REPEATS = (3, 30)  # of a measured step: at least, and at most
LARGEST_BATCH = {"cpu": 64, "cuda": 256}
RANGE = ("least", "median", "most")  # of the repeats
NOT_COUNTED = {
    "pretraining": "reading pictures, evaluation",
    "classification": "the classifier",
    "detection": "pyramid, proposals and heads of Mask R-CNN",
    "segmentation": "pyramid and heads of UperNet, sliding windows at evaluation",
}


@dataclass(frozen=True)
class Counted:
    """Costs by part: of this code's step, and of FAIR's where that is another one."""

    grid: tuple[int, int]
    patch: int
    parts: dict[str, Cost]
    training: int  # MACs per image, forward and backward
    plain: dict[str, Cost] | None = None
    memory: tuple[int, int] | None = None  # bytes whatever the batch, and per image; None = not estimated
    speed_up: tuple[float, float] | None = None  # over mask tokens in the encoder: this step, and FAIR's


@dataclass(frozen=True)
class Measured:
    """Seconds on this machine. The ranges are those of the repeats."""

    device: str
    precision: str
    batch: int
    repeats: int
    per_image: tuple[float, float, float]  # forward and backward: least, median, most
    per_update: float  # of the optimiser

    def hours(self, images: int, steps: int) -> tuple[float, float, float]:
        """A prediction for this device alone: least, median, most."""
        least, median, most = ((images * each + steps * self.per_update) / 3600 for each in self.per_image)
        return least, median, most


@dataclass(frozen=True)
class Estimate:
    """What ``cost`` prints."""

    backbone: str
    task: str
    protocol: str
    how: str  # optimiser and precision
    counted: Counted
    not_counted: str
    steps: int | None  # None: the recipe takes any data, whose size sets the length
    images: int | None  # that all steps consume
    measured: Measured | None
    unmeasured: str  # why there is no measurement

    @property
    def prediction(self) -> tuple[float, float, float] | None:
        """Hours of the whole recipe on this device alone: least, median, most."""
        if self.measured is None or self.steps is None or self.images is None:
            return None
        return self.measured.hours(self.images, self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        hours = dict(zip(RANGE, self.prediction, strict=True)) if self.prediction else None
        macs = total(self.counted.parts.values()).macs
        return asdict(self) | {"macs_per_image": macs, "predicted_hours_on_this_device": hours}

    def text(self) -> str:
        """For people."""
        counted = self.counted
        (h, w), patch = counted.grid, counted.patch
        head = f"{self.backbone}, {self.task}   {self.protocol}"
        size = f"  {h * patch} x {w * patch} pixels, {h * w} patches of {patch}"
        facts = [(name, value) for name, value in self._facts() if value]
        return "\n".join([head, size, "", *_table(counted), "", *(f"  {name:<12} {value}" for name, value in facts)])

    def _facts(self) -> list[tuple[str, str]]:
        counted, one = self.counted, self.measured
        facts = []
        if counted.speed_up:
            here, plain = (f"{ratio:.2f} x" for ratio in counted.speed_up)
            facts.append(("speed-up", f"{here} fewer MACs than with mask tokens in the encoder (plain: {plain})"))
        if counted.memory:
            fixed, each = map(_bytes, counted.memory)
            facts.append(("memory", f"{fixed} and {each} an image of the micro batch ({self.how}; an estimate)"))
        length = "epochs of whatever data there is"
        if self.steps is not None and self.images is not None:
            flops = 2 * counted.training * self.images
            length = f"{self.steps:,} steps, {self.images:,} images, {flops:.2e} FLOPs"
        facts += [("length", length), ("not counted", self.not_counted)]
        if one is None:
            return [*facts, ("measured", self.unmeasured)]
        least, median, most = (f"{each:.3g}" for each in one.per_image)
        speed = f"{median} s an image ({least} to {most}, {one.repeats} repeats), {one.per_update:.2g} s an update"
        facts += [("measured", speed), ("", f"{one.device}, {one.precision}, batch {one.batch}")]
        if self.prediction:
            least, median, most = map(_hours, self.prediction)
            facts.append(("prediction", f"{median} ({least} to {most}) on this device alone, at that speed throughout"))
        return facts


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _hours(hours: float) -> str:
    """Three digits that mean something."""
    if hours < 1:
        return f"{60 * hours:.3g} minutes"
    return f"{float(f'{hours:.3g}'):,.0f} hours" if hours >= 100 else f"{hours:.3g} hours"


def _table(counted: Counted) -> list[str]:
    plain, whole = counted.plain or {}, total(counted.parts.values())
    unit, name = (1e9, "GMACs") if whole.macs >= 1e8 else (1e6, "MMACs")

    def line(title: str, macs: Iterable[int], parameters: str) -> str:
        return f"  {title:<22}" + "".join(f"{count / unit:>10.3f}" for count in macs) + f"{parameters:>16}"

    def both(title: str) -> list[int]:
        return [parts[title].macs for parts in (plain, counted.parts) if parts]

    rows = [line(title, both(title), f"{part.parameters:,}") for title, part in counted.parts.items() if part != Cost()]
    forward = [total(parts.values()).macs for parts in (plain, counted.parts) if parts]
    training = [training_macs(plain), counted.training] if plain else [counted.training]
    heading = f"  {name + ' per image':<22}" + "".join(
        f"{title:>10}" for title in ("plain", "here") if plain or title == "here"
    )
    rows += [line("forward", forward, f"{whole.parameters:,}"), line("a training step", training, "")]
    return [f"{heading}{'parameters':>16}", *(row.rstrip() for row in rows)]


def estimate(task: str, backbone: str, settings: Iterable[str] = (), *, measure: bool = True) -> Estimate:
    """Costs of a task for a backbone. With ``measure`` a pre-training step is timed here, for about ``BUDGET`` seconds.

    Raises:
        UserError: an unknown name or value, a size that the backbone does not take.
    """
    recipe = recipes.load_backbone(backbone)
    resolved = recipes.resolve_task(PRETRAIN if task == "pretrain" else task, recipe, list(settings))
    counted = count(recipe, resolved)
    steps, images = _length(resolved)
    values, engine = resolved.values, resolved.task.engine
    measured, why = None, "not asked for" if not measure else f"not done for {engine}: its heads would be missing"
    if measure and engine == "pretraining":
        measured, why = _measure(recipe, values, counted)
    return Estimate(
        backbone=recipe.name,
        task=resolved.task.name,
        protocol=resolved.protocol,
        how=f"{values.optimizer}, {values.precision}",
        counted=counted,
        not_counted=NOT_COUNTED[engine] + ", the tokenizer" * (getattr(values, "target", "") == "tokens"),
        steps=steps,
        images=images,
        measured=measured,
        unmeasured=why,
    )


def count(recipe: Backbone, task: ResolvedTask) -> Counted:
    """The formula for a task: the whole pre-training step, and of other tasks the encoder at their image size."""
    architecture, values, engine = recipe.architecture, task.values, task.task.engine
    if engine == "pretraining":
        return _pretraining(recipe, values)
    patch = getattr(values, "patch", 0) or architecture.patch
    grid = grid_of(architecture, values.image_size, values.image_size, patch)
    if engine == "classification":
        parts = encoder(architecture, grid)
        if values.mode == "linear":  # frozen: forward alone
            return Counted(grid, patch, parts, total(parts.values()).macs)
        return Counted(
            grid, patch, parts, training_macs(parts), memory=memory(parts.values(), values, values.precision)
        )
    options: dict[str, Any] = {"final_norm": False}
    if engine == "detection":
        options |= {"patch": patch, "table": (architecture.grid, architecture.grid), "class_token": False}
        options |= {"window": values.window, "global_blocks": values.global_blocks}
        options["rel_pos"] = "decomposed" if values.rel_pos else "none"
    else:
        options |= {"blocks": max(values.taps) + 1, "layer_scale": values.layer_scale > 0}
        options["rel_pos"] = "bias" if values.rel_pos else "none"
    parts = encoder(architecture, grid, **options)
    return Counted(grid, patch, parts, training_macs(parts))


def _pretraining(recipe: Backbone, values: PretrainingValues) -> Counted:
    refuse_variants(recipe)
    refuse_idle(values)
    architecture = recipe.architecture
    grid = training_grid(values, architecture)
    parts, plain = pretraining(architecture, values), pretraining(architecture, values, PLAIN)
    speed_up = None
    if values.objective == "masked":
        everywhere = values.model_copy(update={"mask_tokens": "encoder", "decoder": "self", "predict": 1.0})
        with_tokens = pretraining(architecture, everywhere), pretraining(architecture, everywhere, PLAIN)
        ours, fair = (
            total(more.values()).macs / total(less.values()).macs
            for more, less in zip(with_tokens, (parts, plain), strict=True)
        )
        speed_up = ours, fair
    return Counted(
        grid,
        architecture.patch,
        parts,
        training_macs(parts),
        plain,
        memory(parts.values(), values, values.precision),
        speed_up,
    )


def _length(task: ResolvedTask) -> tuple[int | None, int | None]:
    """Optimiser steps and images of the whole recipe, where it names the size of its data."""
    values = task.values
    pictures = task.task.data.expected.get("train", 0) or (values.batch if values.steps else 0)
    if not pictures:
        return None, None
    plan = make_plan(values, pictures * getattr(values, "repeats", 1), Options(), world_size=1)
    return plan.steps, plan.steps * plan.batch


def _measure(recipe: Backbone, values: PretrainingValues, counted: Counted) -> tuple[Measured | None, str]:
    """Time real steps of random pictures, or say why not."""
    device = distributed.device(Options())
    precision = values.precision if device.type == "cuda" else "fp32"
    fixed, each = memory(counted.parts.values(), values, precision)
    room = (_free_bytes(device) * 0.8 - fixed) / each
    if room < 1:
        return None, f"a step needs {(fixed + each) / 1e9:.1f} GB, more than is free here"
    step, update = _work(recipe, values, counted, device)
    begin = time.monotonic()
    step(1)
    first = _seconds(lambda: step(1), device)
    wanted = min(LARGEST_BATCH[device.type], values.batch, room, BUDGET / 8 / first)
    batch = 1 << max(0, int(wanted).bit_length() - 1)
    step(batch)
    update()
    updating = _seconds(update, device)
    times: list[float] = []
    while len(times) < REPEATS[0] or (len(times) < REPEATS[1] and time.monotonic() - begin < BUDGET):
        times.append(_seconds(lambda: step(batch), device) / batch)
    name = f"{provenance.hardware()['cpu']}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    span = min(times), statistics.median(times), max(times)
    return Measured(name, precision, batch, len(times), span, updating), ""


def _work(
    recipe: Backbone, values: PretrainingValues, counted: Counted, device: torch.device
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Forward and backward pass of some pictures, and an update."""
    grid, patch = counted.grid, counted.patch
    sincos = recipe.architecture.positions == "sincos"
    encoder = random_encoder(recipe.architecture, 0, grid=grid, drop_path=values.drop_path, frozen_positions=sincos)
    model = build_model(encoder, recipe.input, values, 0).to(device).train()
    if device.type == "cpu":
        onednn.accelerate(model)  # as in a run
    optimizer = build_optimizer(parameter_groups(model, values, encoder_prefix="encoder.", depth=encoder.depth), values)
    noise = Noise(grid, patch, values)

    @cache
    def pictures(batch: int) -> dict[str, torch.Tensor]:
        shape = (3, grid[0] * patch, grid[1] * patch)
        samples: Any = [(torch.randint(0, 256, shape, dtype=torch.uint8), *noise()) for _ in range(batch)]
        return collate(samples)

    def step(batch: int) -> None:
        data = model.data_preprocessor(pictures(batch))
        with autocast(device, values.precision):
            loss = model(**data, mode="loss")["loss"]
        loss.backward()

    return step, optimizer.step


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begin = now()
    work()
    return now() - begin


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
