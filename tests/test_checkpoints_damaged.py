"""Files that must not load: each is refused in one line that names what was found and what was meant."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import ARCHITECTURE, backbone, decoder, own, save_pth, timm_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mae_bench.checkpoints.load import build_encoder, save_encoder
from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder
from mae_bench.errors import UserError
from mae_bench.schema import Backbone

Make = Callable[[Path], Path]


class Bomb:
    """Pickles to a call of os.system."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def edited(change: Callable[[dict[str, torch.Tensor]], Any], **options: Any) -> Make:
    """A FAIR file of which one thing is changed."""

    def make(folder: Path) -> Path:
        state = timm_state(**options)
        change(state)
        return save_pth(folder / "file.pth", state)

    return make


def of(architecture: dict[str, Any]) -> Make:
    """A sound FAIR encoder of another size."""

    def make(folder: Path) -> Path:
        encoder = Encoder(ARCHITECTURE.model_copy(update=architecture))
        encoder.initialise(0)
        return save_pth(folder / "file.pth", dict(encoder.state_dict()))

    return make


def raw(content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / "file.pth").write_bytes(content)
        return folder / "file.pth"

    return make


def truncated(make: Make, keep: float) -> Make:
    def cut(folder: Path) -> Path:
        path = make(folder)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        return path

    return cut


def fair(folder: Path) -> Path:
    return save_pth(folder / "file.pth", timm_state())


def safetensors(folder: Path) -> Path:
    save_file(timm_state(), folder / "file.safetensors")
    return folder / "file.safetensors"


