"""``python -m mae_bench reconstruct``: what a Masked Autoencoder predicts for pictures, by a file with its decoder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as transforms

from mae_bench import recipes, runs
from mae_bench.checkpoints.files import read_tensors
from mae_bench.checkpoints.layouts import LAYOUTS, Found, detect
from mae_bench.checkpoints.load import build_encoder, load_model
from mae_bench.checkpoints.namings import DECODER, HF, PRETRAINING_TOKEN
from mae_bench.data.drawing import printable
from mae_bench.data.images import MAX_PIXELS, read_rgb
from mae_bench.encoders.vit import Encoder
from mae_bench.engine import distributed
from mae_bench.engine.job import Options
from mae_bench.engine.seeds import Stream, generator
from mae_bench.errors import UserError
from mae_bench.pretraining.cost import grid_of, pretraining, total
from mae_bench.pretraining.images import Noise, cover
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.pretraining.objectives import build_model
from mae_bench.pretraining.pictures import LEAK, Reconstruction, reconstruct
from mae_bench.schema import Backbone, PretrainingValues

TASK = "imagenet_pretrain"  # whose values published decoders have, beside what shapes tell
MODEL_FILE = "mae.safetensors"  # what our own pre-training leaves
MAX_PICTURES = 32
FULL = "mae_pretrain_vit_"  # FAIR's encoder files; those with a decoder have `_full` before the suffix
# A block of the decoder in transformers' names: on the hub, and as version 5 saves them.
HF_DECODER_BLOCK = r"decoder_(?:layers|encoder\.layer)\.(.*)"


@dataclass(frozen=True)
class Loaded:
    """A model, the values that it was trained with, and what was read, in lines for people."""

    model: MaskedAutoencoder
    values: PretrainingValues
    lines: list[tuple[str, str]]


def run(
    backbone: str,
    images: Sequence[Path],
    *,
    weights: Path | None = None,
    mask_ratio: float | None = None,
    seed: int = 0,
    out: Path = Path("reconstructions.png"),
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> str:
    """Write the grid of originals, masked, predicted and pasted pictures to ``out``; returns a report.

    Pictures are resized and cut as in validation. The mask of the picture at place i depends on ``seed`` and i alone;
    ``mask_ratio`` defaults to the training's.

    Raises:
        UserError: a file without decoder, pictures that do not decode, and whatever else the caller can mend.
    """
    if len(images) > MAX_PICTURES:
        raise UserError(f"{len(images)} pictures make no grid to look at; give at most {MAX_PICTURES}")
    if mask_ratio is not None and not 0 < mask_ratio < 1:
        raise UserError(f"--mask-ratio {mask_ratio}: the share of hidden patches is between 0 and 1, e.g. 0.75")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: the grid is a PNG; name it .png")
    if out.resolve() in [path.resolve() for path in images]:
        raise UserError(f"--out {out} is one of the pictures; choose another name")
    options = Options(weights=weights, device=device)
    where = distributed.device(options)
    recipe = recipes.load_backbone(backbone)
    loaded = load_mae(recipe, _file(recipe, options), mask_ratio)
    loaded.model.to(where)
    model, patch = loaded.model, loaded.model.encoder.patch
    rows, columns = model.encoder.grid
    noise = Noise(model.encoder.grid, patch, loaded.values)
    pictures = torch.stack([_picture(path, (rows * patch, columns * patch)) for path in images])
    masks = torch.stack([noise(generator(Stream.SAMPLE, seed, 0, index))[0] for index in range(len(images))])
    shown = reconstruct(model, pictures, masks)
    if not math.isfinite(shown.error):
        raise UserError(
            "the predictions are not finite: the weights are damaged or diverged; fetch or train them again"
        )
    shown.write(out, [path.name for path in images])
    hidden = f"{model.patches - model.keep} of {model.patches} patches hidden ({loaded.values.sampling}), seed {seed}"
    return _report(recipe.name, [*loaded.lines, ("masks", hidden)], shown, images, out)


def _report(name: str, lines: list[tuple[str, str]], shown: Reconstruction, images: Sequence[Path], out: Path) -> str:
    text = [name, *(f"  {what:<10} {said}" for what, said in lines), ""]
    text += [f"  {error:<10.4f} {printable(str(path), 100)}" for error, path in zip(shown.errors, images, strict=True)]
    text += [f"  {shown.error:<10.4f} mean squared error on masked patches, in {shown.unit}", ""]
    return "\n".join(text + [f"  {LEAK}"] * shown.norm_pix + [f"  grid: {out}"])


def _file(recipe: Backbone, options: Options) -> Path:
    """The weight file, made now where the recipe says so."""
    if recipe.refused or recipe.init != "mae":
        raise UserError(f"'{recipe.name}' is no Masked Autoencoder; name a backbone that is one, e.g. vit_b_mae_pixel")
    source = runs.find_weights(recipe, options)
    assert source.file is not None
    return source.file.with_name(MODEL_FILE) if source.kind == "made" else source.file


def _picture(path: Path, size: tuple[int, int]) -> Tensor:
    """(3,H,W) uint8 of ``size``: the centre of the picture, resized as in validation."""
    image = read_rgb(path)
    enlarged = max(size[0] / image.height, size[1] / image.width)
    if image.width * image.height * enlarged**2 > MAX_PIXELS:
        raise UserError(
            f"{path} is {image.width} x {image.height} pixels: brought to {size[0]} x {size[1]} at its shorter side it "
            f"has more than {MAX_PIXELS}; cut a part out of it"
        )
    fitted: Tensor = transforms.center_crop(cover(transforms.pil_to_tensor(image), size), list(size))
    return fitted


def load_mae(recipe: Backbone, file: Path, mask_ratio: float | None = None) -> Loaded:
    """Encoder and decoder from one file, key by key: our own, FAIR's or transformers'."""
    tensors, metadata = read_tensors(file)
    if "encoder.patch_embed.proj.weight" in tensors:
        return _own(recipe, file, tensors, metadata, mask_ratio)
    found = detect(file, tensors, metadata)
    decoder = _decoder(file, found, tensors)
    if not decoder:
        raise _encoder_alone(recipe, file, found)
    encoder, report = build_encoder(recipe, file, seed=0)
    values = _published(recipe, file, decoder, mask_ratio)
    model = build_model(encoder, recipe.input, values, seed=0)
    _fill(model, file, decoder)
    # FAIR and transformers have one epsilon for all norms.
    for module in (*model.decoder_blocks.modules(), model.decoder_norm):
        if isinstance(module, nn.LayerNorm):
            module.eps = recipe.architecture.norm_eps
    target = f"{'normalised ' * values.norm_pix}pixels, as the recipe of {recipe.name} says"
    read = report.line().partition("; ")[0]
    return Loaded(model, values, [("encoder", read), ("decoder", _size(values, len(decoder))), ("target", target)])


def _size(values: PretrainingValues, tensors: int) -> str:
    return (
        f"loaded {tensors}/{tensors} decoder tensors: {values.decoder_depth} blocks of width {values.decoder_width}, "
        f"{values.decoder_heads} heads"
    )


def _published(
    recipe: Backbone, file: Path, decoder: Mapping[str, Tensor], mask_ratio: float | None
) -> PretrainingValues:
    """Depth and width from shapes; heads from the pre-training recipe, the target from the backbone's."""
    weights = recipe.weights
    if weights.kind != "file" or weights.target not in ("norm_pix", "pixel"):
        raise UserError(f"{file}: the recipe of '{recipe.name}' names no target of pixels for weights of others")
    values: PretrainingValues = recipes.resolve_task(TASK, recipe).values
    embedding = decoder.get("decoder_embed.weight")
    width = len(embedding) if embedding is not None and embedding.dim() == 2 else 0
    if not width or width % values.decoder_heads or width % 4:
        raise UserError(f"{file}: a decoder of width {width} cannot have the recipe's {values.decoder_heads} heads")
    return values.model_copy(
        update={
            "decoder_depth": _depth(decoder),
            "decoder_width": width,
            "norm_pix": weights.target == "norm_pix",
            "mask_ratio": mask_ratio or values.mask_ratio,
        }
    )


