"""Files of the other layouts that must not load, each refused in one line; and what is reported rather than refused."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import CASES, VITDET_OPTIONS, Case, saved
from safetensors.torch import save_file
from torch import Tensor

from mae_bench.checkpoints.files import read_tensors
from mae_bench.checkpoints.layouts import detect
from mae_bench.checkpoints.load import build_encoder
from mae_bench.errors import UserError

State = dict[str, Tensor]


class Bomb:
    """Pickles to a call of os.system."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def drop(pattern: str) -> Callable[[State], None]:
    """Remove the first key that fits."""

    def change(state: State) -> None:
        del state[next(key for key in state if re.search(pattern, key))]

    return change


def put(key: str, value: Tensor) -> Callable[[State], None]:
    return lambda state: state.update({key: value})


def first(key: str, value: Tensor) -> Callable[[State], None]:
    """The same, before all others: no answer may depend on the order."""

    def change(state: State) -> None:
        others = dict(state)
        state.clear()
        state.update({key: value, **others})

    return change


def altered(pattern: str, how: Callable[[Tensor], Tensor]) -> Callable[[State], None]:
    """Change the first tensor whose key fits."""

    def change(state: State) -> None:
        key = next(key for key in state if re.search(pattern, key))
        state[key] = how(state[key])

    return change


def scale(pattern: str, rows: int) -> Callable[[State], None]:
    """Give the first key that fits another length."""
    return altered(pattern, lambda value: torch.zeros(rows, *value.shape[1:]))


