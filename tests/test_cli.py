"""The command line as a user meets it: real processes, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mae_bench import cli

ROOT = Path(__file__).resolve().parent.parent


def _call(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mae_bench", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_list_names_every_recipe() -> None:
    done = _call("list")
    assert done.returncode == 0
    for name in ("vit_b_mae", "vit_h_scratch", "imagenet_linear", "coco", "ade20k", "tiny_linear"):
        assert f"  {name} " in done.stdout


def test_show_prints_each_value_with_its_origin() -> None:
    done = _call("show", "imagenet_finetune", "--backbone", "vit_l_mae", "--set", "epochs=3")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("layer_decay ")]
    assert "0.75" in line and "task.toml layer" in line
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("epochs ")]
    assert "3" in line and "--set" in line
    assert "+set:" in done.stdout


@pytest.mark.parametrize("command", [["list"], ["show", "imagenet_finetune"], ["show", "vit_b_mae"]])
def test_reading_recipes_loads_no_heavy_library(command: list[str]) -> None:
    """`list` and `show` answer at once because they load neither torch nor pandas."""
    code = (
        "import sys; from mae_bench.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'pandas', 'numpy', 'rich'} & set(sys.modules); sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--task", "coc", "--backbone", "vit_b_mae"], "unknown task 'coc' (did you mean 'coco'?)"),
        (
            ["run", "--task", "coco", "--backbone", "vit_b_mea"],
            "unknown backbone 'vit_b_mea' (did you mean 'vit_b_mae'?)",
        ),
        (["show", "vit_b_mea"], "unknown recipe 'vit_b_mea' (did you mean 'vit_b_mae'?)"),
        (["shwo"], "invalid choice: 'shwo'"),
        (["run", "--task", "tiny_linear"], "--backbone"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--smok"], "did you mean '--smoke'?"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--set", "epoch=3"], "did you mean 'epochs'?"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--set", "epochs='3'"], "epochs"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--set", "epochs"], "key=value"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--seeds", "0,0"], "each seed once"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--seeds", "a"], "whole numbers"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--data", "/nowhere"], "no such folder"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_scratch", "--weights", "x"], "from-scratch baseline"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--weights", "x"], "no such file"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--eval-only"], "--weights"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_h_supervised"], "vit_h_supervised"),
        (["run", "--task", "coco", "--backbone", "vit_b_scratch"], "train2017"),
        (["pretrain", "--backbone", "vit_b_mae"], "imagenet_pretrain"),
        (["show", "no/such.toml"], "no/such.toml"),
        (["table", "--records", "/nowhere"], "/nowhere"),
        (["table", "--out", "x.json"], "name a table .md, .tex, .csv or .html"),
        (["promote", "."], "no records"),
        (["show", "vit_t_mae", "--set", "epochs=1"], "is a backbone"),
        (["doctor", "--install", "detectron2", "--task", "coco"], "give one"),
        (["show", "tiny_linear", "--set", "crop_scale=[1.0, 0.5]"], "area fractions"),
        (["show", "tiny_linear", "--set", "batch=" + "9" * 5000], "beyond reason"),
        (["show", "tiny_linear", "--set", "batch=" + "[" * 5000], "beyond reason"),
        (["run", "--task", "tiny_linear", "--backbone", "vit_t_mae", "--seeds", "-1"], "seeds are whole numbers"),
        (["pretrain", "--backbone", "vit_t_mae", "--smoke", "--weights", "x"], "leave out --weights"),
        (["pretrain", "--backbone", "vit_t_mae", "--weights", "x"], "leave out --weights"),
        (["show", "a/" + "b" * 5000 + ".toml"], "File name too long"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mae_bench: ")
    assert list(tmp_path.rglob("record*")) == []  # nothing half-written


def test_a_full_disk_and_a_poor_terminal_are_no_tracebacks() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mae_bench", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("mae_bench: output: No space left on device")


def test_a_folder_of_recipes_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, expected in (("/nowhere", "no folder"), ("~no-such-user/x", "no such user's home")):
        monkeypatch.setenv("MAE_BENCH_PATH", folder)
        assert cli.main(["list"]) == 2
        assert expected in capsys.readouterr().err


def test_missing_weights_name_the_file_the_place_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--task", "tiny_linear", "--backbone", "vit_b_mae"]) == 2
    error = capsys.readouterr().err
    for part in (
        "mae_pretrain_vit_base.pth",
        "mae_bench fetch vit_b_mae",
        "https://dl.fbaipublicfiles.com/mae/",
        "CC-BY-NC",
        "--smoke",
    ):
        assert part in error
