"""What no export may write is refused by name, nothing is overwritten, and nothing half-written is left."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import backbone, save_pth, timm_state
from export_cases import PLAIN, in_timm, made, own_file
from safetensors.torch import load_file

from mae_bench import cli
from mae_bench.checkpoints.card import Loaded
from mae_bench.checkpoints.export import TARGETS, export
from mae_bench.checkpoints.layouts import FORMAT
from mae_bench.checkpoints.load import save_model, write_synthetic
from mae_bench.errors import UserError
from mae_bench.schema import Architecture


@pytest.mark.parametrize(
    ("changes", "to", "words"),
    [
        ({"layer_scale": True}, "fair", "holds plain ViTs, this one has layer_scale = true; use --to timm"),
        ({"registers": 2, "mlp": "swiglu"}, "hf", 'registers = 2, mlp = "swiglu"; use --to timm'),
        ({"class_token": False}, "fair", "class_token = false"),
        ({"class_position": False}, "hf", "class_position = false"),
        ({"final_norm": "none"}, "fair", 'final_norm = "none"'),
        ({"positions": "none"}, "hf", 'positions = "none"'),
        ({"positions": "none"}, "timm", 'positions = "none"'),
        ({"rel_pos": "bias", "layer_scale": True}, "timm", "no relative positions, this one has rel_pos = 'bias'"),
        ({"norm_eps": 1e-12}, "fair", "norm_eps is fixed at 1e-06, this one has 1e-12; use --to hf"),
        ({"norm_eps": 1e-12}, "timm", "norm_eps is fixed at 1e-06"),
    ],
)
def test_what_a_target_cannot_express_is_refused_by_name(
    changes: dict[str, Any], to: str, words: str, tmp_path: Path
) -> None:
    recipe = made(Architecture(**(PLAIN.model_dump() | changes)))
    with pytest.raises(UserError) as caught:
        export(tmp_path / "never read", recipe, to, tmp_path / "out")
    assert words in str(caught.value) and "backbone 'small' cannot be written for " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", TARGETS)
def test_an_encoder_without_its_final_norm_is_refused(to: str, tmp_path: Path) -> None:
    file = own_file(tmp_path / "e.safetensors", PLAIN)
    state = {name: value for name, value in load_file(file).items() if not name.startswith("norm.")}
    save_model(file, state, {"format": FORMAT, "architecture": PLAIN.model_dump_json()})
    with pytest.raises(UserError, match="has no final norm"):
        export(file, made(PLAIN), to, tmp_path / "out")


@pytest.mark.parametrize("kind", ["fair_mae", "made"])
def test_random_weights_of_a_smoke_run_are_refused(kind: Any, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "smoke.pth", backbone(kind), seed=0)
    with pytest.raises(UserError, match="random weights that a smoke run wrote"):
        export(tmp_path / "smoke.pth", backbone(kind), "timm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_the_backbones_is_refused(tmp_path: Path) -> None:
    source = save_pth(tmp_path / "a.pth", timm_state(fixed_positions=False, classes=10))
    with pytest.raises(UserError, match="means a FAIR MAE pre-trained encoder"):
        export(source, backbone(), "timm", tmp_path / "out")
    with pytest.raises(UserError, match="sha256 is"):
        export(save_pth(tmp_path / "meant.pth", timm_state()), backbone(sha256="0" * 64), "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UserError, match=r"--to tim: unknown target \(did you mean 'timm'\?\)"):
        export(Path("a"), backbone(), "tim", Path("b"))


# What is written


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = save_pth(tmp_path / "a.pth", timm_state())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "empty").mkdir()
    for taken in (tmp_path / "full", source):
        with pytest.raises(UserError, match="is there already; name a new folder"):
            export(source, backbone(), "timm", taken)
    assert [path.read_text() for path in (tmp_path / "full").iterdir()] == ["kept"]
    assert {path.name for path in export(source, backbone(), "hf", tmp_path / "empty")} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    assert (tmp_path / "deep" / "er" / "config.json") in export(source, backbone(), "timm", tmp_path / "deep" / "er")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_breaks_off_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(loaded: Loaded, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setitem(TARGETS, "timm", replace(TARGETS["timm"], write=break_off))
    source = save_pth(tmp_path / "a.pth", timm_state())
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        export(source, backbone(), "timm", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


# The command line


def test_export_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "vit_t_small.toml"
    recipe.write_text(
        'name = "vit_t_small"\nsize = "t"\ninit = "mae"\nsummary = "small"\n'
        "[architecture]\npatch = 4\nwidth = 24\ndepth = 2\nheads = 3\nimage_size = 20\n"
        '[input]\nmean = [0.5, 0.5, 0.5]\nstd = [0.25, 0.25, 0.25]\n[weights]\nkind = "made"\ntask = "tiny_pretrain"\n'
    )
    file = own_file(tmp_path / "encoder.safetensors", PLAIN)
    words = ["export", str(file), "--backbone", str(recipe), "--to", "timm", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mae_bench", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        str(tmp_path / "out" / name) for name in ("README.md", "config.json", "model.safetensors")
    ]
    in_timm(tmp_path / "out")
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("mae_bench: --out ") and said.err.count("\n") == 1
