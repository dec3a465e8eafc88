"""Write what we trained: safetensors, atomically; and random files in a foreign layout for ``--smoke``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mae_bench.checkpoints.files import METADATA, SYNTHETIC
from mae_bench.checkpoints.layouts import FORMAT
from mae_bench.encoders.vit import Encoder, random_encoder
from mae_bench.errors import UserError
from mae_bench.schema import Backbone

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to; it takes the name ``path`` once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            part = Path(folder) / "part"
            yield part
            part.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        raise UserError(f"cannot write {path}: {str(error)[:200]}; free space or choose another --out") from error


def save_model(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors and text metadata to a safetensors file; the same content gives the same bytes."""
    # Cloned: safetensors refuses tensors that share memory.
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    with atomic(path) as part:
        save_file(tensors, part, metadata={METADATA: json.dumps(dict(metadata), sort_keys=True)})


def save_encoder(path: Path, encoder: Encoder, metadata: Mapping[str, str]) -> None:
    """Write an encoder in our own layout: our names, and its architecture beside ``metadata``.

    Refuses encoders that were adapted to a task (more tensors, no class token, another patch or grid): they are part
    of a model that the task has trained, which ``save_model`` keeps whole. The final norm alone may be missing.
    """
    architecture = encoder.architecture
    declared = (architecture.patch, (architecture.grid, architecture.grid), architecture.prefix)
    if encoder.option_tensors() or (encoder.patch, encoder.grid, encoder.prefix) != declared:
        raise ValueError("save_encoder keeps encoders as they were pre-trained; save an adapted one with save_model")
    own = {"format": FORMAT, "architecture": architecture.model_dump_json()}
    if metadata.get("smoke") == "True":
        own[SYNTHETIC] = "true"  # two steps leave it as random as it was
    save_model(path, encoder.state_dict(), dict(metadata) | own)


def write_synthetic(path: Path, backbone: Backbone, seed: int) -> None:
    """A random encoder, marked as synthetic, to try the real loader: in the layout that the recipe's weights declare
    where that has plain ViT names, else in our own, which every recipe of the architecture takes."""
    weights = backbone.weights
    if weights.kind == "none":
        raise ValueError(f"backbone '{backbone.name}' loads no encoder file")
    if backbone.architecture.rel_pos == "decomposed":
        raise UserError(
            f"backbone '{backbone.name}' is a ViTDet encoder, whose tables fit one task only: no random file can stand "
            "in for it; give the real one with --weights FILE"
        )
    encoder = random_encoder(backbone.architecture, seed)
    if weights.kind == "made" or weights.layout not in ("fair_mae", "vit", "vit_classifier"):
        save_encoder(path, encoder, {SYNTHETIC: "true"})
        return
    state = dict(encoder.state_dict())
    if weights.layout == "vit_classifier":
        generator = torch.Generator().manual_seed(seed + 1)
        state["head.weight"] = torch.empty(1000, encoder.width).normal_(std=0.02, generator=generator)
        state["head.bias"] = torch.zeros(1000)
    with atomic(path) as part:
        torch.save({"model": state, SYNTHETIC: True}, part)
