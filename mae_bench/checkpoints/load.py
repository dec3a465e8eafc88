"""Build an encoder from a weight file, key-exact, and report what became of every tensor.

There is no lax mode. The file's encoder must have exactly the tensors and shapes of the architecture that the recipe
declares; it is then adapted to what the task asks for (another grid, another patch, no class token), and the report
says how. Encoder tensors that no file holds exist only where an option created them (relative position tables, layer
scale).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mae_bench import places
from mae_bench.checkpoints import proof
from mae_bench.checkpoints.files import SYNTHETIC, json_metadata, read_tensors
from mae_bench.checkpoints.layouts import (
    ANCHOR,
    LAYOUTS,
    TABLE,
    Found,
    FoundLayout,
    describe,
    detect,
    facts,
    table_order,
)
from mae_bench.checkpoints.save import save_encoder, save_model, write_synthetic
from mae_bench.encoders.patches import resample_kernel
from mae_bench.encoders.positions import resize, resize_bias_table, resize_decomposed_table
from mae_bench.encoders.vit import Encoder, EncoderOptions, random_encoder
from mae_bench.errors import UserError
from mae_bench.hashing import check_hash, file_hash
from mae_bench.schema import Architecture, Backbone

__all__ = [
    "LoadReport",
    "build_encoder",
    "check_hash",
    "load_model",
    "read_tensors",
    "save_encoder",
    "save_model",
    "write_synthetic",
]


MANY = 6  # patterns of names, more of which are told by their first part


@dataclass
class LoadReport:
    """What became of every tensor. ``matched`` of ``total`` encoder tensors came from the file; the others are in
    ``new``, and each tensor of the file that has no place in the encoder is in ``unused`` with the reason."""

    file: str = ""  # name of the file; "" for a from-scratch encoder
    layout: str = ""
    wrapper: str = ""  # key of the file under which the tensors are
    prefix: str = ""  # stripped from every key of the file
    target: str = ""  # of pre-training: as the recipe states it, or as our own file does
    sha256: str = ""
    verified: str = ""  # what `check_hash` found equal: "sha256", "sha256 prefix", "md5 prefix", or "" = nothing
    differs: bool = False  # from the hash that the recipe states: another file than the published one
    seen: str = ""  # the recipe's own file: when it was first seen on this machine, unchanged since
    fingerprint: list[float] = field(default_factory=list)  # `proof.fingerprint` of the encoder as it was pre-trained
    matched: int = 0
    total: int = 0
    new: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # new parameters of the model around the encoder, as patterns
    unused: dict[str, str] = field(default_factory=dict)
    transforms: list[str] = field(default_factory=list)
    synthetic: bool = False  # random weights that --smoke wrote

    def complete(self, model: nn.Module, encoder: str) -> None:
        """Account for the whole ``model``, whose encoder's parameters begin with ``encoder``: all others are new.

        Raises:
            UserError: a parameter is random and frozen, and this is no from-scratch baseline.
        """
        around = [name for name, _ in model.named_parameters() if not name.startswith(encoder)]
        random = around + [encoder + name for name in self.new]
        frozen = [name for name in random if not model.get_parameter(name).requires_grad]
        if self.file and frozen:
            raise UserError(
                f"{frozen[0]} would be random and frozen: {self.file} does not hold it, and this task does not train it"
            )
        self.heads = _patterns(around)

    def line(self) -> str:
        """The report in one line."""
        if not self.file:
            return f"no weights loaded: all {self.total} encoder tensors are random ({self.layout})"
        proven = self.verified or ("not the published file" if self.differs else "unverified")
        proven += f", {self.seen}" if self.seen and not self.verified else ""
        facts = [self.layout, self.target, proven, f"sha256 {self.sha256[:12]}…", "synthetic" if self.synthetic else ""]
        loaded = f"loaded {self.matched}/{self.total - len(self.new)} encoder tensors"
        parts = [f"{loaded} ({', '.join(filter(None, facts))})"]
        for word, names in (("new", _patterns(self.new) + self.heads), ("unused", _patterns(list(self.unused)))):
            if names:
                parts.append(f"{word}: {', '.join(_short(names))}")
        return "; ".join(parts + self.transforms)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the record."""
        return asdict(self)


def _patterns(names: list[str]) -> list[str]:
    """Names with block numbers replaced by ``*``, each pattern once."""
    starred = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names]
    return list(dict.fromkeys(starred))


def _short(patterns: list[str]) -> list[str]:
    """Patterns, or where there are many what they begin with."""
    if len(patterns) <= MANY:
        return patterns
    return list(dict.fromkeys(f"{pattern.partition('.')[0]}.*" if "." in pattern else pattern for pattern in patterns))


