"""The wheel carries its recipes, installs into an empty environment and works from another folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(command, check=True)
    (built,) = folder.glob("mae_bench-*.whl")
    return built


def test_wheel_carries_recipes_and_nothing_generic(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mae_bench"}
    bundled = {name.removeprefix("mae_bench/_recipes/") for name in names if name.startswith("mae_bench/_recipes/")}
    for pattern in (
        "backbones/*/*.toml",
        "tasks/*/task.toml",
        "tasks/*/README.md",
        "suites/*.toml",
        "results/published/*.csv",
        "results/published/*.toml",
    ):
        checkout = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
        assert checkout and checkout <= bundled
    assert "mae_bench/py.typed" in names
    assert {f"mae_bench/reporting/assets/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "mae_bench/detectron2.txt" in names


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "mae_bench", *words], cwd=elsewhere, capture_output=True, text=True, check=False
        )

    listed = call("list")
    assert listed.returncode == 0
    assert "vit_l_mae" in listed.stdout and "imagenet_linear" in listed.stdout
    assert call("show", "coco", "--backbone", "vit_l_mae").returncode == 0
    doctor = call("doctor", "--task", "coco")
    assert doctor.returncode == 1  # nothing to train with here, and it says what brings it
    assert "pip install 'mae_bench[coco]'" in doctor.stdout
    assert "doctor --install detectron2" in doctor.stdout
    run = call("run", "--task", "coco", "--backbone", "vit_b_scratch", "--smoke")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1 and "mae_bench[coco]" in run.stderr
