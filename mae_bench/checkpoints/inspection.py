"""What a weight file holds, whether it is what a backbone means, and whether the original implementation agrees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mae_bench import recipes
from mae_bench.checkpoints import proof
from mae_bench.checkpoints.files import json_metadata, read_tensors
from mae_bench.checkpoints.findings import Comparison, Declared, Inspection, TensorLine
from mae_bench.checkpoints.layouts import Found, describe, detect, facts
from mae_bench.checkpoints.load import LoadReport, build_encoder
from mae_bench.checkpoints.originals import RefusedError, UnavailableError, original_features, windows
from mae_bench.encoders.vit import Encoder, EncoderOptions
from mae_bench.errors import UserError
from mae_bench.hashing import check_hash, file_hash
from mae_bench.schema import Architecture, Backbone

# Largest difference of two features in float32; relative to their root mean square where that is more than 1.
LIMIT = 1e-4
MAX_WINDOW = 64  # patches along one side; ViTDet's have 14
# The order of an encoder's tensors in the output: by the first part of the name, and in a block by the third.
TOPS = ("cls_token", "reg_token", "pos_embed", "patch_embed", "blocks", "norm", "fc_norm")
IN_BLOCK = ("norm1", "attn", "ls1", "norm2", "mlp", "ls2")


def inspect(path: Path, backbone: Backbone | None, *, prove: bool) -> Inspection:
    """Read a weight file without running any code in it, and say what it is.

    With ``backbone`` it is loaded as that one, key by key. ``prove`` runs the original implementation beside ours.

    Raises:
        UserError: the file is damaged or unsafe, its layout is unknown, or it is not what the backbone means.
    """
    tensors, metadata = read_tensors(path)
    found = detect(path, tensors, metadata)
    stated = json_metadata(metadata, "architecture") | ({"heads": found.heads} if found.heads else {})
    fits = [] if backbone else _fits(found, stated)
    if prove and backbone is None:
        such = fits[0] if fits else "BACKBONE"
        raise UserError(f"--prove needs what no file holds, e.g. the mean and std of its pixels: add --as {such}")
    sha256 = file_hash(path)
    declared = comparison = None
    if backbone is not None:
        options = _options(path, found, backbone.architecture)
        # Another fingerprint than the recipe's is a finding here, and no reason to stop before looking further.
        lenient = backbone.model_copy(update={"fingerprint": []})
        encoder, report = build_encoder(lenient, path, seed=0, **options)
        declared = _declared(path, sha256, backbone, encoder, report)
        if prove:
            comparison = _compare(found, tensors, encoder, backbone)
    return Inspection(
        file=path.name,
        size=path.stat().st_size,
        sha256=sha256,
        wrapper=metadata.get("wrapper", ""),
        beside=metadata.get("beside", ""),
        layout=found.layout,
        detail=found.detail,
        prefix=found.prefix,
        encoder=describe(found.encoder),
        facts=facts(found.encoder) | ({"heads": found.heads} if found.heads else {}),
        parameters=sum(tensor.numel() for tensor in found.encoder.values()),
        tensors=[
            _line(name, found.sources.get(name, [name]), found.encoder[name])
            for name in sorted(found.encoder, key=_place)
        ],
        changes=found.changes,
        unused=found.unused,
        fits=fits,
        declared=declared,
        comparison=comparison,
    )


def _place(name: str) -> tuple[int, int, int]:
    top, *rest = name.split(".")
    if top != "blocks":
        return TOPS.index(top), 0, 0
    return TOPS.index(top), int(rest[0]), IN_BLOCK.index(rest[1])


def _line(name: str, sources: list[str], tensor: Tensor) -> TensorLine:
    values = tensor.float()
    mean = std = None
    if not values.numel():
        note = "empty"
    elif not values.isfinite().all():
        note = "NaN or infinite"
    else:
        low, high = values.aminmax()
        note = "" if low < high or values.numel() == 1 else "constant" if high else "all zero"
        std, mean = (_finite(number.item()) for number in torch.std_mean(values, correction=0))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorLine(name, sources, list(tensor.shape), dtype, mean, std, note)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _fits(found: Found, stated: dict[str, Any]) -> list[str]:
    """Names of the recipes whose weights have this layout and these shapes, and the architecture that the file states,
    where it does."""
    names = []
    shapes = _shapes(found.encoder)
    for name in sorted(recipes.index("backbone")):
        backbone = recipes.load_backbone(name)
        weights, architecture = backbone.weights, backbone.architecture
        layout = weights.layout if weights.kind == "file" else "mae_bench"
        if backbone.refused or weights.kind == "none" or found.layout not in (layout, "mae_bench"):
            continue
        with torch.device("meta"):
            encoder = Encoder(architecture, final_norm=found.normed, rel_pos=architecture.rel_pos)
        declared = architecture.model_dump()
        agreed = all(stated.get(key, value) == value for key, value in declared.items())
        if agreed and _shapes(encoder.state_dict()) == shapes:
            names.append(name)
    return names


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """ViTDet's tables are left out: their shapes follow the windows of the task that trained them."""
    return {name: value.shape for name, value in state.items() if not name.endswith((".rel_pos_h", ".rel_pos_w"))}


