"""Foreign weights through the command line: a recipe by path, fetched and proven, and another file with --weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layout_cases import timm

from mae_bench import cli
from mae_bench.hashing import file_hash
from mae_bench.reporting import store

RECIPE = """
name = "toy"
size = "t"
init = "dinov2"
summary = "a DINOv2 with registers, of toy size"

[architecture]
patch = 4
width = 24
depth = 2
heads = 3
image_size = 20
positions = "learned"
resize = "dinov2_registers"
registers = 4
layer_scale = true

[input]
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]

[weights]
kind = "file"
file = "dinov2/toy.pth"
layout = "dinov2"
url = "{url}"
licence = "Apache-2.0"
target = "self_distillation"
pretrain_data = "none"
pretrain_epochs = 1
source = "a test"
"""


def published(path: Path, seed: int) -> Path:
    """A file as the publisher would offer it."""
    torch.manual_seed(seed)
    state = timm(init_values=1.0, reg_tokens=4, no_embed_class=True).state_dict()
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([torch.randn(1, 1, 24), state["pos_embed"]], dim=1)
    torch.save(state | {"mask_token": torch.zeros(1, 24)}, path)
    return path


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAE_BENCH_WEIGHTS", str(tmp_path / "weights"))
    (tmp_path / "toy.toml").write_text(RECIPE.format(url=published(tmp_path / "offered.pth", 1).as_uri()))
    return tmp_path / "toy.toml"


def run(recipe: Path, *words: str) -> int:
    options = ["--smoke", "--workers", "0", "--out", str(recipe.parent / "runs"), *words]
    return cli.main(["run", "--task", "tiny_linear", "--backbone", str(recipe), *options])


def test_a_recipe_by_path_is_fetched_run_and_proven(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe.parent / "weights" / "dinov2" / "toy.pth"
    assert cli.main(["fetch", str(recipe), "--quiet"]) == 0
    told = capsys.readouterr()
    assert str(file) in told.out and "loaded 35/35 encoder tensors (DINOv2 with 4 registers" in told.out
    assert "Apache-2.0" in told.err and "unverified" in told.err
    assert run(recipe) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loaded"))
    assert "self_distillation, unverified, first seen 20" in line
    assert "new: head.weight, head.bias; unused: mask_token" in line
    (record,) = store.load_records([recipe.parent / "runs"])
    proof = record.weights.load
    assert record.weights.kind == "file" and record.weights.sha256 == proof["sha256"] == file_hash(file)
    assert (proof["matched"], proof["total"], proof["new"], proof["verified"]) == (35, 35, [], "")
    assert len(proof["fingerprint"]) == 16 and proof["seen"].startswith("first seen")
    assert proof["transforms"] == ["pos_embed: 5x5 -> 8x8, bicubic ('dinov2_registers')"]
    assert record.recipe["backbone"]["architecture"]["resize"] == "dinov2_registers"


def test_a_file_that_changed_since_it_was_first_seen_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No hash is published, but the file is not the one that gave the numbers before."""
    file = recipe.parent / "weights" / "dinov2" / "toy.pth"
    assert cli.main(["fetch", str(recipe), "--quiet"]) == 0
    published(recipe.parent / "other.pth", 2).replace(file)
    assert run(recipe) == 2
    assert "is not the file first seen" in capsys.readouterr().err


def test_another_file_with_weights(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = published(recipe.parent / "other.pth", 2)
    assert run(recipe, "--weights", str(other)) == 0
    assert "self_distillation, unverified, sha256" in capsys.readouterr().out
    (record,) = store.load_records([recipe.parent / "runs"])
    assert record.weights.kind == "given" and record.weights.load["file"] == "other.pth"
    assert list(recipe.parent.glob("*.proof.json")) == []  # no lock beside a file of the user's


def test_a_wrong_mean_changes_the_fingerprint(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest wrong declaration: BEiT's 0.5 for ImageNet's statistics, or the reverse."""
    file = recipe.parent / "offered.pth"
    assert cli.main(["inspect", str(file), "--as", str(recipe), "--json"]) == 0
    fingerprint = json.loads(capsys.readouterr().out)["declared"]["fingerprint"]
    text = recipe.read_text().replace("\n[architecture]", f"fingerprint = {fingerprint}\n\n[architecture]")
    recipe.write_text(text)
    assert run(recipe, "--weights", str(file)) == 0
    recipe.write_text(text.replace("[0.485, 0.456, 0.406]", "[0.5, 0.5, 0.5]"))
    assert run(recipe, "--weights", str(file)) == 2
    assert "differ from those of the recipe 'toy'" in capsys.readouterr().err
    assert cli.main(["inspect", str(file), "--as", str(recipe)]) == 1
    assert "DIFFERS FROM the recipe's" in capsys.readouterr().out