BLOCK_TABLE = "blocks.0.attn.relative_position_bias_table"
TABLES = f"'rel_pos_bias.relative_position_bias_table' and '{BLOCK_TABLE}' are the same tensor twice"
# case, change of its tensors, change of the recipe's architecture, what the line says
TABLE: dict[str, tuple[str, Callable[[State], None], dict[str, Any], str]] = {
    "HF without a key": ("hf_vit", drop(r"layer\.1\..*key\.weight"), {}, r"qkv\.weight lacks its part 'k'"),
    "HF with a short value": ("hf_vit", scale(r"layer\.0\..*value\.weight", 12), {}, "the parts of .* differ in shape"),
    "HF with a key of another type": (
        "hf_vit",
        altered(r"layer\.0\..*key\.weight", lambda value: value.to(torch.uint16)),
        {},
        "parts of .* differ in shape or type",
    ),
    "HF gate without up": ("hf_dinov2", drop(r"layer\.0\.mlp\.weights_out\.bias"), {}, "is missing"),
    "HF tensor twice": ("hf_vit", put("vit.layers.0.attention.q_proj.weight", torch.zeros(24, 24)), {}, "tensor twice"),
    "HF distilled": ("hf_vit", put("vit.embeddings.distillation_token", torch.zeros(1, 1, 24)), {}, "a distilled DeiT"),
    "Flax without a block": ("augreg", drop(r"encoderblock_1/MlpBlock_3/Dense_1/kernel"), {}, "fc2.weight' is missing"),
    "Flax of other heads": ("augreg", lambda state: None, {"heads": 4}, "made with heads = 3, backbone 'case' has 4"),
    "Flax of two counts of heads": (
        "augreg",
        altered(r"encoderblock_1/.*/out/kernel", lambda value: value.reshape(4, 6, 24)),
        {},
        "heads differs, 3 in 'Transformer/encoderblock_0/.*' and 4 in 'Transformer/encoderblock_1/.*/out/kernel'",
    ),
    "Flax of two counts of query heads": (
        "augreg",
        altered(r"query/kernel", lambda value: value.reshape(24, 4, 6)),
        {},
        "heads differs, 4 in .*query/kernel' and 3 in ",
    ),
    "Flax of two counts of bias heads": (
        "augreg",
        altered(r"value/bias", lambda value: value.reshape(4, 6)),
        {},
        "heads differs, 3 in .* and 4 in .*value/bias'",
    ),
    "Flax norm twice": (
        "augreg",
        put("Transformer/encoder_norm/kernel", torch.ones(24)),
        {},
        "'Transformer/encoder_norm/scale' and 'Transformer/encoder_norm/kernel' are the same tensor twice",
    ),
    "BEiT with a table for all and one of a block": ("beit", put(BLOCK_TABLE, torch.zeros(84, 3)), {}, TABLES),
    "the same, in another order": ("beit", first(BLOCK_TABLE, torch.zeros(84, 3)), {}, TABLES),
    "BEiT without its table": ("beit", drop("bias_table"), {}, "is a DINOv2 encoder .* means a BEiT"),
    "BEiT of another grid": ("beit", scale("bias_table", 9 * 7 + 3), {}, r"table has shape 66x3, .* has 84x3"),
    "BEiT as fine-tuned": ("beit_finetuned", lambda state: None, {"final_norm": "tokens"}, "final_norm = 'pooled'"),
    "BEiT without value bias": ("beit", drop(r"blocks\.0\.attn\.v_bias"), {}, "qkv.bias lacks its part"),
    "DINOv2 with registers": ("dinov2_registers", lambda state: None, {"registers": 0}, "with registers = 4"),
    "DINOv2 without registers": ("dinov2", lambda state: None, {"registers": 4}, "with registers = 0"),
    "SwiGLU as GELU": ("dinov2_chunked_swiglu", lambda state: None, {"mlp": "gelu"}, "with mlp = 'swiglu'"),
    "both names of a scale": ("deit3", put("blocks.0.ls1.gamma", torch.zeros(24)), {}, "the same tensor twice"),
    "DeiT III with a position": (
        "deit3",
        put("pos_embed", torch.zeros(1, 26, 24)),
        {},
        "is a DINOv2 .* means a DeiT III",
    ),
    "MoCo v3 without encoder": ("moco_v3", drop("base_encoder.*proj.weight"), {}, "unknown layout"),
    "ViTDet as a plain ViT": ("vitdet", lambda state: None, {"class_token": True, "rel_pos": "none"}, "with "),
    "mm with timm's block": ("mmseg_mae", put("backbone.layers.0.norm1.weight", torch.zeros(24)), {}, "unknown layout"),
    "mm without a table": ("mmseg_mae", drop(r"layers\.1.*bias_table"), {}, "bias_table' is missing"),
    "transposed kernel": ("timm_dino", put("blocks.0.mlp.fc1.weight", torch.zeros(24, 96)), {}, "has shape 24x96"),
    "nobody's tensor": ("dinov2", put("blocks.0.0.attn.gate", torch.zeros(3)), {}, "unknown layout.*'blocks.0.0.attn"),
    "block number beyond reason": ("timm_dino", put("blocks.99999.norm1.bias", torch.zeros(24)), {}, "unknown layout"),
    "a block too many": ("timm_dino", put("blocks.9.norm1.bias", torch.zeros(24)), {}, "depth 10"),
    "wrong values for MAE": ("fair_mae", put("pos_embed", torch.zeros(1, 26, 24)), {}, "positions are not MAE's"),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:Fail to import ``MultiScaleDeformableAttention``:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")
def test_it_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    maker, change, architecture, message = TABLE[name]
    case = CASES[maker](tmp_path)
    state, metadata = read_tensors(case.path)
    change(state)
    path = rewritten(case, state, metadata.get("wrapper", ""))
    changed = case.architecture.model_copy(update=architecture)
    with pytest.raises(UserError) as caught:
        build_encoder(case.backbone.model_copy(update={"architecture": changed}), path, seed=0)
    text = str(caught.value)
    assert re.search(message, text), text
    assert str(path) in text and text.isprintable() and len(text) < 700 + len(str(path))


def rewritten(case: Case, state: State, wrapper: str) -> Path:
    """The changed tensors in a new file: those that were read may be views of the old one."""
    path = case.path.with_name("changed" + case.path.suffix)
    if path.suffix == ".npz":
        np.savez(path, **{key: value.numpy() for key, value in state.items()})  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({wrapper: state} if wrapper else state, path)
    return path


def test_other_windows_than_the_files(tmp_path: Path) -> None:
    case = CASES["vitdet"](tmp_path)
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.rel_pos_h of the file is 5x8, for other windows .* 3x8"):
        build_encoder(case.backbone, case.path, seed=0, **(VITDET_OPTIONS | {"window": 2}))


@pytest.mark.parametrize("where", ["model", "beside"])
def test_code_in_a_pickle_of_arrays_is_named_and_not_run(where: str, tmp_path: Path) -> None:
    case, target = CASES["vitdet_pkl"](tmp_path), tmp_path / "ran"
    content = pickle.loads(case.path.read_bytes())  # noqa: S301 -- written just now
    (content["model"] if where == "model" else content)["x"] = Bomb(target)
    case.path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"was not opened: it wants to run or load '(posix|nt)\.system'"):
        build_encoder(case.backbone, case.path, seed=0, **VITDET_OPTIONS)
    assert not target.exists()


