"""`inspect` and `--prove`: files of every layout beside their original implementation, and files that are not sound."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import backbone, decoder, own, save_pth, timm_state
from layout_cases import CASES, PLAIN, Case
from torch import Tensor

from mae_bench import cli
from mae_bench.checkpoints import layouts, proof
from mae_bench.checkpoints.files import read_tensors
from mae_bench.checkpoints.findings import MAX_KINDS, Inspection, joined, shown, starred
from mae_bench.checkpoints.inspection import inspect
from mae_bench.checkpoints.layouts import detect
from mae_bench.checkpoints.load import save_model
from mae_bench.checkpoints.originals import RefusedError, UnavailableError, original_features
from mae_bench.errors import UserError
from mae_bench.hashing import file_hash
from mae_bench.schema import Backbone

ORIGINALS = {
    "beit": r"timm 1\.\d+\.\d+ Beit",
    "beit_finetuned": r"timm 1\.\d+\.\d+ Beit",
    "hf_vit": r"transformers \S+ ViTModel",
    "hf_vit_mae": r"transformers \S+ ViTMAEModel",
    "hf_beit": r"transformers \S+ Beit(Model|ForMaskedImageModeling)",
    "hf_dinov2": r"transformers \S+ Dinov2(WithRegisters)?Model",
    "vitdet": r"detectron2 \S+ ViT",
    "mmseg": r"mmseg \S+ (MAE|BEiT|VisionTransformer)",
}
TIMM = r"timm 1\.\d+\.\d+ VisionTransformer"


@pytest.mark.parametrize("name", [name for name in CASES if name != "mmpretrain_mae"])
def test_every_layout_is_proven_by_its_original(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    found = inspect(case.path, case.backbone, prove=True)
    comparison = found.comparison
    assert comparison is not None and comparison.proven is True and found.proven and found.sound
    assert re.fullmatch(ORIGINALS.get(case.layout, TIMM), comparison.original)
    assert comparison.difference is not None and comparison.difference < 1e-5
    architecture = case.architecture
    rows = architecture.grid**2 + int(architecture.class_token) + architecture.registers
    rows += int(architecture.final_norm == "pooled")
    assert comparison.features == rows * architecture.width
    assert found.layout == case.layout and found.unused.keys() == case.unused
    assert found.declared is not None and len(found.declared.fingerprint) == 16
    _readable(found)


def _readable(found: Inspection) -> None:
    """JSON that any reader takes; text of printable lines, with every kind of tensor on one."""
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["sound"] is found.sound
    lines = found.text().split("\n")
    assert all(line.isprintable() and line == line.rstrip() and len(line) < 500 for line in lines)
    assert len(lines) < 60
    kinds = {starred(line.name) for line in found.tensors}
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= kinds


def test_our_own_files_are_proven_by_timm(tmp_path: Path) -> None:
    file, recipe, _, _ = own(tmp_path)
    found = inspect(file, recipe, prove=True)
    assert found.proven and found.layout == "mae_bench"
    assert found.declared is not None and found.declared.hash == "" and found.declared.published is None


def test_our_own_file_without_the_final_norm(tmp_path: Path) -> None:
    file, recipe, _, _ = own(tmp_path)
    tensors, metadata = read_tensors(file)
    kept = {key: value for key, value in tensors.items() if not key.startswith("norm.")}
    save_model(file, kept, metadata)
    found = inspect(file, recipe, prove=True)
    assert found.proven
    assert found.declared is not None and found.facts["final_norm"] == "none"
    assert "loaded 28/28" in found.declared.report


@pytest.mark.parametrize("name", ["hf_vit", "augreg"])
def test_a_wrong_table_of_ours_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes fit, every tensor is used, and queries stand where keys belong: only the features tell."""
    case = CASES[name](tmp_path)
    monkeypatch.setattr(layouts, "PARTS", (("k", "q", "v"), ("gate", "up")))
    found = inspect(case.path, case.backbone, prove=True)
    assert found.proven is False and not found.sound
    assert "NOT THE SAME FEATURES, largest difference" in found.text()
    _readable(found)


def _original(case: Case, tensors: dict[str, Tensor]) -> tuple[str, Tensor]:
    found = detect(case.path, *read_tensors(case.path))
    images = proof.normalised(proof.picture(20), case.backbone.input)
    return original_features(found.layout, tensors, found.prefix, case.architecture, images)


