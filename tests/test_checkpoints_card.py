"""A model card says whose the weights are, and nothing that a recipe or a file says can change what it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import get_args

import pytest
from checkpoint_files import backbone, save_pth, timm_state
from export_cases import PLAIN, own_file
from huggingface_hub import ModelCard

from mae_bench.checkpoints import card
from mae_bench.checkpoints.export import export
from mae_bench.checkpoints.load import build_encoder
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema.backbone import Target

HOSTILE = 'x"\n---\nlicense: mit\n---\n# <b>[a](http://b)</b> `c` | \u2028\x1b[31m\x85 é'


def test_every_target_of_pre_training_has_words() -> None:
    assert set(card.TARGET_WORDS) == set(get_args(Target))


@pytest.mark.parametrize(
    ("licence", "identifier", "name"),
    [
        ("CC-BY-NC-4.0", "cc-by-nc-4.0", None),
        ("Apache-2.0", "apache-2.0", None),
        ("DINOv3 License", "other", "dinov3-license"),
        ('x"\\n---: <b>', "other", "x-n-b"),
        ("No", "other", "no"),  # which YAML would take for false
        ("?", "other", "unnamed"),
    ],
)
@pytest.mark.parametrize("to", ["timm", "hf"])
def test_texts_of_a_recipe_stay_texts(licence: str, identifier: str, name: str | None, to: str, tmp_path: Path) -> None:
    recipe = backbone(licence=licence, source=HOSTILE, pretrain_data=HOSTILE, url="https://a/`b`|<i>")
    recipe = recipe.model_copy(update={"summary": HOSTILE})
    export(save_pth(tmp_path / "a`b.pth", timm_state()), recipe, to, tmp_path / "out")
    read = ModelCard.load(tmp_path / "out" / "README.md")
    assert (read.data.license, read.data.license_name) == (identifier, name)
    assert read.data.library_name == {"timm": "timm", "hf": "transformers"}[to]
    assert read.data.pipeline_tag == "image-feature-extraction"
    text = read.text
    assert r"\<b\>\[a\](http://b)\</b\> \`c\` \|" in text and "é" in text
    assert "\n---" not in text and "<b>" not in text and "\x1b" not in text and "\u2028" not in text
    assert "`https://a/ b |<i>`" in text and "`a b.pth`" in text


def test_the_card_says_whose_the_weights_are(tmp_path: Path) -> None:
    path = save_pth(tmp_path / "meant.pth", timm_state())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    recipe = backbone(sha256=digest)
    _, report = build_encoder(recipe, path, seed=0)
    export(path, recipe, "timm", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "Published at `https://example.org/meant.pth`: its sha256 is the published one",
        r"IN1K, 1600 epochs; target: pixels of masked patches, normalised per patch",
        "Licence: CC-BY-NC-4.0",
        f"Source file: `meant.pth`, sha256 `{digest}`",
        f"Load report: `{report.line()}`",
        "mean [0.5, 0.5, 0.5], std [0.25, 0.25, 0.25]",
        "timm interpolates the positions otherwise than mae_bench (`fair`)",
    ):
        assert words in text
    path.rename(tmp_path / "copy.pth")
    export(tmp_path / "copy.pth", recipe, "hf", tmp_path / "hf")
    text = (tmp_path / "hf" / "README.md").read_text()
    assert "its sha256 is the published one" in text  # whatever its name
    assert "transformers interpolates the positions as mae_bench does" in text


def test_the_card_of_an_encoder_of_our_own_says_how_it_was_trained(tmp_path: Path) -> None:
    recipe = load_backbone("vit_t_mae")
    protocol = resolve_task("tiny_pretrain", recipe).protocol
    stated = {"protocol": protocol, "backbone": "vit_t_mae", "target": "norm_pix"}
    file = own_file(tmp_path / "e.safetensors", recipe.architecture, **stated)
    export(file, recipe, "timm", tmp_path / "out")
    card_ = ModelCard.load(tmp_path / "out" / "README.md")
    assert card_.data.license == "unknown"
    for words in ("task `tiny_pretrain`", "protocol: `tiny-mae@1`", "shapes, made by code", "Length: 2400 steps"):
        assert words in card_.text
    assert "license" not in json.loads((tmp_path / "out" / "config.json").read_text())["pretrained_cfg"]

    file = own_file(
        tmp_path / "f.safetensors", recipe.architecture, **(stated | {"protocol": "tiny-mae@1+set:00000000"})
    )
    export(file, recipe, "timm", tmp_path / "other")
    assert "Length" not in (tmp_path / "other" / "README.md").read_text()


def test_weights_of_our_own_do_not_take_a_publishers_licence(tmp_path: Path) -> None:
    """An encoder that we trained loads for every recipe of its architecture, which may speak of another file."""
    file = own_file(tmp_path / "e.safetensors", PLAIN, task="/etc/passwd`\n---")
    export(file, backbone(), "hf", tmp_path / "out")
    card_ = ModelCard.load(tmp_path / "out" / "README.md")
    assert card_.data.license == "unknown"
    assert "example.org" not in card_.text and "1600" not in card_.text and "CC-BY" not in card_.text
    assert "by the task `/etc/passwd  ---`" in card_.text
