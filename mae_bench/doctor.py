"""Say what is installed and found for a task, and the exact command for what is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from mae_bench import places, recipes
from mae_bench.errors import UserError
from mae_bench.schema import Backbone, DataSpec, FileWeights, Task

DETECTRON2_PIN = places.PACKAGE / "detectron2.txt"
INSTALL_DETECTRON2 = "python -m mae_bench doctor --install detectron2"
# distribution -> (import name, extra that brings it)
TRAIN = {
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "safetensors": "safetensors",
    "pillow": "PIL",
    "pycocotools": "pycocotools",
    "onedl-mmengine": "mmengine",
    "onedl-mmcv": "mmcv",
}
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "pretraining": ("train", TRAIN),
    "classification": ("train", TRAIN),
    "segmentation": ("ade20k", TRAIN | {"onedl-mmsegmentation": "mmseg"}),
    "detection": (
        "coco",
        TRAIN | {"faster-coco-eval": "faster_coco_eval", "fvcore": "fvcore", "omegaconf": "omegaconf"},
    ),
}
# The originals install the same import names and would be mixed up with the maintained distributions.
CLASHES = {
    "mmengine": "onedl-mmengine",
    "mmcv": "onedl-mmcv",
    "mmcv-lite": "onedl-mmcv",
    "mmsegmentation": "onedl-mmsegmentation",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``needed``: the task cannot run without it; ``mend``: the command that brings it."""

    ok: bool
    name: str
    detail: str
    mend: str = ""
    needed: bool = True


def report(task_name: str | None = None) -> int:
    """Print what is in place; 0 if everything needed is installed, else 1. Data and weights are told, not demanded."""
    tasks = (
        [recipes.load_task(task_name)] if task_name else [recipes.load_task(n) for n in sorted(recipes.index("task"))]
    )
    shared = [Finding(False, "protocol", line) for line in shared_protocols()]
    findings = [*shared, *_software(tasks), *_data(tasks), *_weights()]
    for finding in findings:
        mark = "ok     " if finding.ok else "MISSING" if finding.needed else "absent "
        print(f"{mark} {finding.name:<26} {finding.detail}")
        if finding.mend and not finding.ok:
            print(f"        {'':<26} -> {finding.mend}")
    broken = [finding for finding in findings if finding.needed and not finding.ok]
    print(f"{len(broken)} missing" if broken else "everything needed is installed")
    return 1 if broken else 0


def shared_protocols() -> Iterator[str]:
    """A line for each task recipe on the search path with the protocol id of another: their numbers would be taken for
    results of one protocol, and stand beside its published ones."""
    first: dict[object, Path] = {}
    for _, path in sorted(recipes.index("task").items()):
        protocol = recipes.read_toml(path).get("protocol")
        other = first.setdefault(protocol, path)
        if protocol and other != path:
            yield f"two task recipes have the protocol '{protocol}': {other} and {path}; give one of them its own id"


def require(task: Task) -> None:
    """Refuse a run whose libraries are not installed, naming the command that brings them. Imports none of them."""
    extra, distributions = ENGINES[task.engine]
    for name, module in distributions.items():
        if util.find_spec(module) is None:
            raise UserError(
                f"task '{task.name}' needs {name}, which is not installed: `pip install 'mae_bench[{extra}]'`; "
                f"`python -m mae_bench doctor --task {task.name}` shows everything it needs"
            )
    if task.engine == "detection" and util.find_spec("detectron2") is None:
        raise UserError(f"task '{task.name}' needs detectron2, which is not installed: `{INSTALL_DETECTRON2}`")


def _software(tasks: list[Task]) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(sys.version_info >= (3, 11), "python", version, "use Python 3.11 or newer")
    needed: dict[str, tuple[str, str]] = {}
    for task in tasks:
        extra, distributions = ENGINES[task.engine]
        for name, module in distributions.items():
            needed.setdefault(name, (module, extra))
    for name, (module, extra) in needed.items():
        yield _distribution(name, module, extra)
    for original, ours in CLASHES.items():
        if _version(original):
            yield Finding(
                False,
                original,
                f"{_version(original)} clashes with {ours}",
                f"pip uninstall {original} && pip install --force-reinstall --no-deps {ours}",
            )
    if any(task.engine == "detection" for task in tasks):
        yield _detectron2()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _distribution(name: str, module: str, extra: str) -> Finding:
    version = _version(name)
    if not version or util.find_spec(module) is None:
        return Finding(False, name, "not installed", f"pip install 'mae_bench[{extra}]'")
    if name in ("onedl-mmcv", "onedl-mmsegmentation"):  # these fail at import, not at install: libGL, torch's ABI
        try:
            importlib.import_module(module)
        except (ImportError, OSError, AssertionError) as error:
            mend = "apt-get install libgl1" if "libGL" in str(error) else f"pip install 'mae_bench[{extra}]'"
            return Finding(False, name, f"{version}, but importing it fails: {error}", mend)
    return Finding(True, name, version)


