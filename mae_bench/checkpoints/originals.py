"""The original implementation of a layout, filled from a file by its own names, for comparison with our encoder.

Nothing here uses our tables of names. A file in timm's or FAIR's names goes through timm's own filter for checkpoints
(which is also the stand-in for DINO, DINOv2, MoCo v3, DeiT III and BEiT, whose repositories are no packages), a Flax
file through timm's own reader, a Hugging Face file through transformers' ``from_pretrained``, ViTDet and mmsegmentation
files into detectron2's and mmsegmentation's modules. Only the tensors of `files.read_tensors` are handed over: no other
project's loader opens the file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mae_bench.checkpoints.layouts import FoundLayout
from mae_bench.schema import Architecture

Tensors = dict[str, Tensor]

# What a file may hold beside the encoder, by the names of the project it comes from.
BESIDE_VIT = r"mask_token|(decoder_|head|lm_head\.|cls_pt_layers\.).*|(.*\.)?relative_position_index"
BESIDE_HF = r"(decoder|classifier|(\w+\.)?pooler\.dense)\..*|.*relative_position_index"
BESIDE_MM = r".*\.relative_position_index"
CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")  # DINOv2 trains with blocks.chunk.i; i counts through the chunks


class UnavailableError(Exception):
    """The original cannot be run here; the message says why."""


class RefusedError(Exception):
    """The original does not take the file's tensors under its own names."""


def original_features(
    layout: FoundLayout, tensors: Mapping[str, Tensor], prefix: str, architecture: Architecture, images: Tensor
) -> tuple[str, Tensor]:
    """Name and version of the original, and its (1,[prefix+]N,D) features of (1,3,S,S) normalised ``images``.

    They are comparable with ``proof.features`` of our encoder. ``tensors`` and ``prefix`` are the file's own.

    Raises:
        UnavailableError: the package is not installed, or has no such architecture.
        RefusedError: a tensor that the original needs is missing, or one of the file has no place in it.
    """
    state = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    if layout not in ("hf_vit_mae", "hf_vit", "hf_beit", "hf_dinov2"):  # transformers knows its prefixes itself
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    with torch.inference_mode():
        return ORIGINALS[layout](state, architecture, images)