def torch_saved(content: Any, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        torch.save(content, folder / "file.pth", **options)
        return folder / "file.pth"

    return make


def compressed(folder: Path) -> Path:
    path = fair(folder)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / "z.pth", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return folder / "z.pth"


def npz(folder: Path) -> Path:
    np.savez(folder / "file.npz", kernel=np.zeros(3))
    return folder / "file.npz"


def npz_of_objects(folder: Path) -> Path:
    np.savez(folder / "file.npz", kernel=np.array([{}, None], dtype=object))
    return folder / "file.npz"


def npz_bomb(folder: Path) -> Path:
    np.savez_compressed(folder / "file.npz", kernel=np.zeros(10**6))
    return folder / "file.npz"


def other_heads(folder: Path) -> Path:
    encoder = Encoder(ARCHITECTURE.model_copy(update={"heads": 6}))
    encoder.initialise(0)
    save_encoder(folder / "file.safetensors", encoder, {})
    return folder / "file.safetensors"


def finetuned(state: dict[str, torch.Tensor]) -> None:
    state |= {"fc_norm.weight": state.pop("norm.weight"), "fc_norm.bias": state.pop("norm.bias")}
    state |= {"head.weight": torch.zeros(10, 24), "head.bias": torch.zeros(10)}


def exchange(state: dict[str, torch.Tensor]) -> None:
    table = sincos_table(24, (5, 5), class_token=True)
    state["pos_embed"] = torch.cat([table[..., 12:], table[..., :12]], dim=2)


def transpose(state: dict[str, torch.Tensor]) -> None:
    state["pos_embed"] = state["pos_embed"].transpose(1, 2)


def prefixed(prefix: str) -> Make:
    return lambda folder: save_pth(folder / "file.pth", {prefix + key: value for key, value in timm_state().items()})


def put(**tensors: torch.Tensor) -> Make:
    return edited(lambda state: state.update({key.replace("__", "."): value for key, value in tensors.items()}))


MAE, DEIT, MADE = backbone(), backbone("vit_classifier"), backbone("made")
SIZE = r"a ViT, patch 4 \(width 24, depth 2, 26 positions\)"
TABLE: dict[str, tuple[Make, Backbone, str]] = {
    # contents that are not the recipe's
    "missing tensor": (
        edited(lambda s: s.pop("blocks.1.mlp.fc2.bias")),
        MAE,
        r"'blocks\.1\.mlp\.fc2\.bias' is missing",
    ),
    "missing norm": (edited(lambda s: s.pop("norm.weight")), MAE, r"'norm\.weight' is missing"),
    "no positions": (edited(lambda s: s.pop("pos_embed")), MAE, "positions are not MAE's"),
    "extra block": (
        put(blocks__0__attn__rel_pos_h=torch.zeros(9, 8)),
        MAE,
        "with rel_pos = 'decomposed', .* declares 'none'",
    ),
    "extra tensor": (put(temperature=torch.zeros(1)), MAE, r"unknown layout. Unexpected tensors: 'temperature'\."),
    "wrong width": (of({"width": 48}), MAE, rf"holds .*\(width 48, depth 2, 26 positions\), .* means {SIZE}"),
    "wrong depth": (of({"depth": 3}), MAE, rf"width 24, depth 3, .* means {SIZE}"),
    "wrong patch": (of({"patch": 2, "image_size": 10}), MAE, rf"patch 2 .* means {SIZE}"),
    "wrong grid": (of({"image_size": 24}), MAE, rf"37 positions\), .* means {SIZE}"),
    "wrong mlp": (of({"mlp_ratio": 2.0}), MAE, "mlp.fc1.weight has shape 48x24, a ViT.* has 96x24"),
    "NaN": (put(norm__bias=torch.full((24,), torch.nan)), MAE, "norm.bias contains NaN or infinite values"),
    "integers": (put(norm__bias=torch.zeros(24, dtype=torch.int64)), MAE, "norm.bias has type torch.int64"),
    "stretched view": (put(norm__bias=torch.zeros(1).expand(10**6)), MAE, "'norm.bias' is a view of less data"),
    "other heads": (other_heads, MADE, "made with heads = 6, backbone 'small_made' has 3"),
    # other layouts
    "prefix encoder.": (
        prefixed("encoder."),
        MAE,
        "prefix of another project. Unexpected tensors: 'encoder.cls_token'",
    ),
    "ViTDet": (prefixed("backbone.net."), MAE, "is a detectron2 ViTDet; .* means a FAIR MAE"),
    "MoCo v3": (prefixed("module.base_encoder."), MAE, "is a MoCo v3 encoder .* means a FAIR MAE"),
    "Hugging Face": (put(vit__embeddings__cls_token=torch.zeros(1)), MAE, "unknown layout.*'vit.embeddings.cls_token'"),
    "half a prefix": (put(module__patch_embed__proj__weight=torch.zeros(1)), MAE, "unknown layout"),
    "exchanged axes": (edited(exchange), MAE, "sin-cos positions with rows first.* means a FAIR MAE"),
    "transposed table": (edited(transpose), MAE, "positions are not MAE's sin-cos table .* means a FAIR MAE"),
    "learned positions": (edited(lambda s: None, fixed_positions=False), MAE, "positions are not MAE's"),
    "decoder only": (lambda f: save_pth(f / "x.pth", decoder()), MAE, "looks like the decoder of a MAE"),
    "fine-tuned": (edited(finetuned), MAE, "is a FAIR MAE fine-tuned classifier .*, the file meant.pth"),
    "fine-tuned as DeiT": (edited(finetuned), DEIT, "is a FAIR MAE fine-tuned classifier .* means a supervised"),
    "DeiT as MAE": (edited(lambda s: None, classes=10), MAE, "is a supervised ViT classifier .* means a FAIR MAE"),
    "MAE as DeiT": (fair, DEIT, "is a FAIR MAE pre-trained encoder .* means a supervised"),
    "MAE as made": (fair, MADE, "is a FAIR MAE pre-trained encoder .* means a mae_bench encoder"),
    "distilled DeiT": (put(dist_token=torch.zeros(1, 1, 24)), DEIT, "looks like a distilled DeiT"),
    "layer scale": (
        put(blocks__0__gamma_1=torch.zeros(24)),
        MAE,
        r"is a DINOv2 encoder \(layer scale\); .* means a FAIR",
    ),
    "DINO's wrapper": (
        torch_saved({"teacher": timm_state(), "epoch": 3}),
        MAE,
        "is a DINO training checkpoint; .* FAIR",
    ),
    "other wrapper": (torch_saved({"net": timm_state(), "epoch": 3}), MAE, "'net' is no plain tensor but a dict"),
    "list": (torch_saved([torch.zeros(1)]), MAE, "holds a list, not a dictionary"),
    "numbers in it": (edited(lambda s: s.update(norm=1)), MAE, "'norm' is no plain tensor but a int"),
    "sparse": (put(norm=torch.eye(2).to_sparse()), MAE, "'norm' is a sparse tensor"),
    "evil name": (edited(lambda s: s.update({"a\nb\x1b[2J": torch.zeros(1)})), MAE, r"'a\\nb\\x1b\[2J'"),
    # files that are no weight files, or no longer
    "empty": (raw(b""), MAE, "is empty"),
    "web page": (raw(b"\n<!DOCTYPE html><html>Not found</html>"), MAE, "is a web page, not a weight file"),
    "text": (raw(b"a plain text file"), MAE, "neither a safetensors nor a torch file"),
    "LFS pointer": (raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), MAE, "Git LFS pointer"),
    "npz": (npz, MAE, "unknown layout.*'kernel'"),
    "npz of objects": (npz_of_objects, MAE, "'kernel' is an array of 'O', not of numbers"),
    "npz bomb": (npz_bomb, MAE, "would unpack to [0-9]+ bytes"),
    "compressed zip": (compressed, MAE, "a zip that torch did not write"),
    "truncated .pth": (truncated(fair, 0.7), MAE, "truncated or damaged torch file"),
    "truncated legacy": (
        truncated(torch_saved(timm_state(), _use_new_zipfile_serialization=False), 0.7),
        MAE,
        "damaged .*torch file",
    ),
    "truncated safetensors": (truncated(safetensors, 0.7), MAE, "truncated or damaged safetensors file"),
    "cut in the header": (truncated(safetensors, 0.01), MAE, "truncated safetensors file"),
    "wrong sha256": (
        lambda folder: fair(folder).rename(folder / "meant.pth"),
        backbone(sha256="ab" * 32),
        r"sha256 is [0-9a-f]{64}, the recipe means (ab){32}; fetch it again from https://example.org/meant.pth",
    ),
    "wrong md5": (
        lambda folder: fair(folder).rename(folder / "meant.pth"),
        backbone(md5_prefix="0a0a0a0a0a"),
        r"md5 is [0-9a-f]{32}, the recipe means 0a0a0a0a0a",
    ),
    "absent": (lambda folder: folder / "absent.pth", MAE, "cannot read the weight file .*No such file"),
    "folder": (lambda folder: folder, MAE, "cannot read the weight file .*directory"),
}