@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3),
    keep=st.floats(0.1, 1),
    name=st.sampled_from(["vitdet_pkl", "augreg"]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")  # NumPy warns about headers that the damage invents
def test_damaged_bytes_end_in_a_user_error_or_in_other_values(
    flips: list[tuple[int, int]], keep: float, name: str, tmp_path: Path
) -> None:
    case = CASES[name](Path(tempfile.mkdtemp(dir=tmp_path)))
    content = bytearray(case.path.read_bytes())
    for where, flip in flips:
        content[where % min(len(content), 4000)] ^= flip
    case.path.write_bytes(content[: int(keep * len(content))])
    options = VITDET_OPTIONS if name == "vitdet_pkl" else {}
    try:
        message = build_encoder(case.backbone, case.path, seed=0, **options)[1].line()
    except UserError as error:
        message = str(error)
    assert message.isprintable()


DECODER = r"^decoder\."
CLASSIFIER = {"classifier.weight": torch.ones(10, 24), "classifier.bias": torch.ones(10)}


@pytest.mark.parametrize(
    ("name", "without", "also", "detail", "labelled"),
    [
        ("fair_mae", "", {}, "FAIR MAE encoder + decoder (full or visualize)", False),
        ("deit", "", {}, "ViT classifier", True),
        ("beit_finetuned", "", {}, "BEiT fine-tuned", True),
        ("augreg", "", {}, "Flax ViT", True),
        ("hf_vit", "", {}, "Hugging Face ViT with a classifier", True),
        ("hf_vit_module_names", "", {}, "Hugging Face ViT", False),
        ("hf_vit_mae", "", {}, "Hugging Face ViTMAE with decoder", False),
        ("hf_vit_mae", DECODER, CLASSIFIER, "Hugging Face ViTMAE with a classifier", True),
        ("hf_beit_finetuned", "", {}, "Hugging Face BEiT with a classifier", True),
        ("mmpretrain_mae", "", {}, "mmpretrain", False),
        ("mmpretrain_mae", "neck", {"head.predictor.fc0.weight": torch.ones(8, 8)}, "mmpretrain", False),
        ("mmpretrain_mae", "neck", {"head.cls_head.weight": torch.ones(8, 8)}, "mmpretrain", False),
        ("mmpretrain_mae", "neck", {"head.fc.weight": torch.ones(10, 24)}, "mmpretrain with a classifier", True),
        ("mmpretrain_mae", "neck", {"head.layers.head.weight": torch.ones(1)}, "mmpretrain with a classifier", True),
        ("dino", "", {}, "DINO, teacher of a training checkpoint", False),
        ("dinov2_chunked_swiglu", "", {}, "DINOv2, teacher of a training checkpoint", False),
    ],
)
def test_a_file_with_a_classifier_says_so(
    name: str, without: str, also: State, detail: str, labelled: bool, tmp_path: Path
) -> None:
    path = CASES[name](tmp_path).path
    tensors, metadata = read_tensors(path)
    left = {key: value for key, value in tensors.items() if not without or not re.search(without, key)}
    found = detect(path, left | also, metadata)
    assert (found.detail, found.labelled) == (detail, labelled)


def test_half_precision_is_reported(tmp_path: Path) -> None:
    case = CASES["dinov2"](tmp_path)
    state = {key: value.half() for key, value in read_tensors(case.path)[0].items()}
    _, report = build_encoder(case.backbone, saved(tmp_path, state), seed=0)
    assert "float16 -> float32" in report.transforms


def test_conversions_are_reported(tmp_path: Path) -> None:
    case = CASES["beit"](tmp_path)
    encoder, report = build_encoder(case.backbone, case.path, seed=0, grid=(7, 7))
    assert report.transforms == [
        "shared relative position bias copied into every block",
        "qkv.bias: zeros for the key, which has no bias in the file",
        "attn.relative_position_bias_table: 5x5 -> 7x7, cubic spline on a geometric grid (BEiT)",
    ]
    assert encoder.blocks[1].attn.relative_position_bias_table.shape == (13 * 13 + 3, 3)


SLOW = {name for name in CASES if name.startswith("mmseg")}


@given(data=st.data(), name=st.sampled_from(sorted(set(CASES) - SLOW)))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tensor_of_any_other_shape_is_a_user_error(data: st.DataObject, name: str, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # tensors of the example before may be views of its file
    case = CASES[name](folder)
    state, metadata = read_tensors(case.path)
    key = data.draw(st.sampled_from(sorted(set(state) - case.unused)))
    if case.layout == "vitdet" and not key.startswith("backbone.net."):
        return  # of the detector around the encoder
    shapes = [(), (0,), (1,), (7,), (3, 0), (24, 24, 1), (1, 26, 24, 1), (1, 2, 3, 4, 5)]
    shape = data.draw(st.sampled_from([shape for shape in shapes if shape != tuple(state[key].shape)]))
    state[key] = torch.zeros(shape, dtype=data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool])))
    path = rewritten(case, state, metadata.get("wrapper", ""))
    with pytest.raises(UserError) as caught:
        build_encoder(case.backbone, path, seed=0, **(VITDET_OPTIONS if case.layout == "vitdet" else {}))
    assert str(caught.value).isprintable()
