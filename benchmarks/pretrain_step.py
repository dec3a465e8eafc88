"""One MAE training step beside transformers' ViTMAE, and what each of its savings brings.

    python benchmarks/pretrain_step.py [--base | --large] [--pairs 9]

The same sizes, batch, weights' count and optimiser, in one process; ratios from runs in the order A B B A, their
median with the middle 90 %. Small: width 192, depth 12, 64 patches, batch 64, where overhead rules. `--base`: ViT-B/16
at 224 px, batch 8. `--large`: ViT-L/16, batch 4, mask tokens in the encoder against the decoder, beside the ratio that
MACs predict. Where there is a bar, it is printed beside the figure; exit code 1 if one is not met.

Peak memory is that of processes that take three steps. What the tensors need is measured with every tensor in a mapping
of its own (glibc's MALLOC_MMAP_THRESHOLD_), which repeats to a MiB; glibc's usual heap adds gaps between tensors that
differ by some ten MiB from process to process, of which the median and the range of five are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_bench import provenance
from mae_bench.encoders.vit import Encoder
from mae_bench.engine import onednn
from mae_bench.pretraining import decoder as savings
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.pretraining.objectives import build_model
from mae_bench.schema import Architecture, Input, PretrainingValues

Work = Callable[[], None]
SMALL = Architecture(patch=4, width=192, depth=12, heads=3, image_size=32), (2, 96, 3), 64
BASE = Architecture(patch=16, width=768, depth=12, heads=12, image_size=224), (8, 512, 16), 8
LARGE = Architecture(patch=16, width=1024, depth=24, heads=16, image_size=224), (8, 512, 16), 4


class Plain(MaskedAutoencoder):
    """Without the savings that are switched off: the same loss by the plain path."""

    embed_visible = head_on_hidden = last_block = first_block = False

    def forward(self, inputs: Tensor, data_samples: Tensor, extra: Any = None, mode: Any = "loss") -> Any:
        masking = self.masking(data_samples)
        patches = self._patches(inputs, masking)
        if self.embed_visible:
            tokens = self.encode(patches[:, : masking.keep], masking)
        else:
            embedded = masking.shuffled(self.encoder.embed(inputs))[:, : masking.keep]
            tokens = self.encoder.encode(self.encoder.with_prefix(embedded))
        start = masking.keep if self.last_block else 0
        x = self.decode(tokens, masking, start)
        if self.head_on_hidden:
            x = x[:, masking.keep - start :]
        predicted = self.decoder_pred(self.decoder_norm(x))[:, -(self.patches - masking.keep) :]
        return {"loss": self.target.loss(predicted, self.targets(inputs, patches, masking))}

    def decode(self, tokens_BND: Tensor, masking: Any, start: int, stop: int | None = None) -> Tensor:
        if self.first_block and self.last_block:
            return super().decode(tokens_BND, masking, start, stop)
        table = self.decoder_pos_embed[0, 1:]
        first = self.decoder_pos_embed[:, :1].expand(len(tokens_BND), -1, -1)
        known = F.embedding(masking.shuffle[:, : masking.keep], table)
        x = self.decoder_embed(tokens_BND) + torch.cat([first, known], dim=1)
        hidden = self.mask_token + F.embedding(masking.shuffle[:, masking.keep :], table)
        x = torch.cat([x, hidden], dim=1)
        *blocks, last = self.decoder_blocks
        for block in blocks:
            x = block(x)
        return savings._last(last, x, 1 + start) if self.last_block else last(x)[:, 1 + start :]


def model_of(architecture: Architecture, blocks: tuple[int, int, int], kind: type | None = None, **changes: Any) -> Any:
    depth, width, heads = blocks
    values = PretrainingValues(
        steps=1, batch=1, base_lr=1e-4, weight_decay=0.05, mask_ratio=0.75, norm_pix=True,
        decoder_depth=depth, decoder_width=width, decoder_heads=heads, **changes,
    )  # fmt: skip
    encoder = Encoder(architecture, frozen_positions=True)
    encoder.initialise(0)
    return (kind or build_model)(encoder, Input(mean=[0.5] * 3, std=[0.5] * 3), values, 0)


def data(architecture: Architecture, batch: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    side = architecture.image_size
    return torch.randn(batch, 3, side, side, generator=random), torch.rand(
        batch, architecture.grid**2, generator=random
    )


def ours(architecture: Architecture, blocks: tuple[int, int, int], batch: int, **options: Any) -> Work:
    """``options``: values of the recipe, or switches of `Plain`."""
    switches = {key: options.pop(key) for key in list(options) if hasattr(Plain, key)}
    model = model_of(architecture, blocks, Plain if switches else None, **options)
    for key, value in switches.items():
        setattr(model, key, value)
    inputs = data(architecture, batch)
    return step(model, lambda: model(*inputs, mode="loss")["loss"])


def theirs(architecture: Architecture, blocks: tuple[int, int, int], batch: int) -> Work:
    depth, width, heads = blocks
    config = ViTMAEConfig(
        hidden_size=architecture.width,
        num_hidden_layers=architecture.depth,
        num_attention_heads=architecture.heads,
        intermediate_size=int(architecture.width * architecture.mlp_ratio),
        image_size=architecture.image_size,
        patch_size=architecture.patch,
        decoder_num_hidden_layers=depth,
        decoder_hidden_size=width,
        decoder_num_attention_heads=heads,
        decoder_intermediate_size=4 * width,
        mask_ratio=0.75,
        norm_pix_loss=True,
    )
    model = ViTMAEForPreTraining(config)
    images, noise = data(architecture, batch)
    return step(model, lambda: model(images, noise=noise).loss)


def step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Work:
    """Forward, backward and one fused AdamW update."""
    if isinstance(model, MaskedAutoencoder):
        onednn.accelerate(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    model.train()

    def one() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return one


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Figure(NamedTuple):
    """A median of repeats, and the middle 90 % of them."""

    median: float
    low: float
    high: float


def verdict(met: bool | None, bar: str = "") -> str:
    """A bar and whether it is met; "" without one."""
    if met is None:
        return ""
    MISSED.extend([bar] * (not met))
    return f"   bar {bar}: {'pass' if met else 'FAIL'}"


MISSED: list[str] = []


def compare(title: str, a: Work, b: Work, pairs: int, bar: float | None = None, whole: bool = False) -> Figure:
    """How many times faster ``a`` is than ``b``; the median, or the ``whole`` interval, should reach ``bar``."""
    a(), b()  # warm-up
    ratios, times_a, times_b = [], [], []
    for _ in range(pairs):
        first, second, third, fourth = seconds(a), seconds(b), seconds(b), seconds(a)
        ratios.append((second + third) / (first + fourth))
        times_a += [first, fourth]
        times_b += [second, third]
    low, high = (torch.quantile(torch.tensor(ratios), q).item() for q in (0.05, 0.95))
    figure = Figure(statistics.median(ratios), low, high)
    medians = f"{statistics.median(times_a):7.3f} s against {statistics.median(times_b):7.3f} s"
    shown = f"{figure.median:5.3f} x  ({low:.3f} to {high:.3f})"
    met = None if bar is None else (figure.low if whole else figure.median) >= bar
    print(f"{title:<58} {medians}   {shown}{verdict(met, f'{bar} x' + whole * ', the whole interval')}", flush=True)
    return figure


def peak(name: str, size: str, **environment: str) -> int:
    """Peak memory of a process that takes three steps, in MiB."""
    # VmHWM, not ru_maxrss: that one begins with the size of the process it was forked from.
    code = f"import pretrain_step as p; w = p.{name}(*p.{size}); w(); w(); w(); "
    code += "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent)} | environment,
    ).stdout
    return int(out.split()[-1]) // 1024


def peaks(size: str) -> None:
    need = [peak(name, size, MALLOC_MMAP_THRESHOLD_="65536") for name in ("ours", "theirs")]
    met = verdict(need[0] <= need[1], "at most theirs")
    print(f"{'peak memory that tensors need, ours and theirs':<58} {need[0]} and {need[1]} MiB{met}", flush=True)
    heap = [sorted(peak(name, size) for _ in range(5)) for name in ("ours", "theirs")]
    shown = " and ".join(f"{one[2]} ({one[0]} to {one[-1]})" for one in heap)
    print(f"{'peak memory in the usual heap, ours and theirs':<58} {shown} MiB", flush=True)


def macs(architecture: Architecture, blocks: tuple[int, int, int], batch: int, **changes: Any) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of(architecture, blocks, **changes)
    inputs = data(architecture, batch)
    with FlopCounterMode(display=False) as counter:
        model(*inputs, mode="loss")["loss"].backward()
    return counter.get_total_flops() / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    machine = f"{provenance.hardware()['cpu']}, {torch.get_num_threads()} threads, fp32"
    print(f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    if args.large:
        with_m = {"mask_tokens": "encoder"}
        predicted = macs(*LARGE, **with_m) / macs(*LARGE)
        title = "ViT-L, batch 4: masked against [M] in the encoder"
        measured = compare(title, ours(*LARGE), ours(*LARGE, **with_m), args.pairs)
        share, low, high = (100 * ratio / predicted for ratio in measured)
        shown = f"{share:.0f} % of it ({low:.0f} to {high:.0f} %){verdict(share >= 90, '90 %')}"
        print(f"MACs predict {predicted:.3f} x; measured {shown}")
        sys.exit(bool(MISSED))
    size, name = (BASE, "BASE") if args.base else (SMALL, "SMALL")
    bar = 1.0 if args.base else 1.2
    compare("ours against transformers' ViTMAE", ours(*size), theirs(*size), args.pairs, bar, whole=args.base)
    quarter = ours(*size, decoder="cross", predict=0.25)
    bar_cross = 1.5 if args.base else None
    compare("cross-attention decoder, a quarter, against ours", quarter, ours(*size), args.pairs, bar_cross)
    on: dict[str, bool] = {}
    for switch in ("embed_visible", "head_on_hidden", "last_block", "first_block"):
        before = dict(on)
        on[switch] = True
        base = ours(*size, **(before or {"embed_visible": False}))
        compare(f"{', '.join(before) or 'plain'} + {switch}", ours(*size, **on), base, args.pairs)
    peaks(name)
    sys.exit(bool(MISSED))


if __name__ == "__main__":
    main()
