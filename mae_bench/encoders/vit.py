"""The one ViT encoder of every pipeline, on timm's blocks, with FAIR's and timm's parameter names.

Sources: Dosovitskiy et al. (arXiv 2010.11929) for the architecture, He et al. (arXiv 2111.06377) and
facebookresearch/mae ``models_mae.py`` for positions and initialisation, Li et al. (arXiv 2203.16527) for windows and
decomposed relative positions, Bao et al. (arXiv 2106.08254) for relative position bias and layer scale, Darcet et al.
(arXiv 2309.16588) for registers, Oquab et al. (arXiv 2304.07193) for SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypedDict, Unpack

import torch
from timm.layers import Mlp, SwiGLUPacked
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, nn

from mae_bench.encoders.attention import Attention, RelPos, join_windows, split_windows
from mae_bench.encoders.patches import PatchEmbed
from mae_bench.encoders.positions import Grid, resize, sincos_table
from mae_bench.errors import UserError
from mae_bench.schema import Architecture, Backbone

ARCHITECTURE_GAMMA = 0.1  # initial layer scale of an architecture that has it (BEiT-B's); files bring their own
REL_POS_TABLES = (".rel_pos_h", ".rel_pos_w", ".relative_position_bias_table")


class EncoderOptions(TypedDict, total=False):
    """Keyword arguments of ``Encoder`` beside the architecture, for functions that hand them on."""

    grid: Grid | None
    patch: int | None
    class_token: bool
    final_norm: bool
    drop_path: float
    window: int
    global_blocks: Sequence[int]
    rel_pos: RelPos
    rel_pos_grid: Grid | None
    layer_scale: float
    frozen_positions: bool


class Block(TimmBlock):
    """timm's pre-norm block with our attention, told the grid of its tokens, and global or windowed."""

    def __init__(
        self, architecture: Architecture, drop_path: float, window: int, rel_pos: RelPos, span: Grid, layer_scale: float
    ) -> None:
        swiglu = architecture.mlp == "swiglu"
        super().__init__(
            architecture.width,
            architecture.heads,
            # timm truncates width * ratio, and counts gate and value of a SwiGLU together
            mlp_ratio=(2 if swiglu else 1) * architecture.hidden / architecture.width + 1e-9,
            qkv_bias=True,
            init_values=layer_scale or None,
            drop_path=drop_path,
            norm_layer=partial(nn.LayerNorm, eps=architecture.norm_eps),
            act_layer=nn.SiLU if swiglu else nn.GELU,  # timm's block hands its own to the MLP, SwiGLUPacked's is lost
            mlp_layer=SwiGLUPacked if swiglu else Mlp,
        )
        self.window = window
        self.attn = Attention(architecture.width, architecture.heads, rel_pos, (window, window) if window else span)

    def forward(self, x_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """(B,N,D) -> (B,N,D). ``grid`` is needed by windows and relative positions only."""
        y = self.norm1(x_BND)
        if self.window:
            if grid is None:
                raise ValueError("windows need the grid of the tokens")
            y = self.attn(split_windows(y, grid, self.window), (self.window, self.window))
            y = join_windows(y, grid, self.window)
        else:
            y = self.attn(y, grid)
        x_BND = x_BND + self.drop_path1(self.ls1(y))
        return x_BND + self.drop_path2(self.ls2(self.mlp(self.norm2(x_BND))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A ViT. Images are (B,3,H,W), normalised; tokens (B,[prefix+]N,D), class token and registers first; maps
    (B,D,H/P,W/P).

    The constructor leaves PyTorch's default values in place: use ``random_encoder``, or
    ``checkpoints.load.build_encoder``, which does that or loads a file.

    The architecture's own features are always built. The options adapt it to a task:

    ``grid`` is the (rows, columns) that the position table is made for; other inputs get the table resized in the
    forward pass. ``rel_pos_grid`` (default: ``grid``) is the one that the relative position tables of global blocks
    are made for. ``window`` > 0 restricts the blocks not in ``global_blocks`` to windows of that many patches.
    ``class_token=False`` leaves out the registers too, ``final_norm=False`` the norm of the tokens and of the pooled
    vector alike. ``rel_pos`` and ``layer_scale`` add what the architecture lacks, with constant initial values.
    ``drop_path`` grows linearly from 0 to the given rate at the last block.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        grid: Grid | None = None,
        patch: int | None = None,
        class_token: bool = True,
        final_norm: bool = True,
        drop_path: float = 0.0,
        window: int = 0,
        global_blocks: Sequence[int] = (),
        rel_pos: RelPos = "none",
        rel_pos_grid: Grid | None = None,
        layer_scale: float = 0.0,
        frozen_positions: bool = False,
    ) -> None:
        super().__init__()
        class_token = class_token and architecture.class_token
        rel_pos = _rel_pos(architecture, rel_pos)
        _check_options(architecture.depth, class_token, window, global_blocks, rel_pos)
        positions = architecture.positions != "none"
        self.architecture = architecture
        self.width, self.depth, self.heads = architecture.width, architecture.depth, architecture.heads
        self.patch = patch or architecture.patch
        self.grid: Grid = grid or (architecture.grid, architecture.grid)
        self.layer_scale = ARCHITECTURE_GAMMA if architecture.layer_scale else layer_scale
        registers = architecture.registers if class_token else 0
        self.prefix = int(class_token) + registers  # tokens before the patch tokens
        # Rows of the position table before the grid's.
        self.position_prefix = int(positions and class_token and architecture.class_position)
        if class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, self.width))
        if registers:
            self.reg_token = nn.Parameter(torch.zeros(1, registers, self.width))
        if positions:
            rows = self.position_prefix + self.grid[0] * self.grid[1]
            self.pos_embed = nn.Parameter(torch.zeros(1, rows, self.width), requires_grad=not frozen_positions)
        self.patch_embed = PatchEmbed(self.patch, self.width)
        self.span: Grid = rel_pos_grid or self.grid  # of the relative position tables of global blocks
        self.blocks = nn.ModuleList(
            Block(
                architecture,
                drop_path * number / max(self.depth - 1, 1),
                0 if number in global_blocks else window,
                rel_pos,
                self.span,
                self.layer_scale,
            )
            for number in range(self.depth)
        )

        def norm(where: str) -> nn.Module:
            wanted = final_norm and architecture.final_norm == where
            return nn.LayerNorm(self.width, eps=architecture.norm_eps) if wanted else nn.Identity()

        self.norm, self.fc_norm = norm("tokens"), norm("pooled")

    def grid_of(self, images: Tensor) -> Grid:
        """(H/P, W/P); a UserError where the images are not whole patches."""
        return self.patch_embed.grid(images)

    def embed(self, images: Tensor) -> Tensor:
        """Patch tokens with their positions, (B,N,D), without the prefix tokens."""
        tokens_BND: Tensor = self.patch_embed(images)
        if self.architecture.positions == "none":
            return tokens_BND
        return tokens_BND + self.positions(self.grid_of(images))[:, self.position_prefix :]

    def positions(self, grid: Grid) -> Tensor:
        """The position table for a grid, (1,[1+]N,D); the stored one, unless the grid is another."""
        return resize(self.pos_embed, self.grid, grid, self.position_prefix, self.architecture.resize)

    def with_prefix(self, tokens_BND: Tensor) -> Tensor:
        """(B,N,D) -> (B,prefix+N,D): puts the class token, with its position if it has one, and the registers before
        the patch tokens."""
        if not self.prefix:
            return tokens_BND
        prefix = [self.cls_token + self.pos_embed[:, :1] if self.position_prefix else self.cls_token]
        if self.prefix > 1:
            prefix.append(self.reg_token)
        return torch.cat([*(token.expand(len(tokens_BND), -1, -1) for token in prefix), tokens_BND], dim=1)

    def pooled(self, tokens_BND: Tensor, pool: Literal["cls", "mean"]) -> Tensor:
        """Output of ``tokens`` -> (B,D): the class token, or the mean of the patch tokens, then the norm of the pooled
        vector where the architecture has that one."""
        if pool == "cls" and not self.prefix:
            raise UserError("this encoder has no class token to pool; set pool = mean")
        pooled_BD = tokens_BND[:, 0] if pool == "cls" else tokens_BND[:, self.prefix :].mean(dim=1)
        return self.fc_norm(pooled_BD)  # type: ignore[no-any-return]

    def encode(self, tokens_BND: Tensor, grid: Grid | None = None) -> Tensor:
        """All blocks and the final norm on tokens that already have positions, e.g. the visible ones of MAE."""
        for block in self.blocks:
            tokens_BND = block(tokens_BND, grid)
        normed_BND: Tensor = self.norm(tokens_BND)
        return normed_BND

    def tokens(self, images: Tensor) -> Tensor:
        """(B,3,H,W) -> (B,[prefix+]N,D) after the norm of the tokens (raw where the encoder has none)."""
        return self.encode(self.with_prefix(self.embed(images)), self.grid_of(images))

    forward = tokens

    def maps(self, images: Tensor, taps: Sequence[int]) -> list[Tensor]:
        """Outputs of the blocks ``taps`` (0-based) as (B,D,H/P,W/P) maps, without the prefix tokens, not normed."""
        if not taps or min(taps) < 0 or max(taps) >= self.depth:
            raise UserError(f"taps {list(taps)} must name blocks 0 to {self.depth - 1} of this encoder")
        tokens_BND, (h, w) = self.with_prefix(self.embed(images)), self.grid_of(images)
        outputs: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks[: max(taps) + 1]):
            tokens_BND = block(tokens_BND, (h, w))
            if number in taps:
                map_BDN = tokens_BND[:, self.prefix :].transpose(1, 2)
                outputs[number] = map_BDN.reshape(*map_BDN.shape[:2], h, w)
        return [outputs[tap] for tap in taps]

    def option_tensors(self) -> dict[str, float]:
        """Name -> constant initial value of the tensors that options add to the architecture of the weight file."""
        values: dict[str, float] = {}
        for name, _ in self.named_parameters():
            if name.endswith(REL_POS_TABLES) and self.architecture.rel_pos == "none":
                values[name] = 0.0
            elif name.endswith(".gamma") and not self.architecture.layer_scale:
                values[name] = self.layer_scale
        return values

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """MAE's initialisation, a function of the seed alone: every Linear Xavier-uniform with zero bias, the patch
        embedding Xavier on its flattened weight, class token and registers N(0, 0.02), LayerNorm 1 and 0; positions
        sin-cos or N(0, 0.02) as the architecture declares; relative position tables 0, layer scale constant."""
        generator = torch.Generator().manual_seed(seed)
        initialise_linears_and_norms(self, generator)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.view(self.width, -1), generator=generator)
        # FAIR leaves the convolution's bias at PyTorch's default, uniform within 1 / sqrt(fan in).
        bound = (3 * self.patch**2) ** -0.5
        nn.init.uniform_(self.get_parameter("patch_embed.proj.bias"), -bound, bound, generator=generator)
        for name in ("cls_token", "reg_token"):
            if hasattr(self, name):
                self.get_parameter(name).normal_(std=0.02, generator=generator)
        if self.architecture.positions == "sincos":
            self.pos_embed.copy_(sincos_table(self.width, self.grid, bool(self.position_prefix)))
        elif self.architecture.positions == "learned":
            nn.init.trunc_normal_(self.pos_embed, std=0.02, generator=generator)
        for name, parameter in self.named_parameters():
            if name.endswith(REL_POS_TABLES):
                parameter.zero_()
            elif name.endswith(".gamma"):
                parameter.fill_(self.layer_scale)


