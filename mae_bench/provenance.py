"""Where a number comes from: code, commit, versions and hardware. Imports no torch unless it is already loaded."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mae_bench import places

# Distributions whose version can move a number.
DISTRIBUTIONS = (
    "mae_bench",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "datasets",
    "onedl-mmengine",
    "onedl-mmcv",
    "onedl-mmsegmentation",
    "scipy",
    "opencv-python",
    "opencv-python-headless",
    "pycocotools",
    "faster-coco-eval",
)


@cache
def code_hash(module: str) -> str:
    """sha256 over the sources of ``module``'s room and of everything of ours that it imports, directly or not.

    A result whose code hash differs from the tree's was made by other code. Imports are read from the syntax tree,
    so that lazy imports inside functions count too. The package's own ``__init__`` is left out: it offers everything,
    and through it the layout of a table would count as code of a training run.
    """
    root = places.PACKAGE
    room = root.joinpath(*module.split(".")[1:])
    pending: list[Path | None] = [*sorted(room.glob("*.py"))] if room.is_dir() else [_source(module)]
    facade, seen = root / "__init__.py", set[Path]()
    while pending:
        path = pending.pop()
        if path is None or path == facade or path in seen:
            continue
        seen.add(path)
        pending.extend(_imports(path))
    content = hashlib.sha256()
    for path in sorted(seen):
        content.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()


def _source(module: str) -> Path | None:
    """File of one of our modules, or None for a foreign one."""
    head, *parts = module.split(".")
    if head != "mae_bench":
        return None
    base = places.PACKAGE.joinpath(*parts)
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _imports(path: Path) -> list[Path | None]:
    found: list[Path | None] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [_source(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(_source(node.module))
            found += [_source(f"{node.module}.{alias.name}") for alias in node.names]
    return found


@cache
def git_state() -> dict[str, Any]:
    """Commit of the checkout and whether tracked files differ from it; empty for an installed wheel."""
    root = places.checkout()
    if root is None:
        return {}

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}  # no git, or an unpacked archive: the code hash still identifies the code


def versions() -> dict[str, str]:
    """Versions of Python and of the distributions that can move a number; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    detectron2 = sys.modules.get("detectron2")
    if detectron2 is not None:
        found["detectron2"] = str(detectron2.__version__)
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, and the GPUs torch sees if torch is loaded."""
    found: dict[str, Any] = {
        "platform": platform.platform(terse=True),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gib": _memory_gib(),
        "gpu": "",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return found


def command() -> list[str]:
    """The command that started this process, the interpreter's own path left out."""
    program, *words = sys.argv or [""]
    start = (
        ["python", "-m", "mae_bench"] if Path(program).name in ("__main__.py", "mae-bench") else [Path(program).name]
    )
    return [*start, *words]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return 0.0