def build_encoder(
    backbone: Backbone, file: Path | None, *, seed: int, **options: Unpack[EncoderOptions]
) -> tuple[Encoder, LoadReport]:
    """The encoder of a backbone recipe, with the file's weights, or initialised from ``seed`` where ``file`` is None.

    ``file`` may be None only for a from-scratch backbone, and must be None for one. A file that bears the name the
    recipe gives must also have the recipe's hash; another one (``--weights FILE``) is reported as unverified. Files in
    our own layout are accepted for every recipe of the same architecture.
    """
    if backbone.refused:
        raise UserError(f"backbone '{backbone.name}' cannot be run: {backbone.refused}")
    if file is None:
        if backbone.weights.kind != "none":
            raise UserError(f"backbone '{backbone.name}' needs a weight file; only from-scratch backbones start random")
        encoder = random_encoder(backbone.architecture, seed, **options)
        names = list(encoder.state_dict())
        return encoder, LoadReport(layout=f"initialised from seed {seed}", total=len(names), new=names)
    if backbone.weights.kind == "none":
        raise UserError(f"backbone '{backbone.name}' starts from scratch and takes no weights, but {file} was given")
    tensors, metadata = read_tensors(file)
    synthetic = metadata.get(SYNTHETIC) == "true"
    verified, differs = ("", False) if synthetic else _verify(file, backbone)
    found = detect(file, tensors, metadata)
    _check_layout(file, found, backbone)
    _check_origin(file, found, metadata, backbone)
    _check_architecture(file, found, json_metadata(metadata, "architecture"), backbone)
    pretrained = {key: tensor.float() for key, tensor in found.encoder.items()}
    # On the meta device a tensor that nobody fills cannot be used at all: nothing is random by accident.
    with torch.device("meta"):
        encoder = Encoder(backbone.architecture, **options)
    names = list(encoder.state_dict())
    state, unused, transforms = _adapt(found, pretrained, encoder)
    new = {name: value for name, value in encoder.option_tensors().items() if name not in state}
    missing = [name for name in names if name not in state and name not in new]
    if missing:
        raise UserError(f"{file}: {len(missing)} tensors that this task needs are not in the file, first {missing[0]}")
    matched = len(state)
    state |= {name: torch.full(encoder.get_parameter(name).shape, value) for name, value in new.items()}
    encoder.load_state_dict(state, strict=True, assign=True)
    sha256 = file_hash(file)
    fingerprint = [] if synthetic else _fingerprint(file, backbone, found, pretrained)
    return encoder, LoadReport(
        file=file.name,
        layout=found.detail,
        wrapper=metadata.get("wrapper", ""),
        prefix=found.prefix,
        target=_target(found, metadata, backbone),
        sha256=sha256,
        verified=verified,
        differs=differs,
        seen=proof.remember(file, backbone, sha256, fingerprint) if fingerprint and _is_fetched(file, backbone) else "",
        fingerprint=fingerprint,
        matched=matched,
        total=len(names),
        new=list(new),
        unused=found.unused | unused,
        transforms=transforms,
        synthetic=synthetic,
    )


def _is_fetched(file: Path, backbone: Backbone) -> bool:
    """Whether this is the recipe's file in the weights folder, where a lock may be left beside it."""
    weights = backbone.weights
    return weights.kind == "file" and file.resolve() == (places.weights_root() / weights.file).resolve()


def _verify(file: Path, backbone: Backbone) -> tuple[str, bool]:
    """What of the recipe's hash the file has, and whether it has another one. The recipe's own file, in the weights
    folder or under its name, must have the recipe's."""
    weights = backbone.weights
    if weights.kind != "file":
        return "", False
    try:
        return check_hash(file, weights), False
    except UserError:
        if file.name == Path(weights.file).name or _is_fetched(file, backbone):
            raise
        return "", True


def _target(found: Found, metadata: dict[str, str], backbone: Backbone) -> str:
    """What pre-training predicted: our own files say it themselves."""
    if found.layout == "mae_bench":
        return f"{metadata.get('target', '')!r:.40}".strip("'")
    return backbone.weights.target if backbone.weights.kind == "file" else ""