def _package(name: str) -> Any:
    """An optional package's module, typed loosely: most of them have no types."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name.partition('.')[0]} is not installed ({error})") from error


def _title(package: str, module: nn.Module) -> str:
    return f"{package} {_package(package).__version__} {type(module).__name__}"


def _without(state: Tensors, beside: str) -> Tensors:
    return {key: value for key, value in state.items() if not re.fullmatch(beside, key)}


def _fill(module: nn.Module, state: Tensors, assign: bool = False) -> None:
    try:
        module.load_state_dict(state, strict=True, assign=assign)
    except RuntimeError as error:
        raise RefusedError(f"{' '.join(str(error).split())!r:.300}") from error
    module.eval()


def _norm(architecture: Architecture) -> partial[nn.LayerNorm]:
    return partial(nn.LayerNorm, eps=architecture.norm_eps)


# timm


def _timm_vit(architecture: Architecture, class_position: bool) -> nn.Module:
    """On the meta device: the file brings every tensor."""
    timm, layers = _package("timm.models.vision_transformer"), _package("timm.layers")
    if architecture.rel_pos != "none":
        raise UnavailableError("timm has no ViT with relative positions under these names")
    swiglu = architecture.mlp == "swiglu"
    pools = {"tokens": "token" if architecture.class_token else "", "pooled": "avg", "none": ""}
    with torch.device("meta"):
        vit: nn.Module = timm.VisionTransformer(
            img_size=architecture.image_size,
            patch_size=architecture.patch,
            embed_dim=architecture.width,
            depth=architecture.depth,
            num_heads=architecture.heads,
            # truncated by timm; gate and value of a SwiGLU count together
            mlp_ratio=((2 if swiglu else 1) * architecture.hidden + 0.5) / architecture.width,
            mlp_layer=layers.SwiGLUPacked if swiglu else layers.Mlp,
            act_layer=nn.SiLU if swiglu else nn.GELU,
            init_values=1.0 if architecture.layer_scale else None,
            class_token=architecture.class_token,
            no_embed_class=not class_position,
            reg_tokens=architecture.registers,
            pos_embed="none" if architecture.positions == "none" else "learn",
            final_norm=architecture.final_norm != "none",
            global_pool=pools[architecture.final_norm],
            num_classes=0,
            norm_layer=_norm(architecture),
        )
    return vit


def _timm_features(model: Any, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    tokens_1ND = model.forward_features(images)
    if architecture.final_norm == "pooled":
        pooled_1D = model.forward_head(tokens_1ND, pre_logits=True)
        tokens_1ND = torch.cat([tokens_1ND, pooled_1D[:, None]], dim=1)
    return _title("timm", model), tokens_1ND


def _plain_vit(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    state = {CHUNK.sub(r"blocks.\1.", key): value for key, value in state.items()}
    # timm folds the class token's position into the token itself where there are registers (DINOv2).
    folded = "register_tokens" in state
    if architecture.registers and architecture.class_position and not folded:
        raise UnavailableError("timm gives a position to all tokens before the patches, or to none")
    model = _timm_vit(architecture, architecture.class_position and not folded)
    filtered = _package("timm.models.vision_transformer").checkpoint_filter_fn(
        dict(state), model, adapt_layer_scale="blocks.0.gamma_1" in state
    )
    _fill(model, _without(filtered, BESIDE_VIT), assign=True)
    return _timm_features(model, architecture, images)


def _augreg(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    """timm's reader wants a file: it gets one of our making. It copies what it knows, so NaN shows what it left out."""
    model: Any = _timm_vit(architecture, architecture.class_position).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "checked.npz"
        arrays: dict[str, Any] = {key: value.numpy() for key, value in state.items()}
        np.savez(file, **arrays)
        try:
            model.load_pretrained(str(file))
        except (KeyError, RuntimeError, ValueError) as error:
            raise RefusedError(f"{error!r:.300}") from error
    left_out = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if left_out:
        raise RefusedError(f"nothing for {left_out[0]} ({len(left_out)} such)")
    return _timm_features(model.eval(), architecture, images)