# One tensor of the last block in the file's own words, for each way of filling an original.
LAST = {
    "fair_mae": "blocks.1.mlp.fc2.bias",
    "beit": "blocks.1.gamma_2",
    "augreg": "Transformer/encoderblock_1/MlpBlock_3/Dense_1/bias",
    "hf_vit": "vit.encoder.layer.1.output.dense.bias",
    "vitdet": "backbone.net.blocks.1.mlp.fc2.bias",
    "mmseg_mae": "backbone.layers.1.gamma_2",
}


@pytest.mark.parametrize("name", LAST)
def test_an_original_never_makes_up_a_tensor(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    tensors, _ = read_tensors(case.path)
    _original(case, dict(tensors))
    del tensors[LAST[name]]
    with pytest.raises(RefusedError):
        _original(case, tensors)


@pytest.mark.parametrize("name", [name for name in LAST if name != "augreg"])
def test_an_original_never_passes_over_a_tensor(name: str, tmp_path: Path) -> None:
    """timm's reader of Flax files takes what it knows; that nothing is left over there is for `detect`."""
    case = CASES[name](tmp_path)
    tensors, _ = read_tensors(case.path)
    tensors[LAST[name].replace("1", "7")] = torch.ones(24)
    with pytest.raises(RefusedError):
        _original(case, tensors)


def test_a_refusal_is_a_failed_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["fair_mae"](tmp_path)
    monkeypatch.setattr("mae_bench.checkpoints.originals.BESIDE_VIT", "nothing")
    found = inspect(case.path, case.backbone, prove=True)
    assert found.proven is False
    assert "the original refuses the file's tensors" in found.text() and "decoder_" in found.text()
    _readable(found)


def test_an_original_that_is_not_installed_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["hf_vit"](tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = inspect(case.path, case.backbone, prove=True)
    assert found.proven is None and found.sound
    assert "original     not compared: transformers is not installed" in found.text()


def test_mmpretrain_is_not_compared(tmp_path: Path) -> None:
    case = CASES["mmpretrain_mae"](tmp_path)
    found = inspect(case.path, case.backbone, prove=True)
    assert found.proven is None and "not compared: mmpretrain is none of the packages" in found.text()
    _readable(found)


@pytest.mark.parametrize("features", [{"registers": 2}, {"positions": "none", "rel_pos": "bias"}])
def test_architectures_that_timm_lacks_are_not_compared(features: dict[str, Any]) -> None:
    architecture = PLAIN.model_validate(PLAIN.model_dump() | features)
    with pytest.raises(UnavailableError, match=r"^timm "):
        original_features("mae_bench", {}, "", architecture, torch.zeros(1, 3, 20, 20))


def test_text_for_people(tmp_path: Path) -> None:
    file = save_pth(tmp_path / "f.pth", timm_state() | decoder(), epoch=3)
    text = inspect(file, backbone(), prove=False).text()
    for line in (
        f"f.pth   {file.stat().st_size:,} bytes",
        f"  sha256       {file_hash(file)}",
        "  layout       fair_mae: FAIR MAE encoder + decoder (full or visualize)",
        "  wrapper      model",
        "  beside it    epoch",
        "  encoder      a ViT, patch 4 (width 24, depth 2, 26 positions)",
        "  values       16,320 in 30 tensors, float32",
        "  blocks.*.attn.qkv.weight    2 x (72, 24)",
        "  1 not used (token of masked patches, of pre-training only): mask_token",
        "  6 not used (MAE decoder, of pre-training only): decoder_pos_embed, decoder_embed.weight, …",
        "as small_fair_mae",
        "  mean         0.5 0.5 0.5",
        "  licence      CC-BY-NC-4.0",
        "  pre-trained  norm_pix, IN1K, 1600 epochs",
        "  hash         none published: unverified",
        "  fingerprint  the recipe states none",
        "  first seen   no lock beside it",
    ):
        assert line in text.split("\n"), line
    assert "original" not in text, "not asked for"


def test_parts_are_shown_together(tmp_path: Path) -> None:
    text = inspect(CASES["hf_vit"](tmp_path).path, None, prove=False).text()
    assert "<- encoder.layer.*.attention.attention.{query,key,value}.weight" in text
    assert "  prefix       vit." in text and "  changed      q, k, v joined" in text


def test_helpers_of_the_text() -> None:
    assert starred("layers.10.ffn.layers.0.0.weight") == "layers.*.ffn.layers.0.0.weight"
    assert starred("Transformer/encoderblock_3/LayerNorm_2/bias") == "Transformer/encoderblock_*/LayerNorm_2/bias"
    assert starred("norm1.weight") == "norm1.weight"
    assert starred("blocks.0.11.ls1.gamma") == "blocks.*.*.ls1.gamma"
    assert joined(["a/q/w", "a/k/w"]) == "a/{q,k}/w" and joined(["a.b", "c"]) == "a.b + c" and joined(["a.b"]) == "a.b"
    assert shown("plain.name") == "plain.name"
    assert shown("\x1b[31m\u202e").isprintable() and len(shown("x" * 1000)) < 90


def test_odd_values_are_pointed_out(tmp_path: Path) -> None:
    state = timm_state()
    state["blocks.0.norm1.weight"].fill_(1)
    state["blocks.1.norm1.weight"].fill_(1)
    state["norm.bias"].zero_()
    state["blocks.1.mlp.fc1.bias"][3] = torch.inf
    found = inspect(save_pth(tmp_path / "f.pth", state), None, prove=False)
    lines = found.text().split("\n")
    assert "  2 constant: blocks.*.norm1.weight" in lines
    assert "  1 all zero: norm.bias" in lines
    assert "  1 NaN or infinite: blocks.*.mlp.fc1.bias" in lines
    told = {line.name: line for line in found.tensors}
    assert told["blocks.1.mlp.fc1.bias"].mean is None
    weight = state["norm.weight"]
    assert told["norm.weight"].mean == pytest.approx(weight.mean().item(), rel=1e-5)
    assert told["norm.weight"].std == pytest.approx(weight.std(correction=0).item(), rel=1e-5)
    _readable(found)
    with pytest.raises(UserError, match="contains NaN or infinite values"):
        inspect(tmp_path / "f.pth", backbone(), prove=False)


def test_finite_weights_with_features_that_are_not(tmp_path: Path) -> None:
    state = timm_state()
    state["norm.weight"].fill_(3e38)
    with pytest.raises(UserError, match=r"f\.pth.* not finite"):
        inspect(save_pth(tmp_path / "f.pth", state), backbone(), prove=False)


def test_names_from_the_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    for name in ("decoder_\x1b[2J\x1b]0;owned\x07", "decoder_0\u202e", "head.\n"):
        with pytest.raises(UserError) as caught:
            inspect(save_pth(tmp_path / "e.pth", timm_state() | {name: torch.ones(2)}), None, prove=False)
        assert str(caught.value).isprintable()
    long = {"decoder_" + "x" * 5000: torch.ones(2)} | {f"decoder_{number}x": torch.ones(1) for number in range(300)}
    file = save_pth(tmp_path / "f.pth", timm_state() | long, **{"\x1b[31mepoch": 3})
    for recipe in (None, backbone()):
        found = inspect(file, recipe, prove=False)
        assert len(found.text()) < 6000
        _readable(found)


def test_a_file_of_a_thousand_kinds_of_tensors_stays_short(tmp_path: Path) -> None:
    state = timm_state()
    for block in range(2, 1500):
        state |= {f"blocks.{block}.mlp.fc1.bias": torch.ones(block)}
    found = inspect(save_pth(tmp_path / "f.pth", state), None, prove=False)
    assert len(found.tensors) == 30 + 1498
    assert len(found.text().split("\n")) < MAX_KINDS + 30 and "more kinds" in found.text()


def _recipe(folder: Path, recipe: Backbone, name: str) -> None:
    """The recipe as a TOML file below ``folder``."""
    values = recipe.model_dump(mode="json", exclude_none=True) | {"name": name}
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in sections]
    for section, inner in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
    path = folder / "backbones" / "own" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def test_recipes_that_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = backbone()
    _recipe(tmp_path, recipe, "fits")
    _recipe(tmp_path, recipe.model_copy(update={"refused": "no"}), "is_refused")
    _recipe(tmp_path, backbone("vit_classifier"), "other_layout")
    deeper = recipe.architecture.model_copy(update={"depth": 3})
    _recipe(tmp_path, recipe.model_copy(update={"architecture": deeper}), "other_shapes")
    _recipe(tmp_path, backbone("made"), "made_here")
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    file = save_pth(tmp_path / "f.pth", timm_state())
    assert inspect(file, None, prove=False).fits == ["fits"]
    with pytest.raises(UserError, match=r"--prove needs what no file holds.*add --as fits$"):
        inspect(file, None, prove=True)
    ours, _, _, _ = own(tmp_path)
    assert inspect(ours, None, prove=False).fits == ["fits", "made_here"]
    found = inspect(save_pth(tmp_path / "v.pth", timm_state(fixed_positions=False)), None, prove=False)
    assert found.fits == [] and "  fits         none of the recipes" in found.text()


def test_heads_in_the_file_choose_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["augreg"](tmp_path)
    _recipe(tmp_path, case.backbone, "three_heads")
    other = case.architecture.model_copy(update={"heads": 2})
    _recipe(tmp_path, case.backbone.model_copy(update={"architecture": other}), "two_heads")
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    found = inspect(case.path, None, prove=False)
    assert found.fits == ["three_heads"] and "  features     heads 3" in found.text()


def test_a_file_that_is_not_what_the_backbone_means(tmp_path: Path) -> None:
    file = save_pth(tmp_path / "f.pth", timm_state(classes=3, fixed_positions=False))
    with pytest.raises(UserError, match="backbone 'small_fair_mae' means a FAIR MAE"):
        inspect(file, backbone(), prove=True)


def test_hash_fingerprint_and_lock_are_compared(tmp_path: Path) -> None:
    file = save_pth(tmp_path / "copy.pth", timm_state())
    sha256 = file_hash(file)
    numbers = inspect(file, backbone(), prove=False).declared
    assert numbers is not None
    recipe = backbone(sha256=sha256[:8]).model_copy(update={"fingerprint": numbers.fingerprint})
    proof.remember(file, recipe, sha256, numbers.fingerprint)
    found = inspect(file, recipe, prove=False)
    assert found.sound
    lines = found.text().split("\n")
    assert "  hash         sha256 prefix: equal to the published one" in lines
    assert "  fingerprint  equal to the recipe's" in lines
    assert f"  first seen   {found.declared.first_seen}: equal to that file" in lines  # type: ignore[union-attr]

    state = timm_state()
    state["norm.bias"][:] += 0.5
    save_pth(file, state)
    found = inspect(file, recipe, prove=False)
    assert not found.sound and found.declared is not None
    assert (found.declared.published, found.declared.expected, found.declared.unchanged) == (False, False, False)
    assert found.text().count("DIFFERS FROM") == 3
    _readable(found)


def test_each_finding_alone_makes_a_file_unsound(tmp_path: Path) -> None:
    file = save_pth(tmp_path / "copy.pth", timm_state())
    assert inspect(file, backbone(), prove=False).sound
    assert not inspect(file, backbone(sha256="0" * 64), prove=False).sound
    assert not inspect(file, backbone(md5_prefix="000000"), prove=False).sound
    assert not inspect(file, backbone().model_copy(update={"fingerprint": [0.5] * 16}), prove=False).sound
    proof.remember(file, backbone(), "0" * 64, [0.5] * 16)
    assert not inspect(file, backbone(), prove=False).sound


def test_windows_beyond_reason_are_refused(tmp_path: Path) -> None:
    """A window of a million patches would be padded to that, and take all memory."""
    case = CASES["vitdet"](tmp_path)
    tensors, _ = read_tensors(case.path)
    for block, rows in ((0, 199_999), (1, 200_001)):
        for side in "hw":
            tensors[f"backbone.net.blocks.{block}.attn.rel_pos_{side}"] = torch.zeros(rows, 8)
    save_pth(tmp_path / "f.pth", tensors)
    with pytest.raises(UserError, match="windows of 100000 patches; expected at most 64"):
        inspect(tmp_path / "f.pth", case.backbone, prove=False)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (), (5, 0)])