def _check_origin(file: Path, found: Found, metadata: dict[str, str], backbone: Backbone) -> None:
    """Our own files say what initialisation they are, and with which statistics; a classifier has seen labels."""
    weights = backbone.weights
    if found.layout == "mae_bench":
        init, statistics = metadata.get("init", backbone.init), json_metadata(metadata, "input")
        if init != backbone.init:
            raise UserError(
                f"{file} is an encoder of the initialisation {init!r:.40}, but '{backbone.name}' is '{backbone.init}': "
                "its row in a table would be wrong; name a backbone of that initialisation"
            )
        if statistics and statistics != backbone.input.model_dump(mode="json"):
            raise UserError(
                f"{file} was trained with {json.dumps(statistics)[:200]} as mean and std, which '{backbone.name}' does "
                "not declare; correct [input] of the recipe"
            )
    elif found.labelled and weights.kind == "file" and weights.target != "labels":
        raise UserError(
            f"{file} holds a classifier, so its encoder has seen labels, but '{backbone.name}' declares the target "
            f"'{weights.target}'; take the file from before fine-tuning, or declare target = \"labels\""
        )


def _fingerprint(file: Path, backbone: Backbone, found: Found, state: dict[str, Tensor]) -> list[float]:
    """Features of the fixed picture by the encoder as it was pre-trained, whatever the task makes of it; compared with
    the recipe's, where that has some. Empty for a ViTDet encoder, which is none without its task's windows."""
    if backbone.architecture.rel_pos == "decomposed":
        return []
    with torch.device("meta"):
        encoder = Encoder(backbone.architecture, final_norm=found.normed)
    encoder.load_state_dict(state, strict=True, assign=True)
    features = proof.fingerprint(encoder, backbone.input)
    proof.check_finite(file, features)
    if backbone.fingerprint:
        proof.check_fingerprint(file, features, backbone.fingerprint, f"those of the recipe '{backbone.name}'")
    return features


def _check_layout(file: Path, found: Found, backbone: Backbone) -> None:
    weights = backbone.weights
    meant: FoundLayout = weights.layout if weights.kind == "file" else "mae_bench"
    if found.layout in (meant, "mae_bench"):
        return
    order = table_order(found.encoder["pos_embed"]) if found.layout == "vit" and "pos_embed" in found.encoder else ""
    axes = " (they are that table with rows and columns exchanged, as in MoCo v3 and mmpretrain)"
    place = f", the file {weights.file} from {weights.url}" if weights.kind == "file" else ""
    raise UserError(
        f"{file} is {LAYOUTS[found.layout]}{axes if order == 'exchanged' else ''}; "
        f"backbone '{backbone.name}' means {LAYOUTS[meant]}{place}"
    )


def _check_architecture(file: Path, found: Found, stated: dict[str, Any], backbone: Backbone) -> None:
    """The file's encoder tensors must be exactly those of the recipe's architecture."""
    architecture = backbone.architecture
    with torch.device("meta"):
        # ViTDet's tables depend on the task's windows: their shapes are compared with the task's encoder.
        as_declared = Encoder(architecture, final_norm=found.normed, rel_pos=architecture.rel_pos)
    meant, tensors = as_declared.state_dict(), found.encoder
    size, meant_size = describe(tensors), describe(meant)
    if size != meant_size:
        raise UserError(f"{file} holds {size}, but backbone '{backbone.name}' means {meant_size}")
    held, declared = facts(tensors), facts(meant)
    for key in (key for key in held if held[key] != declared[key]):
        raise UserError(
            f"{file} holds {size} with {key} = {held[key]!r}, but backbone '{backbone.name}' declares "
            f"{declared[key]!r}; name a backbone with {key} = {held[key]!r}, or correct the recipe's [architecture]"
        )
    heads = {"heads": found.heads} if found.heads else {}
    for key, field_ in Architecture.model_fields.items():
        own = getattr(architecture, key)
        # Our own files leave features at their default out.
        value = (stated | heads).get(key, field_.default if stated and key in Architecture.FEATURES else own)
        if value != own:
            raise UserError(f"{file} was made with {key} = {value!r:.80}, backbone '{backbone.name}' has {own!r}")
    for what, keys in (
        ("is missing", meant.keys() - tensors.keys()),
        ("is not expected", tensors.keys() - meant.keys()),
    ):
        if keys:
            first = found.sources.get(min(keys), [min(keys)])[0]
            raise UserError(f"{file}: {first!r:.80} {what} in {size} ({len(keys)} such); another model, or damaged")
    for key, tensor in tensors.items():
        if tensor.shape != meant[key].shape and not key.endswith((".rel_pos_h", ".rel_pos_w")):
            raise UserError(
                f"{file}: {key} has shape {_shape(tensor.shape)}, {meant_size} has {_shape(meant[key].shape)}"
            )
        if not tensor.is_floating_point():
            raise UserError(f"{file}: {key} has type {tensor.dtype}; encoder weights are floating point numbers")
        if not tensor.isfinite().all():
            raise UserError(f"{file}: {key} contains NaN or infinite values; the file is damaged, fetch it again")


