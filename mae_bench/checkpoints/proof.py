"""What shows that a weight file means what it meant before: the features of one fixed picture, and a lock beside it.

A loaded tensor may have the right name and shape and still be read wrongly: transposed, with other heads, after another
normalisation. The output of the encoder on a known picture changes with any of them. ``remember`` keeps that output
and the file's hash beside the file when it is first seen, and compares them afterwards (trust on first use, as ssh
does with host keys).
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import Field
from torch import Tensor, nn

from mae_bench.encoders.vit import Encoder
from mae_bench.errors import UserError
from mae_bench.recipes import digest
from mae_bench.schema import Backbone, Input
from mae_bench.schema.base import Strict

CHANNELS = 8  # of the class token, and as many of the mean patch token
# Largest difference of two fingerprints, relative to the largest of the numbers. In float32 other kernels and threads
# move them by at most 1e-5; what docs/proof.md lists as read wrongly moves them by 0.08 and more.
TOLERANCE = 1e-3
MAX_LOCK_BYTES = 1 << 14


class Lock(Strict):
    """What was seen when a weight file was first loaded: the content of ``<file>.proof.json``."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)  # bytes
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")  # UTC
    url: str = Field(max_length=4096)  # that the recipe gives; "" = none
    recipe: str = Field(pattern="^[0-9a-f]{64}$")  # what the fingerprint depends on beside the file, as a hash
    fingerprint: list[float] = Field(min_length=1, max_length=64)


def picture(size: int) -> Tensor:
    """(1,3,S,S) in [0,1]: waves, a ramp and a disc with a hard edge, different in each channel.

    Values are whole 255ths, so the last bits of a machine's sine do not show: the odd constants keep all values of
    sizes up to 1024 clear of the halves between. It looks the same at every size.
    """
    at_S = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    y_SS, x_SS = torch.meshgrid(at_S, at_S, indexing="ij")
    disc_SS = ((y_SS - 0.55) ** 2 + (x_SS - 0.4) ** 2 < 0.0607).double()
    red_SS = 0.5037 + 0.1987 * torch.sin(2 * math.pi * (3 * x_SS + y_SS)) + 0.2011 * (x_SS - y_SS)
    green_SS = 0.5041 + 0.1979 * torch.sin(2 * math.pi * (5 * y_SS - 2 * x_SS)) - 0.2503 * disc_SS
    blue_SS = 0.2969 + 0.1993 * torch.sin(2 * math.pi * (4 * x_SS + 7 * y_SS)) + 0.4027 * disc_SS
    channels_3SS = torch.stack([red_SS, green_SS, blue_SS])
    return ((channels_3SS * 255).round() / 255).float()[None]


def normalised(images: Tensor, statistics: Input) -> Tensor:
    """(B,3,H,W) in [0,1] -> as the weights expect them."""
    mean_311, std_311 = (torch.tensor(values).view(3, 1, 1) for values in (statistics.mean, statistics.std))
    return (images - mean_311) / std_311


def features(encoder: Encoder, images: Tensor) -> Tensor:
    """(1,3,H,W), normalised -> (1,[prefix+]N,D): ``Encoder.tokens`` in evaluation mode and float32.

    Where the encoder norms the mean of the patch tokens, that vector follows as a last row.
    """
    training = encoder.training
    encoder.eval()
    try:
        with torch.inference_mode(), torch.autocast(images.device.type, enabled=False):
            tokens_1ND = encoder.tokens(images)
            if isinstance(encoder.fc_norm, nn.Identity):
                return tokens_1ND
            return torch.cat([tokens_1ND, encoder.pooled(tokens_1ND, "mean")[:, None]], dim=1)
    finally:
        encoder.train(training)


def fingerprint(encoder: Encoder, statistics: Input) -> list[float]:
    """16 numbers of an encoder on the CPU: channels of the class token (without one: of the mean patch token), then
    others of the mean patch token, each with five significant digits.

    ``encoder`` is the plain one, as ``build_encoder`` gives it without options; the picture has the size and the
    normalisation of its pre-training.
    """
    rows_ND = features(encoder, normalised(picture(encoder.architecture.image_size), statistics))[0]
    tokens = encoder.prefix + encoder.architecture.grid**2
    mean_D = rows_ND[-1] if len(rows_ND) > tokens else rows_ND[encoder.prefix :].mean(dim=0)
    first_D = rows_ND[0] if encoder.prefix else mean_D
    step = encoder.width / CHANNELS
    chosen = [first_D[int(number * step)] for number in range(CHANNELS)]
    chosen += [mean_D[int((number + 0.5) * step)] for number in range(CHANNELS)]
    return [float(f"{value.item():.5g}") for value in chosen]