def random_encoder(architecture: Architecture, seed: int, **options: Unpack[EncoderOptions]) -> Encoder:
    """An initialised encoder, without drawing PyTorch's default values first."""
    with torch.device("meta"):
        encoder = Encoder(architecture, **options)
    encoder.to_empty(device="cpu")
    encoder.initialise(seed)
    return encoder


@torch.no_grad()
def initialise_linears_and_norms(module: nn.Module, generator: torch.Generator) -> None:
    """MAE's values for every Linear (Xavier-uniform, zero bias; qkv as one matrix) and LayerNorm in ``module``."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


def refuse_vitdet(backbone: Backbone) -> None:
    """For pipelines that build no windows: raises UserError where the backbone is a ViTDet encoder."""
    if backbone.architecture.rel_pos == "decomposed":
        raise UserError(
            f"'{backbone.name}' is a ViTDet encoder (rel_pos decomposed, in windows), which detection alone runs; "
            "choose another backbone, e.g. the one that it was trained from"
        )


def _rel_pos(architecture: Architecture, option: RelPos) -> RelPos:
    """The one kind of relative positions: the architecture's own, or what the task adds."""
    own: RelPos = architecture.rel_pos
    if "none" not in (own, option) and own != option:
        raise UserError(
            f"this backbone's relative positions (rel_pos {own}) cannot be joined with those of the task ({option}); "
            "choose a backbone without relative positions"
        )
    if own == "decomposed" and option == "none":
        raise UserError(
            "this backbone is a ViTDet encoder (rel_pos decomposed, without class token, in windows): "
            "only detection with rel_pos = true runs it; choose another backbone here"
        )
    return own if option == "none" else option


def _check_options(depth: int, class_token: bool, window: int, global_blocks: Sequence[int], rel_pos: RelPos) -> None:
    wrong = [number for number in global_blocks if not 0 <= number < depth]
    if wrong:
        raise UserError(f"global_blocks names block {wrong[0]}, but the encoder has blocks 0 to {depth - 1}")
    if class_token and (window or rel_pos == "decomposed"):
        raise UserError("windows and decomposed relative positions are defined without a class token only")
    if rel_pos == "bias" and (window or not class_token):
        raise UserError(
            "a relative position bias is defined with a class token and without windows only; "
            "set rel_pos = false where the task adds it, or choose a backbone that suits the task"
        )