def test_tables_of_no_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    case = CASES["vitdet"](tmp_path)
    tensors, _ = read_tensors(case.path)
    tensors["backbone.net.blocks.0.attn.rel_pos_h"] = torch.zeros(shape)
    save_pth(tmp_path / "f.pth", tensors)
    inspect(tmp_path / "f.pth", None, prove=False)
    with pytest.raises(UserError):
        inspect(tmp_path / "f.pth", case.backbone, prove=True)


class _Run:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of the file ran",))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save_pth(tmp_path / "f.pth", timm_state())
    assert cli.main(["inspect", str(file)]) == 0
    assert capsys.readouterr().out.startswith("f.pth   ")
    assert cli.main(["inspect", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "fair_mae"
    for name, sha256, code in (("right", file_hash(file), 0), ("wrong", "0" * 64, 1)):
        _recipe(tmp_path, backbone(sha256=sha256), name)
        recipe = str(tmp_path / "backbones" / "own" / f"{name}.toml")
        assert cli.main(["inspect", str(file), "--as", recipe, "--prove"]) == code
        assert ("DIFFERS FROM the published one" in capsys.readouterr().out) == bool(code)
    (tmp_path / "bad.pth").write_bytes(pickle.dumps({"model": _Run()}))
    assert cli.main(["inspect", str(tmp_path / "bad.pth")]) == 2
    out, err = capsys.readouterr()
    assert "ran" not in out and "bad.pth" in err and err.count("\n") == 1