def _normed(found: Found) -> bool:
    """Our own files may lack the final norm, where the encoder was trained without one."""
    return found.layout != "mae_bench" or not {"norm.weight", "fc_norm.weight"}.isdisjoint(found.encoder)


def _options(path: Path, found: Found, architecture: Architecture) -> EncoderOptions:
    """What the encoder needs to take every tensor of the file."""
    if architecture.rel_pos != "decomposed":
        return {"final_norm": found.normed}
    window, everywhere, span = windows(found.encoder)
    if window > MAX_WINDOW:
        raise UserError(f"{path}: rel_pos_h is made for windows of {window} patches; expected at most {MAX_WINDOW}")
    return {"window": window, "global_blocks": everywhere, "rel_pos": "decomposed", "rel_pos_grid": (span, span)}


def _declared(path: Path, sha256: str, backbone: Backbone, encoder: Encoder, report: LoadReport) -> Declared:
    weights, use, statistics = backbone.weights, backbone.published, backbone.input
    fingerprint = report.fingerprint or proof.fingerprint(encoder, statistics)
    proof.check_finite(path, fingerprint)
    about = {"mean": _numbers(statistics.mean), "std": _numbers(statistics.std)}
    if weights.kind == "file":
        about["licence"] = weights.licence
        about["pre-trained"] = f"{weights.target}, {weights.pretraining}"
        about["source"] = weights.source
    if use is not None:
        about["published"] = f"crop {use.crop:g}, {use.interpolation}, pool {use.pool} ({use.source})"
    lock = proof.read_lock(path)
    meant = backbone.fingerprint
    stated, published = _hash(path, backbone)
    return Declared(
        backbone=backbone.name,
        report=report.line(),
        about=about,
        hash=stated,
        published=published,
        fingerprint=fingerprint,
        expected=proof.deviation(fingerprint, meant) <= proof.TOLERANCE if meant else None,
        first_seen=lock.date if lock else "",
        unchanged=lock.sha256 == sha256 if lock else None,
    )


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _hash(path: Path, backbone: Backbone) -> tuple[str, bool | None]:
    """What of the file's hash is published, and whether it is equal."""
    weights = backbone.weights
    if weights.kind != "file":
        return "", None
    try:
        stated = check_hash(path, weights)
    except UserError:
        return "sha256" if weights.sha256 else "md5 prefix", False
    return stated, True if stated else None


def _compare(found: Found, tensors: Mapping[str, Tensor], encoder: Encoder, backbone: Backbone) -> Comparison:
    architecture = backbone.architecture
    if not found.normed:
        architecture = architecture.model_copy(update={"final_norm": "none"})
    images = proof.normalised(proof.picture(architecture.image_size), backbone.input)
    try:
        original, theirs = original_features(found.layout, tensors, found.prefix, architecture, images)
    except UnavailableError as error:
        return Comparison(None, reason=str(error))
    except RefusedError as error:
        return Comparison(False, reason=f"the original refuses the file's tensors: {error}")
    ours = proof.features(encoder, images)
    if ours.shape != theirs.shape:
        reason = f"their shape is {tuple(theirs.shape)}, ours {tuple(ours.shape)}"
        return Comparison(False, original, theirs.numel(), reason=reason)
    difference, size = (ours - theirs).abs().max().item(), theirs.square().mean().sqrt().item()
    if not math.isfinite(difference):
        return Comparison(False, original, theirs.numel(), reason="they are not finite")
    limit = LIMIT * max(1.0, size)
    return Comparison(difference <= limit, original, theirs.numel(), difference, limit)