def _depth(tensors: Mapping[str, Tensor]) -> int:
    return len({key.split(".")[1] for key in tensors if key.startswith("decoder_blocks.")})


def _decoder(file: Path, found: Found, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's decoder in FAIR's names; empty where it has none."""
    if found.layout not in ("fair_mae", "hf_vit_mae"):
        return {}
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, reason in found.unused.items():
        if reason not in (DECODER, PRETRAINING_TOKEN):
            continue
        name, _, part = _name(key.removeprefix(found.prefix), found.layout == "hf_vit_mae").partition("#")
        if part:
            parts.setdefault(name, {})[part] = tensors[key]
        else:
            whole[name] = tensors[key]
    for name, pieces in parts.items():
        if pieces.keys() != {"q", "k", "v"} or any(piece.dim() == 0 for piece in pieces.values()):
            raise UserError(f"{file}: {name} of the decoder is made of query, key and value, and one is missing")
        whole[name] = torch.cat([pieces[part] for part in "qkv"])
    return whole


def _name(key: str, hugging_face: bool) -> str:
    """FAIR's name of a decoder tensor; the blocks of transformers' decoder have the names of its encoder's."""
    if not hugging_face:
        return key
    key = key.removeprefix("decoder.")
    if block := re.fullmatch(HF_DECODER_BLOCK, key):
        for pattern, template in HF.encoder:
            if found := re.fullmatch(pattern, f"layers.{block[1]}"):
                return f"decoder_{found.expand(template)}"
    return key


def _fill(model: MaskedAutoencoder, file: Path, decoder: Mapping[str, Tensor]) -> None:
    """Put the decoder into the model: the same names and shapes, and finite numbers, or a UserError."""
    state = model.state_dict()
    wanted = {key for key in state if not key.startswith("encoder.")}
    for what, keys in (("lacks", wanted - decoder.keys()), ("has unexpected", decoder.keys() - wanted)):
        if keys:
            raise UserError(f"{file} {what} {len(keys)} tensors of a MAE decoder, first {min(keys)!r:.80}")
    for key, tensor in decoder.items():
        if tensor.shape != state[key].shape or not tensor.is_floating_point():
            raise UserError(
                f"{file}: {key} is {tensor.dtype} {tuple(tensor.shape)}, this decoder has {tuple(state[key].shape)}"
            )
    model.load_state_dict(state | {key: tensor.float() for key, tensor in decoder.items()}, strict=True)


def _own(
    recipe: Backbone, file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], mask_ratio: float | None
) -> Loaded:
    """What our own pre-training left; it says its values itself."""
    try:
        values = PretrainingValues.model_validate_json(metadata.get("values", ""))
    except ValidationError:
        raise UserError(f"{file} does not say the values that it was trained with; pre-train it again") from None
    if values.objective != "masked" or values.target != "pixels":
        raise UserError(
            f"{file} was trained with objective {values.objective!r} and target {values.target!r}; "
            "pictures are made of masked pixels"
        )
    grid = grid_of(recipe.architecture, values.height, values.width)
    sizes = sum(tensor.numel() for tensor in tensors.values())
    # Compared before anything is built: a file may say any size.
    if (
        values.decoder_depth != _depth(tensors)
        or total(pretraining(recipe.architecture, values).values()).parameters != sizes
    ):
        raise UserError(
            f"{file} does not hold the model that its values say, for '{recipe.name}'; give the run's own file"
        )
    values = values.model_copy(update={"mask_ratio": mask_ratio or values.mask_ratio})
    with torch.device("meta"):
        encoder = Encoder(recipe.architecture, grid=grid)
    model = build_model(encoder.to_empty(device="cpu"), recipe.input, values, seed=0)
    # What no shape shows: heads and epsilon are in the architecture, the pixels' mean and std in the input.
    stated = {"architecture": recipe.architecture.model_dump_json(), "input": recipe.input.model_dump_json()}
    load_model(model, file, {"engine": "pretraining", "backbone": recipe.name, **stated})
    count = len([key for key in tensors if key.startswith("encoder.")])
    smoke = ", a smoke run" if metadata.get("smoke") == "True" else ""
    made = f"loaded {count}/{count} encoder tensors (made by {metadata.get('protocol')!r:.60}{smoke})"
    target = f"{'normalised ' * values.norm_pix}pixels, as the file says"
    return Loaded(
        model, values, [("encoder", made), ("decoder", _size(values, len(tensors) - count)), ("target", target)]
    )


def _encoder_alone(recipe: Backbone, file: Path, found: Found) -> UserError:
    """Which file to take instead."""
    said = f"{file} is {LAYOUTS[found.layout]}: it has no decoder that predicts pictures"
    if found.layout == "mae_bench":
        return UserError(f"{said}; give the {MODEL_FILE} that lies beside it")
    advice = []
    if recipe.weights.kind == "file" and Path(recipe.weights.file).name.startswith(FULL):
        full = Path(recipe.weights.file).stem + "_full.pth"
        advice.append(f"--weights {full} (from {recipe.weights.url.rpartition('/')[0]}/)")
    if f"{recipe.name}_pixel" in recipes.index("backbone"):
        advice.append(f"--backbone {recipe.name}_pixel")
    return UserError(f"{said}; take {' or '.join(advice) or 'a file with encoder and decoder'}")
