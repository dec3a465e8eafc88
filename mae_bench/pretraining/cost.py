"""What a training step costs, by formula: multiply-accumulates (MACs), parameters, and memory.

Counted are the products of matrices: 12 n D^2 + 2 n^2 D MACs for a ViT block of width D on n tokens with an MLP of 4 D
(Dosovitskiy et al., arXiv 2010.11929; He et al., arXiv 2111.06377, section 3), and two FLOPs a MAC. Not counted are
biases, norms, softmax, activation functions, sums and gathers: nor does torch's counter, which the tests compare with.
A backward pass is twice the forward pass, less the gradient of the pictures, which nobody needs; attention kernels that
compute their scores anew in it are not counted for that.

Memory is what stands when the backward pass begins: weights, gradients, moments of the optimiser, and what the layers
keep for their gradients. Tensors that live for one operation come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from mae_bench.errors import UserError
from mae_bench.pretraining.decoder import MLP_RATIO
from mae_bench.pretraining.masking import keep_count
from mae_bench.pretraining.targets import build_target
from mae_bench.schema import Architecture, Optimisation, PretrainingValues

FLOAT = 4  # bytes
HALF = 2
Grid = tuple[int, int]


@dataclass(frozen=True)
class Cost:
    """Of one part. All counts are per image, but ``macs_per_step``, whatever the batch, and the parameters."""

    macs: int = 0  # forward
    macs_per_step: int = 0  # forward, once for all images of a step
    parameters: int = 0
    frozen: int = 0  # of the parameters
    kept: int = 0  # values kept for the backward pass in the type that the products are computed in
    kept_float: int = 0  # and in float32 always: inputs of norms, their statistics, the loss

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Cost)))

    def times(self, count: int) -> Cost:
        return Cost(*(count * getattr(self, field.name) for field in fields(Cost)))


@dataclass(frozen=True)
class Shortcuts:
    """What a pre-training step does not compute, with the same loss as if it did (`mae`, `decoder`)."""

    embedding: bool = True  # of hidden patches
    head: bool = True  # for tokens that the loss does not look at
    last_block: bool = True  # of the decoder: queries and MLP of those tokens
    first_block: bool = True  # of the decoder: projections of a position's mask token, for every image anew


OURS = Shortcuts()
PLAIN = Shortcuts(embedding=False, head=False, last_block=False, first_block=False)  # facebookresearch/mae


@dataclass(frozen=True)
class Block:
    """Widths of a transformer block."""

    width: int
    heads: int
    hidden: int
    swiglu: bool = False
    layer_scale: bool = False

    @classmethod
    def of(cls, architecture: Architecture, layer_scale: bool = False) -> Block:
        return cls(
            architecture.width,
            architecture.heads,
            architecture.hidden,
            architecture.mlp == "swiglu",
            architecture.layer_scale or layer_scale,
        )

    def on(
        self, tokens: int, *, queries: int | None = None, shared: int = 0, window: int = 0, grid: Grid = (0, 0)
    ) -> Cost:
        """Self-attention and MLP on ``tokens``, of which ``queries`` (default: all) are wanted.

        ``shared`` of them come projected: queries, keys and values of a mask token at every position of ``grid``,
        computed once a step. ``window`` > 0: attention in windows of that side, padded, over the ``grid``.
        """
        D, wanted = self.width, tokens if queries is None else queries
        attended, keys = tokens, tokens
        if window:
            attended, keys = _padded(grid, window), window * window
            wanted = attended
        known = attended - shared
        kept = known + (3 * attended if shared else wanted + 2 * attended)  # input and output of the projections
        if wanted < attended and not shared:
            kept += wanted  # copied together
        cost = _norm(tokens - shared, D) + Cost(
            macs=(3 * known if shared else wanted + 2 * attended) * D * D,
            macs_per_step=3 * grid[0] * grid[1] * D * D if shared else 0,
            parameters=3 * (D * D + D),
            kept=kept * D,
        )
        cost += _attention(wanted, keys, D, self.heads) + _linear(wanted, D, D)
        return cost + self._mlp(tokens if window else wanted) + self._scale(tokens if window else wanted)

    def across(self, queries: int, keys: int) -> Cost:
        """Cross-attention and MLP: ``queries`` read ``keys``, other tokens of the same width, which are kept already
        (CrossMAE, Fu et al., arXiv 2401.14391, section 3.2)."""
        D = self.width
        keys_values = Cost(macs=2 * keys * D * D, parameters=2 * (D * D + D))
        read = _norm(queries, D) + _linear(queries, D, D) + keys_values + _attention(queries, keys, D, self.heads)
        return read + Cost(kept=(queries + 2 * keys) * D) + _linear(queries, D, D) + self._mlp(queries)

    def _mlp(self, tokens: int) -> Cost:
        up, between = (2 * self.hidden, 3 * self.hidden) if self.swiglu else (self.hidden, self.hidden)
        inner = _linear(tokens, self.width, up) + Cost(kept=tokens * between) + _linear(tokens, self.hidden, self.width)
        return _norm(tokens, self.width) + inner

    def _scale(self, tokens: int) -> Cost:
        one = Cost(parameters=self.width, kept=tokens * self.width)
        return one.times(2 if self.layer_scale else 0)


def encoder(
    architecture: Architecture,
    grid: Grid,
    *,
    patch: int = 0,
    table: Grid | None = None,
    blocks: int = 0,
    class_token: bool = True,
    final_norm: bool = True,
    frozen_positions: bool = False,
    window: int = 0,
    global_blocks: tuple[int, ...] = (),
    rel_pos: str = "none",
    layer_scale: bool = False,
) -> dict[str, Cost]:
    """The encoder on all patches of ``grid``, with the options of `encoders.vit.Encoder`.

    ``table``: the grid that the position table is kept at, where that is another. ``blocks`` > 0: the first ones alone
    are computed. Decomposed relative positions are two products per query, with every row and with every column.
    """
    patch, rel_pos = patch or architecture.patch, rel_pos if architecture.rel_pos == "none" else architecture.rel_pos
    patches, D = grid[0] * grid[1], architecture.width
    prefix = architecture.prefix if class_token else 0
    block = Block.of(architecture, layer_scale)
    layers = []
    for number in range(architecture.depth):
        side = 0 if number in global_blocks else window
        cost = block.on(prefix + patches, window=side, grid=grid)
        cost += _relative(rel_pos, block, (side, side) if side else grid, _padded(grid, side) if side else patches)
        if blocks and number >= blocks:
            cost = Cost(parameters=cost.parameters)
        layers.append(cost)
    norms = _norm(prefix + patches, D) if final_norm and architecture.final_norm != "none" else Cost()
    return {
        "patch embedding": _linear(patches, 3 * patch**2, D),
        "tokens, positions": _tokens(architecture, table or grid, class_token, frozen_positions),
        "encoder": total(layers) + norms,
    }


def _relative(kind: str, block: Block, span: Grid, tokens: int) -> Cost:
    h, w = span
    if kind == "decomposed":
        rows = (2 * h - 1) + (2 * w - 1)
        return Cost(macs=tokens * (h + w) * block.width, parameters=rows * (block.width // block.heads))
    return Cost(parameters=((2 * h - 1) * (2 * w - 1) + 3) * block.heads if kind == "bias" else 0)


def _tokens(architecture: Architecture, grid: Grid, class_token: bool, frozen: bool) -> Cost:
    prefix = architecture.prefix if class_token else 0
    position = int(class_token and architecture.class_token and architecture.class_position)
    rows = 0 if architecture.positions == "none" else position + grid[0] * grid[1]
    table = rows * architecture.width
    return Cost(parameters=table + prefix * architecture.width, frozen=table if frozen else 0)


def pretraining(architecture: Architecture, values: PretrainingValues, shortcuts: Shortcuts = OURS) -> dict[str, Cost]:
    """Parts of `mae.MaskedAutoencoder` and of the autoencoders beside it (`objectives`).

    Raises:
        UserError: an image size that is no multiple of the patch, a mask ratio that leaves nothing, a tokenizer that
            is not installed.
    """
    grid = grid_of(architecture, values.height, values.width)
    patches, D, size = grid[0] * grid[1], architecture.width, 3 * architecture.patch**2
    masked = values.objective == "masked"
    seen = keep_count(patches, values.mask_ratio) if masked else patches
    in_encoder = masked and values.mask_tokens == "encoder"
    tokens = architecture.prefix + (patches if in_encoder else seen)
    sincos = architecture.positions == "sincos"
    parts = encoder(architecture, grid, frozen_positions=sincos)
    parts |= {
        # Of the patches in shuffled order the visible ones are a view, or a copy, by the kernel: all are counted.
        "patch embedding": Cost(
            macs=(seen if shortcuts.embedding else patches) * size * D,
            parameters=(size + 1) * D,
            kept_float=patches * (size + 2),
        ),
        "encoder": Block.of(architecture).on(tokens).times(architecture.depth) + _norm(tokens, D),
    }
    if in_encoder:
        parts["tokens, positions"] += Cost(parameters=D)
    if values.objective == "vae":
        parts["Gaussian code"] = _linear(patches, D, 2 * values.latent) + Cost(kept_float=5 * patches * values.latent)
        return parts | _decoder(values, grid, values.latent, 0, patches, patches, size, shortcuts)
    known = patches if in_encoder else seen
    return parts | _decoder(values, grid, D, architecture.prefix, known, seen, size, shortcuts)


def _decoder(
    values: PretrainingValues, grid: Grid, code: int, lead: int, known: int, seen: int, size: int, shortcuts: Shortcuts
) -> dict[str, Cost]:
    """``code``: channels of what it is given; ``lead``: tokens before those of the ``known`` patches, which come from
    the encoder; the loss looks at those not ``seen``, or at all."""
    patches, width = grid[0] * grid[1], values.decoder_width
    hidden = patches - known
    block = Block(width, values.decoder_heads, MLP_RATIO * width)
    outputs = patches if values.loss_on == "all" or seen == patches else patches - seen
    table = Cost(parameters=(1 + patches) * width, frozen=(1 + patches) * width)
    mask_token = Cost(parameters=width if hidden else 0)
    if values.decoder == "cross":
        outputs = max(1, round(values.predict * hidden))
        given = Cost(kept=(lead + known) * width, kept_float=2 * outputs)
        layers = given + block.across(outputs, lead + known).times(values.decoder_depth)
        heads = outputs
    else:
        tokens = lead + patches
        layers = Cost(kept_float=2 * hidden)
        for number in range(values.decoder_depth):
            last = number == values.decoder_depth - 1 and shortcuts.last_block
            shared = hidden if number == 0 and shortcuts.first_block else 0
            layers += block.on(tokens, queries=outputs if last else None, shared=shared, grid=grid)
        heads = outputs if shortcuts.head else tokens
    channels = build_target(values, size).width
    # The loss keeps the predictions and the targets, which as plain pixels are a view of all patches.
    targets = patches * size if values.target == "pixels" and not values.norm_pix else outputs * channels
    head = _norm(heads, width) + _linear(heads, width, channels)
    head += Cost(kept_float=outputs * channels + targets)
    return {
        "decoder embedding": _linear(lead + known, code, width) + table + mask_token,
        "decoder": layers,
        "prediction head": head,
        "target": Cost(macs=outputs * size * channels if values.target == "pca" else 0),
    }


def _linear(tokens: int, into: int, out: int) -> Cost:
    return Cost(macs=tokens * into * out, parameters=into * out + out, kept=tokens * into)


def _norm(tokens: int, width: int) -> Cost:
    return Cost(parameters=2 * width, kept_float=tokens * (width + 2))


def _attention(queries: int, keys: int, width: int, heads: int) -> Cost:
    """Scores and mix. The kernels keep one number per query and head; what they read and write is kept elsewhere."""
    return Cost(macs=2 * queries * keys * width, kept_float=queries * heads)


def _padded(grid: Grid, window: int) -> int:
    """Patches of a grid filled up to whole windows."""
    return -(-grid[0] // window) * -(-grid[1] // window) * window * window


def total(parts: Iterable[Cost]) -> Cost:
    return sum(parts, Cost())


def grid_of(architecture: Architecture, height: int = 0, width: int = 0, patch: int = 0) -> Grid:
    """Rows and columns of patches in a picture of that size (0 = the architecture's own).

    Raises:
        UserError: a side is no multiple of the patch.
    """
    patch = patch or architecture.patch
    sides = height or architecture.image_size, width or architecture.image_size
    for side in sides:
        if side % patch:
            raise UserError(f"{side} pixels are no whole number of patches of {patch}; choose a multiple of {patch}")
    return sides[0] // patch, sides[1] // patch


def training_macs(parts: dict[str, Cost]) -> int:
    """Per image, forward and backward, where every part trains: neither pictures nor targets get a gradient."""
    target = parts.get("target", Cost())
    return 3 * total(parts.values()).macs - parts["patch embedding"].macs - 2 * target.macs


def memory(parts: Iterable[Cost], values: Optimisation, precision: str) -> tuple[int, int]:
    """Bytes of a training step: those whatever the batch, and those per image of the micro batch."""
    cost = total(parts)
    trained = cost.parameters - cost.frozen
    state = {"adamw": 2, "lars": 1, "sgd": 1}[values.optimizer]
    half = precision != "fp32"
    fixed = FLOAT * (cost.parameters * (2 if values.ema else 1) + trained * (1 + state))
    fixed += HALF * trained if half else 0  # autocast keeps a copy of the weights until the step's end
    return fixed, cost.kept * (HALF if half else FLOAT) + cost.kept_float * FLOAT
