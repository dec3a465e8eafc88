"""The classical autoencoders beside MAE, on the same encoder, decoder and trainer: plain, denoising, variational.

They see every patch and predict every patch, so the mask ratio is 0 and the loss is on all. Sources: Vincent et al.,
ICML 2008 (denoising; noise and masked pixels); Kingma and Welling, arXiv 1312.6114 (variational, reparameterised).
"""

from __future__ import annotations

from torch import Tensor, nn

from mae_bench.encoders.positions import Grid
from mae_bench.encoders.vit import Encoder
from mae_bench.engine.seeds import Stream, generator
from mae_bench.errors import UserError
from mae_bench.pretraining.cost import grid_of
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.schema import Architecture, Backbone, Input, PretrainingValues


class Autoencoder(MaskedAutoencoder):
    """Encoder and decoder on the whole image. The noise only orders the tokens, which changes nothing."""

    def _keep(self, mask_ratio: float) -> int:
        return self.patches


class DenoisingAutoencoder(Autoencoder):
    """The encoder sees the image with Gaussian noise of deviation ``noise``, in units of normalised pixels, and a share
    ``drop`` of its pixels at the mean colour; the target is the clean image."""

    def __init__(self, encoder: Encoder, pixels: Input, values: PretrainingValues, seed: int) -> None:
        super().__init__(encoder, pixels, values, seed)
        self.noise, self.drop = values.noise, values.drop

    def seen(self, inputs: Tensor, extra: Tensor | None) -> Tensor:
        """``extra`` (B,4,H,W): three channels N(0,1), one uniform in [0, 1)."""
        if extra is None:
            return inputs  # a picture to look at
        noisy = inputs + self.noise * extra[:, :3]
        return noisy.masked_fill(extra[:, 3:] < self.drop, 0.0)


class VariationalAutoencoder(Autoencoder):
    """Every patch token becomes a Gaussian code of ``latent`` dimensions, from which the decoder gets a sample.

    The loss is the negative ELBO per target value, up to constants: squared error plus ``kl_weight`` times the
    divergence from N(0, 1) in nats. For a likelihood of deviation s the ELBO has kl_weight = 2 s^2. The class token,
    which no code holds, does not reach the decoder.
    """

    def __init__(self, encoder: Encoder, pixels: Input, values: PretrainingValues, seed: int) -> None:
        super().__init__(encoder, pixels, values, seed)
        self.kl_weight = values.kl_weight
        self.code_head = nn.Linear(encoder.width, 2 * values.latent)
        nn.init.xavier_uniform_(self.code_head.weight, generator=generator(Stream.INIT, seed, 1))
        nn.init.zeros_(self.code_head.bias)

    def code_width(self, values: PretrainingValues) -> int:
        return values.latent

    def code(self, tokens_BND: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """``extra`` (B,N,latent) ~ N(0,1); without it the decoder gets the means."""
        parts: Tensor = self.code_head(tokens_BND[:, self.encoder.prefix :]).float()
        mean, log_variance = parts.chunk(2, dim=-1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1)
        sample = mean if extra is None else mean + (0.5 * log_variance).exp() * extra
        return sample.to(tokens_BND.dtype), self.kl_weight * divergence.mean() / self.target.width


OBJECTIVES: dict[str, type[MaskedAutoencoder]] = {
    "masked": MaskedAutoencoder,
    "autoencoder": Autoencoder,
    "denoising": DenoisingAutoencoder,
    "vae": VariationalAutoencoder,
}


def build_model(encoder: Encoder, pixels: Input, values: PretrainingValues, seed: int) -> MaskedAutoencoder:
    """The model of a recipe's objective; values that it would not read are errors."""
    refuse_idle(values)
    return OBJECTIVES[values.objective](encoder, pixels, values, seed)


def refuse_idle(values: PretrainingValues) -> None:
    """Every value is read or refused.

    Raises:
        UserError: names the value, what would read it, and the edit.
    """
    masked = values.objective == "masked"
    default = {name: field.default for name, field in PretrainingValues.model_fields.items()}
    read: dict[str, tuple[bool, str]] = {
        "mask_tokens": (masked, "objective 'masked'"),
        "sampling": (masked, "objective 'masked'"),
        "decoder": (masked and values.mask_tokens == "decoder", "objective 'masked' with mask_tokens 'decoder'"),
        "predict": (values.decoder == "cross", "decoder 'cross'"),
        "noise": (values.objective == "denoising", "objective 'denoising'"),
        "drop": (values.objective == "denoising", "objective 'denoising'"),
        "latent": (values.objective == "vae", "objective 'vae'"),
        "kl_weight": (values.objective == "vae", "objective 'vae'"),
        "pca": (values.target == "pca", "target 'pca'"),
        "tokenizer": (values.target == "tokens", "target 'tokens'"),
    }
    for key, (used, reader) in read.items():
        if not used and getattr(values, key) != default[key]:
            raise UserError(f"{key} = {getattr(values, key)!r} is read by {reader} alone; leave it out")
    for message, wrong in {
        "objective 'denoising' needs noise or drop above 0": values.objective == "denoising"
        and not (values.noise or values.drop),
        "objective 'vae' needs latent and kl_weight above 0": values.objective == "vae"
        and not (values.latent and values.kl_weight),
        "target 'tokens' needs an external tokenizer: set tokenizer to the name of an installed one": values.target
        == "tokens"
        and not values.tokenizer,
        'an objective other than "masked" sees and predicts all: set mask_ratio = 0 and loss_on = "all"': not masked
        and (values.mask_ratio > 0 or values.loss_on != "all"),
        "norm_pix normalises the target 'pixels' alone: set norm_pix = false": values.norm_pix
        and values.target != "pixels",
        "decoder 'cross' predicts hidden patches alone: set loss_on = \"masked\"": values.decoder == "cross"
        and values.loss_on == "all",
        "decoder 'cross' needs decoder_depth above 0": values.decoder == "cross" and not values.decoder_depth,
    }.items():
        if wrong:
            raise UserError(message)


def training_grid(values: PretrainingValues, architecture: Architecture) -> Grid:
    """Rows and columns of patches of the training images.

    Raises:
        UserError: the encoder's positions are of another grid.
    """
    grid = grid_of(architecture, values.height, values.width)
    if grid != (architecture.grid, architecture.grid) and architecture.positions != "sincos":
        raise UserError(
            f"height and width other than the backbone's image_size {architecture.image_size} need positions that are "
            'computed (positions = "sincos"): learned ones of another grid are not this backbone\'s'
        )
    return grid


def refuse_variants(backbone: Backbone) -> None:
    """In MAE (He et al., section 3) the encoder sees a part of the patches, which their positions alone place, and the
    decoder reads normed tokens, one class token first. SwiGLU, layer scale and a class token without position fit.

    Raises:
        UserError: names the feature of another architecture.
    """
    architecture = backbone.architecture
    for feature, wrong in (
        ("registers", architecture.registers > 0),
        ("class_token", not architecture.class_token),
        ("positions", architecture.positions == "none"),
        ("rel_pos", architecture.rel_pos != "none"),
        ("final_norm", architecture.final_norm != "tokens"),
    ):
        if wrong:
            stated = getattr(architecture, feature)
            meant = Architecture.model_fields[feature].default
            raise UserError(
                f"'{backbone.name}' has {feature} = {str(stated).lower()}, for which MAE pre-training is not defined; "
                f"pre-train an architecture with {feature} = {str(meant).lower()}"
            )
