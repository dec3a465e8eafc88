"""What happens at a loss, gradient or weight that is not finite: the run ends, or goes back and leaves a step out.

``on_nonfinite = "rewind"`` takes the newest resume file and leaves out the step that made the fault: its images are not
seen, the weights stay as they were before it, and every other step keeps its number, its images and its lr. All
processes come to the same verdict, from what they have exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mae_bench.engine import distributed
from mae_bench.engine.precision import Gradient, broken_weights
from mae_bench.engine.state import Run
from mae_bench.errors import UserError

MAX_REWINDS = 10  # steps that a run may leave out: a sound one leaves out none, a broken picture costs one an epoch
SHOWN_IMAGES = 8
MEND = "lower base_lr, set clip_grad, or use --set precision=bf16 or fp32"


@dataclass(frozen=True)
class Fault:
    """What is not finite, e.g. "loss is nan", and the step that made it."""

    step: int
    what: str
    images: str = ""  # ", images a.jpg, b.jpg and 6 more"


def of_weights(run: Run) -> Fault | None:
    """Weights that are not finite, in any process: the work of the step just done. Collective."""
    names = [name for name in distributed.gather_objects(broken_weights(run.module)) if name]
    return Fault(max(0, run.step - 1), f"weights of {names[0]} are not finite") if names else None


def of_step(run: Run, gradient: Gradient) -> Fault:
    """What ``gradient`` has found, with the images of the forward passes whose loss is not finite, or else of the whole
    step. Where the weights are broken already, it is the step before. Collective."""
    if (fault := of_weights(run)) is not None:
        return fault
    found = [what for what in distributed.gather_objects(gradient.fault) if what]
    first = min(found, key=lambda what: not what.startswith("loss"))  # others see the gradient that came of it
    bad = [number for number, loss in enumerate(gradient.losses) if not math.isfinite(loss)]
    if not any(distributed.gather_objects(bad)):
        bad = list(range(run.plan.accumulation))
    return Fault(run.step, first, _images(run, bad))


def _images(run: Run, passes: list[int]) -> str:
    """The images of these forward passes of this process, and of those that the other processes name."""
    indices = [index for number in passes for _, index in run.sampler.keys(run.step, number)]
    mine = [run.describe(index) for index in indices[:SHOWN_IMAGES]]
    gathered = distributed.gather_objects((mine, len(indices)))
    shown = [name for names, _ in gathered for name in names][:SHOWN_IMAGES]
    more = sum(count for _, count in gathered) - len(shown)
    return f", images {', '.join(shown)}" + (f" and {more} more" if more else "")


def leave_out(run: Run, fault: Fault) -> None:
    """Mark the step to be left out.

    Raises:
        UserError: the protocol stops here; or going back cannot help, since no step beyond the last one left out was
            done, or too many have been left out.
    """
    last = max(run.skipped, default=-2)
    if run.values.on_nonfinite == "stop":
        mend = f"{MEND}; or leave such steps out with --set on_nonfinite=rewind"
    elif fault.step <= last + 1:
        mend = f"leaving out step {last} has not helped, so the weights are the cause and not the images: {MEND}"
    elif len(run.skipped) == MAX_REWINDS:
        mend = f"{MAX_REWINDS} steps have been left out before it: {MEND}"
    else:
        run.skipped[fault.step] = fault.what + fault.images
        return
    raise UserError(f"the {fault.what} at step {fault.step}{fault.images}; {mend}")


def note(run: Run) -> None:
    """Say in the record what was left out."""
    if run.skipped:
        steps = ", ".join(f"step {step} ({why})" for step, why in sorted(run.skipped.items()))
        count = f"{len(run.skipped)} step" + ("s" if len(run.skipped) > 1 else "")
        run.job.note(f"{count} left out after a loss that was not finite: {steps}")
