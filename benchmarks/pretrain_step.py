"""One MAE training step beside transformers' ViTMAE: the same sizes, batch and optimiser, in one process.

Prints the median of 9 ratios from runs in the order A B B A, and their range. A small model, where overhead rules
(width 192, depth 12, 64 patches, batch 64); `--base` measures ViT-B/16 at 224 px, batch 8.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_bench.encoders.vit import Encoder
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.schema import Architecture, Input, PretrainingValues

PAIRS = 9


def ours(architecture: Architecture, decoder: tuple[int, int, int], batch: int) -> Callable[[], None]:
    depth, width, heads = decoder
    values = PretrainingValues(
        steps=1, batch=batch, base_lr=1e-4, weight_decay=0.05, mask_ratio=0.75, norm_pix=True,
        decoder_depth=depth, decoder_width=width, decoder_heads=heads,
    )  # fmt: skip
    encoder = Encoder(architecture, frozen_positions=True)
    encoder.initialise(0)
    model = MaskedAutoencoder(encoder, Input(mean=[0.5] * 3, std=[0.5] * 3), values, seed=0)
    images = torch.randn(batch, 3, architecture.image_size, architecture.image_size)
    noise = torch.rand(batch, architecture.grid**2)
    return step(model, lambda: model(images, noise, mode="loss")["loss"])


def theirs(architecture: Architecture, decoder: tuple[int, int, int], batch: int) -> Callable[[], None]:
    depth, width, heads = decoder
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
    images = torch.randn(batch, 3, architecture.image_size, architecture.image_size)
    noise = torch.rand(batch, architecture.grid**2)
    return step(model, lambda: model(images, noise=noise).loss)


def step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Forward, backward and one fused AdamW update."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    model.train()

    def one() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return one


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", action="store_true", help="ViT-B/16 at 224 px, batch 8")
    if parser.parse_args().base:
        architecture = Architecture(patch=16, width=768, depth=12, heads=12, image_size=224)
        decoder, batch = (8, 512, 16), 8
    else:
        architecture = Architecture(patch=4, width=192, depth=12, heads=3, image_size=32)
        decoder, batch = (2, 96, 3), 64
    a, b = ours(architecture, decoder, batch), theirs(architecture, decoder, batch)
    a(), b()  # warm-up
    ratios, times_a, times_b = [], [], []
    for _ in range(PAIRS):
        first, second, third, fourth = seconds(a), seconds(b), seconds(b), seconds(a)
        ratios.append((second + third) / (first + fourth))
        times_a += [first, fourth]
        times_b += [second, third]
    ratios.sort()
    print(f"ours          {statistics.median(times_a):.3f} s a step (median of {len(times_a)})")
    print(f"transformers  {statistics.median(times_b):.3f} s a step")
    span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"ratio         {statistics.median(ratios):.2f} x faster ({PAIRS} pairs, {span})")


if __name__ == "__main__":
    main()