@pytest.mark.filterwarnings("ignore:.*[sS]parse")  # torch warns of a sparse tensor before we refuse it
@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, recipe, message = TABLE[name]
    path = make(tmp_path)
    with pytest.raises(UserError) as caught:
        build_encoder(recipe, path, seed=0)
    text = str(caught.value)
    assert re.search(message, text), text
    assert str(path) in text
    assert text.isprintable(), text
    assert len(text) < 700 + len(str(path))


@pytest.mark.parametrize("how", ["zip", "legacy", "bare pickle", "in args"])
def test_code_in_a_pickle_is_named_and_not_run(how: str, tmp_path: Path) -> None:
    target, path = tmp_path / "ran", tmp_path / "file.pth"
    bomb = Bomb(target)
    if how == "bare pickle":
        path.write_bytes(pickle.dumps({"model": bomb}, protocol=2))
    elif how == "in args":
        save_pth(path, timm_state(), args=argparse.Namespace(output=bomb))
    else:
        torch.save({"model": timm_state(), "epoch": bomb}, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(UserError, match=r"wants to run or load '(posix|nt)\.system'|unsafe torch file"):
        build_encoder(MAE, path, seed=0)
    assert not target.exists()


@given(keep=st.floats(0, 0.999), kind=st.sampled_from(["fair", "safetensors", "own"]))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_truncation_loads(keep: float, kind: str, tmp_path: Path) -> None:
    makers: dict[str, Make] = {"fair": fair, "safetensors": safetensors, "own": lambda folder: own(folder)[0]}
    path = truncated(makers[kind], keep)(tmp_path)
    with pytest.raises(UserError):
        build_encoder(MAE, path, seed=0)


@given(
    flips=st.lists(st.tuples(st.floats(0, 0.9999), st.integers(1, 255)), min_size=1, max_size=3),
    kind=st.sampled_from(["fair", "legacy", "safetensors"]),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")  # torch warns about pickle protocols that the damage invents
def test_damaged_bytes_end_in_a_user_error_or_in_other_values(
    flips: list[tuple[float, int]], kind: str, tmp_path: Path
) -> None:
    legacy = torch_saved({"model": timm_state()}, _use_new_zipfile_serialization=False)
    path = {"fair": fair, "legacy": legacy, "safetensors": safetensors}[kind](tmp_path)
    content = bytearray(path.read_bytes())
    for where, flip in flips:
        content[int(where * min(len(content), 3000))] ^= flip  # the head, where the structure is
    path.write_bytes(content)
    try:
        encoder, report = build_encoder(MAE, path, seed=0)
    except UserError as error:
        message = str(error)
    else:
        message = report.line()
        assert report.matched == report.total == len(encoder.state_dict())
    assert message.isprintable()