def check_finite(path: Path, found: list[float]) -> None:
    """A UserError where weights that are finite give features that are not."""
    if not all(map(math.isfinite, found)):
        raise UserError(f"{path}: its features of the fixed picture are not finite; it is damaged, fetch it again")


def deviation(found: list[float], meant: list[float]) -> float:
    """Largest difference of two fingerprints, relative to the largest number of ``meant``; infinite where they cannot
    be compared."""
    if len(found) != len(meant) or not all(map(math.isfinite, [*found, *meant])):
        return math.inf
    largest = max(map(abs, meant)) or 1.0
    return max(abs(one - other) for one, other in zip(found, meant, strict=True)) / largest


def check_fingerprint(path: Path, found: list[float], meant: list[float], what: str) -> None:
    """A UserError where ``found`` differs from ``meant`` by more than ``TOLERANCE``; ``what`` names where ``meant``
    stands."""
    difference = deviation(found, meant)
    if difference > TOLERANCE:
        raise UserError(
            f"{path}: its features of the fixed picture differ from {what} by {difference:.2g} (at most {TOLERANCE:g}, "
            f"relative): they begin {_first(found)}, not {_first(meant)}; the tensors, the architecture or the mean "
            f"and std are others than meant: `python -m mae_bench inspect {path} --as BACKBONE --prove` compares with "
            "the original implementation"
        )


def _first(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers[:3])


def lock_file(path: Path) -> Path:
    """Where the lock of a weight file stands."""
    return path.with_name(path.name + ".proof.json")


def read_lock(path: Path) -> Lock | None:
    """The lock of a weight file, or None where there is none. A damaged one is a UserError."""
    lock = lock_file(path)
    try:
        with lock.open("rb") as file:
            content = file.read(MAX_LOCK_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {lock}: {error.strerror}; delete it, it will be made anew") from error
    try:
        if len(content) <= MAX_LOCK_BYTES:
            return Lock.model_validate_json(content)
    except ValueError:  # not JSON, or not our keys
        pass
    raise UserError(f"{lock} is damaged, it does not say when {path.name} was first seen; delete it")


def remember(path: Path, backbone: Backbone, sha256: str, found: list[float]) -> str:
    """Compare a weight file with when it was first seen, or lock it now. Returns e.g. "first seen 2026-11-30", or ""
    where its folder takes no lock.

    The hash must be equal, and the fingerprint too where the recipe has the same architecture, mean and std as then.
    Processes that see a file at the same time agree on one lock.
    """
    weights = backbone.weights
    check_finite(path, found)
    now = Lock(
        sha256=sha256,
        size=path.stat().st_size,
        date=datetime.now(UTC).date().isoformat(),
        url=weights.url if weights.kind == "file" else "",
        recipe=digest({"architecture": backbone.architecture, "input": backbone.input}),
        fingerprint=found,
    )
    lock = read_lock(path) or _create(path, now)
    if lock is None:
        return "not locked: its folder takes no lock"
    if lock.sha256 != sha256:
        raise UserError(
            f"{path} is not the file first seen {lock.date}: sha256 was {lock.sha256[:12]}… ({lock.size} bytes) and is "
            f"{sha256[:12]}… ({now.size} bytes); fetch it again, or if you replaced it on purpose delete "
            f"{lock_file(path)}"
        )
    if lock.recipe != now.recipe:
        return f"first seen {lock.date} under another architecture, mean or std"
    check_fingerprint(path, found, lock.fingerprint, f"those first seen {lock.date} (in {lock_file(path).name})")
    return f"first seen {lock.date}"


def _create(path: Path, lock: Lock) -> Lock | None:
    """Write a lock whole or not at all; another process's, where it was faster. None: the folder takes none."""
    with suppress(OSError), TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        part = Path(folder) / "lock"
        part.write_text(lock.model_dump_json(indent=2) + "\n", encoding="utf-8")
        with suppress(FileExistsError):
            os.link(part, lock_file(path))
        return read_lock(path)
    return None