def _detectron2() -> Finding:
    if util.find_spec("detectron2") is None:
        return Finding(False, "detectron2", "not installed", INSTALL_DETECTRON2)
    try:
        module = importlib.import_module("detectron2")
        importlib.import_module("detectron2.modeling")
    except (ImportError, OSError) as error:
        return Finding(False, "detectron2", f"importing it fails: {error}", "pip install 'mae_bench[coco]'")
    compiled = util.find_spec("detectron2._C") is not None and _loads("detectron2._C")
    way = "built from source, with compiled ops" if compiled else "Python files only, no compiled ops (none are needed)"
    return Finding(True, "detectron2", f"{module.__version__}, {way}")


def _loads(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return True


def _data(tasks: list[Task]) -> Iterator[Finding]:
    for task in tasks:
        if task.data.made:
            yield Finding(True, f"data of {task.name}", f"made by code into {places.cache()}", needed=False)
        elif task.data.format == "hf" and (task.data.hub or util.find_spec("datasets") is None):
            found = util.find_spec("datasets") is not None
            detail = f"{task.data.repository}, which the datasets package brings"
            yield Finding(found, f"data of {task.name}", detail, "pip install datasets", needed=False)
        elif task.data.folder or task.data.format == "hf":
            root = places.data_root() / task.data.folder
            found = _present(task.data, root)
            mend = f"put it at {root}, set $MAE_BENCH_DATA, or give --data; without data: --smoke"
            yield Finding(found, f"data of {task.name}", str(root), mend, needed=False)
        else:
            yield Finding(
                True, f"data of {task.name}", f"any {task.data.format} folder, given with --data", needed=False
            )


def _present(data: DataSpec, root: Path) -> bool:
    """Whether both splits are there, told by the folders and files that the recipe names; none is read."""
    splits = (data.train, data.val)
    if data.format == "hf":
        return (root / data.repository).is_dir()
    if data.format == "tar":
        return all(_matched(root, pattern) for pattern in splits)
    annotations = [root / name for name in (data.train_annotations, data.val_annotations) if name]
    annotated = all(path.is_file() if data.format == "coco" else path.is_dir() for path in annotations)
    return annotated and all((root / split).is_dir() for split in splits)


def _matched(root: Path, pattern: str) -> bool:
    try:
        return any(path.is_file() for path in root.glob(pattern))
    except (
        ValueError,
        IndexError,
        AttributeError,
        NotImplementedError,
    ):  # no pattern: a run says what is wrong with it
        return False


def _weights() -> Iterator[Finding]:
    for name in sorted(recipes.index("backbone")):
        backbone: Backbone = recipes.load_backbone(name)
        if isinstance(backbone.weights, FileWeights) and not backbone.refused:
            file = places.weights_root() / backbone.weights.file
            mend = f"python -m mae_bench fetch {name}"
            yield Finding(file.is_file(), f"weights of {name}", str(file), mend, needed=False)


def install_detectron2() -> None:
    """Unpack detectron2's Python files into this environment's site-packages.

    detectron2 is on no package index for current Pythons and its setup needs torch. The pinned wheel (checked by
    hash) holds the official code, tagged for one Python; only its ``detectron2`` folder is taken, so that neither its
    stale metadata nor its stray top-level folder ends up in the environment. docs/detectron2.md has the other way.
    """
    target = Path(sysconfig.get_paths()["purelib"])
    if util.find_spec("detectron2") is not None:
        print(f"detectron2 is already installed in {Path(str(util.find_spec('detectron2').origin)).parent}")  # type: ignore[union-attr]
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.10", "--implementation", "cp", "--abi", "cp310", "--platform", "any"]
        command += ["--require-hashes", "-r", str(DETECTRON2_PIN), "--dest", folder]
        if subprocess.run(command, check=False).returncode:
            raise UserError(
                "pip could not download the pinned detectron2 wheel; see the message above and docs/detectron2.md"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("detectron2/") and not n.endswith(".so")]
            archive.extractall(target, names)
    print(f"unpacked {len(names)} files of detectron2 into {target / 'detectron2'}")
