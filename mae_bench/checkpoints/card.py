"""The model card of an export: whose weights they are, where they come from, and how they are used.

Sources: the metadata of the Hugging Face hub's model cards (huggingface/hub-docs ``modelcard.md``) and its list of
licences. Every text of a recipe or of a weight file is quoted: it can neither end the YAML block nor act as markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mae_bench import recipes
from mae_bench.checkpoints.load import LoadReport
from mae_bench.schema import Backbone, FileWeights, Resize
from mae_bench.schema.backbone import Target

LICENCES = frozenset(  # identifiers of the hub; any other licence is "other" there, with its name beside it
    ["apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"]
)
TARGET_WORDS: dict[Target, str] = {
    "norm_pix": "pixels of masked patches, normalised per patch",
    "pixel": "pixels of masked patches",
    "labels": "class labels",
    "visual_tokens": "visual tokens of masked patches",
    "contrastive": "views of one picture told from those of others, no labels",
    "self_distillation": "outputs of an averaged teacher, no labels",
}


@dataclass(frozen=True)
class Loaded:
    """A weight file that was read as a backbone: tensors under our names, as stored, and what is known about them."""

    backbone: Backbone
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    layout: str
    report: LoadReport

    @property
    def published(self) -> FileWeights | None:
        """What the recipe says about its weights; None for an encoder of our own, of which it knows nothing."""
        weights = self.backbone.weights
        return weights if isinstance(weights, FileWeights) and self.layout != "mae_bench" else None


def write_card(loaded: Loaded, folder: Path, library: str, usage: str, notes: Iterable[str]) -> None:
    """Write ``README.md``. ``library`` is the hub's name of it, ``usage`` Python, ``notes`` Markdown paragraphs."""
    backbone, side = loaded.backbone, loaded.backbone.architecture.image_size
    identifier, name = hub_licence(loaded)
    front = {"license": identifier, "library_name": library, "pipeline_tag": "image-feature-extraction"}
    front |= {"license_name": name} if name else {}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),  # a JSON string is a YAML string
        "tags: [image-feature-extraction, vit, mae_bench]",
        "---",
        f"# {backbone.name}\n\n{_prose(backbone.summary)}\n\nAn encoder without a head, written by mae_bench.\n",
        f"## Use\n\n```python\n{usage}\n```\n",
        *(f"{note}\n" for note in notes),
        "## Input\n",
        f"- RGB, {side} x {side} pixels, values scaled to [0, 1]",
        f"- mean {backbone.input.mean}, std {backbone.input.std}\n",
        "## Where the weights come from\n",
        *(f"- {line}" for line in (_published(loaded, loaded.published) if loaded.published else _own(loaded))),
        f"- Source file: {_code(loaded.report.file)}, sha256 `{loaded.report.sha256}`",
        f"- Load report: {_code(loaded.report.line(), 1000)}",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def hub_licence(loaded: Loaded) -> tuple[str, str]:
    """The hub's identifier of the weights' licence, and the licence's name where the hub has no identifier for it."""
    if loaded.published is None:
        return "unknown", ""
    name = re.sub(r"[^a-z0-9.]+", "-", loaded.published.licence.lower()).strip("-")
    return (name, "") if name in LICENCES else ("other", name or "unnamed")


def _published(loaded: Loaded, weights: FileWeights) -> list[str]:
    verified = loaded.report.verified
    proof = f"its {verified} is the published one" if verified else "not proven by a hash to be that file"
    return [
        f"Published at {_code(weights.url)}: {proof}",
        f"Pre-training: {_prose(weights.pretraining)}; target: {TARGET_WORDS[weights.target]}",
        f"According to {_prose(weights.source)}",
        f"Licence: {_prose(weights.licence)}",
    ]


def _own(loaded: Loaded) -> list[str]:
    """What a file that we trained says of itself, and what the recipe of its task adds."""
    stated, task = loaded.metadata, loaded.metadata.get("task", "")
    lines = [f"Trained with mae_bench by the task {_code(task or 'unknown')}"]
    lines += [
        f"{key}: {_code(stated[key])}" for key in ("protocol", "backbone", "target", "mask_ratio") if key in stated
    ]
    if task in recipes.index("task"):  # never a path: the name comes from the file
        data = recipes.load_task(task).data
        lines.append(f"Pre-training data: {_prose(f'{data.made}, made by code' if data.made else data.folder)}")
    if task in recipes.index("task") and stated.get("backbone") == loaded.backbone.name:
        resolved = recipes.resolve_task(task, loaded.backbone)
        if stated.get("protocol") == resolved.protocol:  # a run with other values has another protocol id
            values = resolved.values
            lines.append(f"Length: {values.steps} steps" if values.steps else f"Length: {values.epochs:g} epochs")
    return [*lines, "Licence: not stated; who trained these weights writes it here"]


def resizing(loaded: Loaded, library: str, convention: Resize) -> str:
    """What happens at another image size, where ``convention`` is the library's."""
    own = loaded.backbone.architecture.resize
    same = "as mae_bench does" if own == convention else f"otherwise than mae_bench (`{own}`): features will differ"
    return f"At another image size {library} interpolates the positions {same}."


def _line(text: str, most: int = 300) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def _prose(text: str) -> str:
    """Text from a recipe as Markdown, on one line, with nothing in it taken for markup."""
    return re.sub(r"([\\`*_\[\]<>#|~&!$])", r"\\\1", _line(text))


def _code(text: str, most: int = 300) -> str:
    return f"`{_line(text, most).replace('`', ' ')}`"