def _beit(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    timm = _package("timm.models.beit")
    model = timm.Beit(
        img_size=architecture.image_size,
        patch_size=architecture.patch,
        embed_dim=architecture.width,
        depth=architecture.depth,
        num_heads=architecture.heads,
        mlp_ratio=(architecture.hidden + 0.5) / architecture.width,
        init_values=1.0 if architecture.layer_scale else None,
        use_abs_pos_emb=architecture.positions != "none",
        use_rel_pos_bias="blocks.0.attn.relative_position_bias_table" in state,
        use_shared_rel_pos_bias="rel_pos_bias.relative_position_bias_table" in state,
        global_pool="avg" if architecture.final_norm == "pooled" else "token",
        num_classes=0,
        norm_layer=_norm(architecture),
    )
    _fill(model, timm.checkpoint_filter_fn(_without(state, BESIDE_VIT), model))
    return _timm_features(model, architecture, images)


# transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no report: we read the loading information ourselves."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _from_pretrained(
    name: str, state: Tensors, architecture: Architecture, build: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The class ``name`` of transformers, filled by the library's own loading, which also knows the older names on the
    hub. ``build`` goes to its constructor, ``options`` to its configuration."""
    transformers = _package("transformers")
    base = re.sub("(Model|For).*", "", name)
    config = getattr(transformers, base + "Config")(
        hidden_size=architecture.width,
        num_hidden_layers=architecture.depth,
        num_attention_heads=architecture.heads,
        image_size=architecture.image_size,
        patch_size=architecture.patch,
        layer_norm_eps=architecture.norm_eps,
        **options,
    )
    with _quiet(transformers):
        model, report = getattr(transformers, name).from_pretrained(
            None, config=config, state_dict=_without(state, BESIDE_HF), output_loading_info=True, **(build or {})
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if wrong := sorted(map(str, report.get(what, ()))):
            raise RefusedError(f"{what.replace('_', ' ')}: {wrong[0]!r:.100} ({len(wrong)} such)")
    return model.eval()


def _hf_vit_mae(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    """Nothing is masked, and ascending noise leaves the patches in their order."""
    options: dict[str, Any] = {"intermediate_size": architecture.hidden, "mask_ratio": 0.0}
    model = _from_pretrained("ViTMAEModel", state, architecture, **options)
    noise_1N = torch.arange(architecture.grid**2, dtype=torch.float32)[None]
    return _title("transformers", model), model(images, noise=noise_1N).last_hidden_state


def _hf_vit(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    options: dict[str, Any] = {"intermediate_size": architecture.hidden}
    model = _from_pretrained("ViTModel", state, architecture, {"add_pooling_layer": False}, **options)
    return _title("transformers", model), model(images).last_hidden_state


def _hf_beit(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    """The final norm of a model of masked image modelling is outside the ``BeitModel``; there it is read by a hook."""
    masked = "lm_head.weight" in state
    options: dict[str, Any] = {
        "intermediate_size": architecture.hidden,
        "use_mask_token": any(key.endswith("embeddings.mask_token") for key in state),
        "use_absolute_position_embeddings": architecture.positions != "none",
        "use_relative_position_bias": any(re.search(r"\d\..*relative_position_bias_table$", key) for key in state),
        "use_shared_relative_position_bias": any("shared_position_bias" in key for key in state)
        or any("encoder.relative_position_bias." in key for key in state),
        "layer_scale_init_value": 1.0 if architecture.layer_scale else 0.0,
        "use_mean_pooling": not any(key in state for key in ("layernorm.weight", "beit.layernorm.weight")) or masked,
    }
    if masked:
        options["vocab_size"] = len(state["lm_head.weight"])
        model = _from_pretrained("BeitForMaskedImageModeling", state, architecture, **options)
        return _title("transformers", model), _output_of(model.layernorm, partial(model, images))
    build = {"add_pooling_layer": architecture.final_norm == "pooled"}
    model = _from_pretrained("BeitModel", state, architecture, build, **options)
    output = model(images)
    tokens_1ND = output.last_hidden_state
    if architecture.final_norm == "pooled":
        tokens_1ND = torch.cat([tokens_1ND, output.pooler_output[:, None]], dim=1)
    return _title("transformers", model), tokens_1ND


def _hf_dinov2(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    """The library keeps a whole ratio of widths; of a SwiGLU two thirds of it, rounded up to a multiple of 8."""
    swiglu = architecture.mlp == "swiglu"
    width, hidden = architecture.width, architecture.hidden
    made = {ratio: (ratio * width * 2 // 3 + 7) // 8 * 8 if swiglu else ratio * width for ratio in range(1, 17)}
    ratios = [ratio for ratio, result in made.items() if result == hidden]
    if not ratios:
        raise UnavailableError(f"transformers' Dinov2 has no MLP of {hidden} channels at width {width}")
    options: dict[str, Any] = {"mlp_ratio": ratios[0], "use_swiglu_ffn": swiglu}
    if architecture.registers:
        options["num_register_tokens"] = architecture.registers
    name = "Dinov2WithRegistersModel" if architecture.registers else "Dinov2Model"
    model = _from_pretrained(name, state, architecture, **options)
    return _title("transformers", model), model(images).last_hidden_state


def _output_of(part: nn.Module, forward: Callable[[], object]) -> Tensor:
    """What ``part`` puts out while ``forward`` runs."""
    outputs: list[Tensor] = []
    hook = part.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        forward()
    finally:
        hook.remove()
    return outputs[-1]


# detectron2 and OpenMMLab


def windows(state: Mapping[str, Tensor]) -> tuple[int, list[int], int]:
    """Of a ViTDet encoder, read from its tables ``blocks.i.attn.rel_pos_h``, (2*span-1, head_dim): the window, 0 where
    all blocks have the same span; the global blocks; the grid that their tables are made for."""
    tables = {int(key.split(".")[1]): table for key, table in state.items() if key.endswith(".attn.rel_pos_h")}
    spans = {block: (len(table) + 1) // 2 for block, table in tables.items() if table.dim() == 2}
    window, span = min(spans.values(), default=0), max(spans.values(), default=0)
    if window == span:
        return 0, [], span
    return window, sorted(block for block in spans if spans[block] == span), span


def _vitdet(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    vit = _package("detectron2.modeling.backbone.vit")
    window, everywhere, span = windows(state)
    model = vit.ViT(
        img_size=span * architecture.patch,
        patch_size=architecture.patch,
        embed_dim=architecture.width,
        depth=architecture.depth,
        num_heads=architecture.heads,
        mlp_ratio=(architecture.hidden + 0.5) / architecture.width,
        norm_layer=_norm(architecture),
        use_rel_pos=True,
        window_size=window,
        window_block_indexes=[block for block in range(architecture.depth) if window and block not in everywhere],
        pretrain_img_size=architecture.image_size,
        pretrain_use_cls_token=state["pos_embed"].shape[1] > architecture.grid**2,
        out_feature="last_feat",
    )
    _fill(model, state)
    return _title("detectron2", model), model(images)["last_feat"].flatten(2).transpose(1, 2)


def _mmseg(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    """Outputs are maps without the class token there; the tokens are read from the last layer by a hook."""
    backbones = _package("mmseg.models.backbones")
    if architecture.hidden % architecture.width:
        raise UnavailableError(f"mmsegmentation has no MLP of {architecture.mlp_ratio:g} times the width")
    options: dict[str, Any] = {
        "img_size": architecture.image_size,
        "patch_size": architecture.patch,
        "embed_dims": architecture.width,
        "num_layers": architecture.depth,
        "num_heads": architecture.heads,
        "mlp_ratio": architecture.hidden // architecture.width,
        "norm_cfg": {"type": "LN", "eps": architecture.norm_eps},
        "final_norm": "ln1.weight" in state,
    }
    model: Any
    if "layers.0.attn.attn.in_proj_weight" in state:
        bias = "patch_embed.projection.bias" in state
        model = backbones.VisionTransformer(**options, patch_bias=bias, output_cls_token=True)
    elif "layers.0.attn.q_bias" in state:
        model = backbones.BEiT(**options)
    else:
        model = backbones.MAE(**options)
    made = {key: value for key, value in model.state_dict().items() if re.fullmatch(BESIDE_MM, key)}
    _fill(model, _without(state, BESIDE_MM) | made)
    last = model.norm1 if options["final_norm"] else model.layers[-1]
    return _title("mmseg", model), _output_of(last, partial(model, images))


def _mmpretrain(state: Tensors, architecture: Architecture, images: Tensor) -> tuple[str, Tensor]:
    raise UnavailableError("mmpretrain is none of the packages that this project installs")


Original = Callable[[Tensors, Architecture, Tensor], tuple[str, Tensor]]
ORIGINALS: dict[FoundLayout, Original] = {
    "mae_bench": _plain_vit,
    "fair_mae": _plain_vit,
    "fair_mae_finetuned": _plain_vit,
    "vit": _plain_vit,
    "vit_classifier": _plain_vit,
    "deit3": _plain_vit,
    "moco_v3": _plain_vit,
    "dino": _plain_vit,
    "dinov2": _plain_vit,
    "beit": _beit,
    "beit_finetuned": _beit,
    "augreg": _augreg,
    "hf_vit_mae": _hf_vit_mae,
    "hf_vit": _hf_vit,
    "hf_beit": _hf_beit,
    "hf_dinov2": _hf_dinov2,
    "vitdet": _vitdet,
    "mmpretrain": _mmpretrain,
    "mmseg": _mmseg,
}
