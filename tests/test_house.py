"""The rules of the house: which room may import which, and what must not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mae_bench"
PIPELINES = {"classification", "detection", "segmentation", "pretraining"}
FOUNDATION = {"errors", "places", "schema", "recipes"}
# room -> rooms it may import from (itself included implicitly)
ARROWS = {
    "errors": set(),
    "places": {"errors"},
    "schema": {"errors"},
    "recipes": FOUNDATION,
    "provenance": FOUNDATION,
    "reporting": FOUNDATION,
    "data": FOUNDATION,
    "encoders": FOUNDATION,
    "hashing": {"errors", "schema"},
    "download": {"errors", "schema"},
    "checkpoints": FOUNDATION | {"encoders", "hashing"},
    "engine": FOUNDATION | {"data"},
    **{room: FOUNDATION | {"engine", "encoders", "checkpoints", "data"} for room in PIPELINES},
    "samples": FOUNDATION | {"checkpoints", "data", "engine"},
    "weights": FOUNDATION | {"checkpoints", "engine", "hashing"},
    "fetch": FOUNDATION | {"download", "hashing", "weights"},
}


def _rooms_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("mae_bench.")}
    return found


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_imports_follow_the_arrows(room: str) -> None:
    files = sorted((PACKAGE / room).glob("**/*.py")) or [PACKAGE / f"{room}.py"]
    for path in files:
        extra = _rooms_imported(path) - ARROWS[room] - {room}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_every_room_has_its_arrows() -> None:
    """A new room must be added to the table above; the top-level commands may import anything."""
    commands = {
        "__init__",
        "__main__",
        "api",
        "cli",
        "commands",
        "cost",
        "reconstruct",
        "suite",
        "doctor",
        "quickstart",
        "runs",
        "tabulate",
    }
    rooms = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert rooms - commands - set(ARROWS) == set()


@pytest.mark.parametrize(
    "module",
    [
        "mae_bench",
        "mae_bench.cli",
        "mae_bench.recipes",
        "mae_bench.schema",
        "mae_bench.reporting.record",
        "mae_bench.reporting.store",
        "mae_bench.reporting.transfer",
        "mae_bench.reporting.check",
        "mae_bench.reporting.staleness",
        "mae_bench.reporting.compare",
        "mae_bench.reporting.gate",
        "mae_bench.reporting.page",
        "mae_bench.reporting.papers",
        "mae_bench.runs",
        "mae_bench.fetch",
        "mae_bench.suite",
    ],
)
def test_importing_it_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_lax_loading_and_no_bare_except() -> None:
    for path in PACKAGE.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}: bare except"
            if isinstance(node, ast.keyword) and node.arg == "strict" and isinstance(node.value, ast.Constant):
                where = f"{path}:{node.value.lineno}"
                # pydantic's per-field `strict=False` admits a list where a tuple is meant; nothing else may be lax
                assert node.value.value is True or path.is_relative_to(PACKAGE / "schema"), where
