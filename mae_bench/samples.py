"""``samples.png`` of a run: what its model makes of a few validation pictures, for people who look at its number."""

from __future__ import annotations

import sys
from pathlib import Path

from mae_bench.engine.job import Outcome

FILE = "samples.png"  # beside the record


def write(outcome: Outcome, folder: Path) -> None:
    """Draw and write the samples of a run whose record is complete, where its pipeline has any.

    What goes wrong here costs a picture and no number: it is said in one line on stderr, and the run has succeeded.
    """
    from mae_bench.checkpoints.save import atomic
    from mae_bench.data import drawing

    if outcome.samples is None:
        return
    try:
        content = drawing.encoded(outcome.samples())
        with atomic(folder / FILE) as part:
            part.write_bytes(content)
    # A full disk, a picture that has gone or become a bomb, memory that ran out, a fault of ours: whatever it is, the
    # number is on disk, and the other processes wait for this one.
    except Exception as error:  # noqa: BLE001
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"no {FILE} in {folder}, where the record is complete: {reason:.300}", file=sys.stderr, flush=True)