def _shape(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _adapt(
    found: Found, pretrained: dict[str, Tensor], encoder: Encoder
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """The file's tensors as ``encoder`` needs them, those it has no use for, and what was changed."""
    architecture = encoder.architecture
    unused: dict[str, str] = {}
    transforms = list(found.changes)
    stored = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in found.encoder.values()} - {"float32"})
    if stored:
        transforms.append(f"{', '.join(stored)} -> float32")
    state = dict(pretrained)
    wanted = encoder.state_dict()
    for names, reason in (
        (("cls_token", "reg_token"), "this task uses no class token and no registers"),
        (
            ("norm.weight", "norm.bias", "fc_norm.weight", "fc_norm.bias"),
            "this task uses no final norm, or one of its own",
        ),
    ):
        for name in names:
            if name in state and name not in wanted:
                unused |= dict.fromkeys(found.sources.get(name, [name]), reason)
                del state[name]
    declared = int(architecture.class_token and architecture.class_position)
    if "pos_embed" in state and encoder.position_prefix != declared:
        state["pos_embed"] = state["pos_embed"][:, declared:]
        transforms.append("pos_embed: row of the class token dropped")
    transforms += _to_grid(state, encoder)
    if encoder.patch != architecture.patch:
        state[ANCHOR] = resample_kernel(state[ANCHOR], encoder.patch)
        transforms.append(f"{ANCHOR}: patch {architecture.patch} -> {encoder.patch}, pseudo-inverse (FlexiViT)")
    # Copies: a file's tensors may be views of the file itself, or of each other.
    own = {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}
    return own, unused, transforms


def _to_grid(state: dict[str, Tensor], encoder: Encoder) -> list[str]:
    """Take the position tables in ``state`` to the encoder's grid; what was done, in words."""
    architecture = encoder.architecture
    grid = (architecture.grid, architecture.grid)
    done = []
    if "pos_embed" in state and encoder.grid != grid:
        how = architecture.resize
        state["pos_embed"] = resize(state["pos_embed"], grid, encoder.grid, encoder.position_prefix, how)
        done.append(f"pos_embed: {_shape(grid)} -> {_shape(encoder.grid)}, bicubic ('{how}')")
    tables = [key for key in state if key.endswith(TABLE)]
    if tables and encoder.span != grid:
        for key in tables:
            state[key] = resize_bias_table(state[key], grid, encoder.span)
        done.append(f"{TABLE}: {_shape(grid)} -> {_shape(encoder.span)}, cubic spline on a geometric grid (BEiT)")
    wanted = encoder.state_dict()
    for key in (key for key in state if key.endswith((".rel_pos_h", ".rel_pos_w"))):
        have, want = state[key].shape, wanted[key].shape
        if have == want:
            continue
        if encoder.blocks[int(key.split(".")[1])].window or have[1:] != want[1:] or not have[0]:
            raise UserError(
                f"{key} of the file is {_shape(have)}, for other windows than this task's, which needs "
                f"{_shape(want)}; set window and global_blocks as the file was trained"
            )
        state[key] = resize_decomposed_table(state[key], (want[0] + 1) // 2)
        done.append(f"{key.split('.')[-1]} of global blocks: {have[0]} -> {want[0]} rows, linear (detectron2)")
    return list(dict.fromkeys(done))


def load_model(module: nn.Module, path: Path, expect: dict[str, str]) -> dict[str, str]:
    """Load a whole trained model that ``save_model`` wrote: same names, shapes and types, or a UserError.

    ``expect`` are metadata that must be equal, e.g. the task and the backbone. Returns the file's metadata.
    """
    tensors, metadata = read_tensors(path)
    for key, meant in expect.items():
        if metadata.get(key) != meant:
            raise UserError(f"{path} was made with {key} = {metadata.get(key)!r:.80}, this run has {meant!r}")
    state = module.state_dict()
    for what, keys in (("lacks", state.keys() - tensors.keys()), ("has unexpected", tensors.keys() - state.keys())):
        if keys:
            raise UserError(
                f"{path} {what} {len(keys)} tensors of this model, first {min(keys)!r:.80}; give the run's own file"
            )
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape or tensor.dtype != state[key].dtype:
            raise UserError(
                f"{path}: {key} is {tensor.dtype} {_shape(tensor.shape)}, "
                f"this model has {state[key].dtype} {_shape(state[key].shape)}"
            )
    module.load_state_dict(tensors, strict=True)
    return metadata
