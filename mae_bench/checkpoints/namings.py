"""How each code base names the tensors of a ViT, as data: regular expressions, and our name for what they match.

Our names are those of facebookresearch/mae and timm. A name may end in a part, ``#q``: several tensors of the file then
make one of ours (`layouts.PARTS`). ``blocks.*`` stands for every block.

The tables were read from the published code and checked against the installed packages: facebookresearch/mae, deit,
moco-v3, dino, dinov2 and detectron2, microsoft/unilm (beit, beit2), timm, transformers (the names on the hub, and those
of its modules since version 5), mmpretrain, mmsegmentation, google-research/vision_transformer.
"""

from __future__ import annotations

from dataclasses import dataclass

Rules = tuple[tuple[str, str], ...]

WB = r"\.(weight|bias)"
I = r"(\d{1,4})"  # noqa: E741 -- the number of a block


@dataclass(frozen=True)
class Naming:
    """One code base's names.

    ``encoder``: expression for the whole key behind the prefix -> our name. ``other``: expression -> why the tensor is
    not used; it is tried on the key with and without the prefix. ``beside``: encoder tensors that stand without the
    prefix.
    """

    title: str
    anchor: str  # the patch embedding's kernel: in every file once, behind one of the prefixes
    prefixes: tuple[str, ...]
    encoder: Rules
    other: Rules
    beside: Rules = ()


PRETRAINING_TOKEN = "token of masked patches, of pre-training only"
DECODER = "MAE decoder, of pre-training only"
CLASSIFIER = "classifier"
PRETRAINING_HEAD = "head of pre-training"
DENSE_HEAD = "detection or segmentation model around the encoder"
INDEX = "index of relative positions, computed anew"

VIT = Naming(
    title="plain ViT names (FAIR, timm)",
    anchor="patch_embed.proj.weight",
    prefixes=(
        "",
        "module.",  # torch's DistributedDataParallel
        "_orig_mod.",  # torch.compile
        "module.base_encoder.",  # MoCo v3
        "module.backbone.",  # DINO's training checkpoints
        "backbone.",  # the same, without DistributedDataParallel; DINOv2's
        "backbone.net.",  # detectron2's ViTDet
    ),
    encoder=(
        (r"(cls_token|pos_embed)", r"\1"),
        (r"(?:reg_token|register_tokens)", "reg_token"),
        (r"patch_embed\.proj" + WB, r"patch_embed.proj.\1"),
        # DINOv2 trains with blocks in chunks, blocks.c.i; i counts through.
        (rf"blocks\.(?:\d+\.)?{I}\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)" + WB, r"blocks.\1.\2.\3"),
        (rf"blocks\.(?:\d+\.)?{I}\.mlp\.w12" + WB, r"blocks.\1.mlp.fc1.\2"),
        (rf"blocks\.(?:\d+\.)?{I}\.mlp\.w3" + WB, r"blocks.\1.mlp.fc2.\2"),
        (rf"blocks\.(?:\d+\.)?{I}\.ls([12])\.gamma", r"blocks.\1.ls\2.gamma"),
        (rf"blocks\.{I}\.gamma_([12])", r"blocks.\1.ls\2.gamma"),
        (rf"blocks\.{I}\.attn\.([qv])_bias", r"blocks.\1.attn.qkv.bias#\2"),
        (rf"blocks\.{I}\.attn\.(relative_position_bias_table|rel_pos_[hw])", r"blocks.\1.attn.\2"),
        (r"rel_pos_bias\.relative_position_bias_table", "blocks.*.attn.relative_position_bias_table"),
        (r"(norm|fc_norm)" + WB, r"\1.\2"),
    ),
    other=(
        (r"mask_token", PRETRAINING_TOKEN),
        (r"decoder_[\w.]*", DECODER),
        (r"(?:blocks\.\d+\.attn\.|rel_pos_bias\.)relative_position_index", INDEX),
        (r"(?:lm_head|cls_pt_layers)\.[\w.]*", PRETRAINING_HEAD),  # BEiT, BEiT v2
        (r"head(?:_dist)?\.(?:weight|bias)", CLASSIFIER),
        (r"module\.(?:momentum_encoder|predictor)\.[\w.]*", "momentum encoder or predictor of MoCo v3"),
        (r"(?:module\.)?(?:dino_head|ibot_head|head)\.[\w.]*", PRETRAINING_HEAD),
        (r"(?:backbone\.simfp_[2-6]|proposal_generator|roi_heads)\.[\w.]*|pixel_(?:mean|std)", DENSE_HEAD),
    ),
)

_LAYER = rf"(?:encoder\.layer|layers)\.{I}\."

HF = Naming(
    title="Hugging Face names",
    anchor="embeddings.patch_embeddings.projection.weight",
    prefixes=("", "vit.", "deit.", "beit.", "dinov2.", "dinov2_with_registers."),
    encoder=(
        (r"embeddings\.cls_token", "cls_token"),
        (r"embeddings\.position_embeddings", "pos_embed"),
        (r"embeddings\.register_tokens", "reg_token"),
        (r"embeddings\.patch_embeddings\.projection" + WB, r"patch_embed.proj.\1"),
        (_LAYER + r"(?:layernorm_before|norm1)" + WB, r"blocks.\1.norm1.\2"),
        (_LAYER + r"(?:layernorm_after|norm2)" + WB, r"blocks.\1.norm2.\2"),
        (_LAYER + r"attention\.(?:attention\.query|q_proj)" + WB, r"blocks.\1.attn.qkv.\2#q"),
        (_LAYER + r"attention\.(?:attention\.key|k_proj)" + WB, r"blocks.\1.attn.qkv.\2#k"),
        (_LAYER + r"attention\.(?:attention\.value|v_proj)" + WB, r"blocks.\1.attn.qkv.\2#v"),
        (_LAYER + r"attention\.(?:output\.dense|o_proj)" + WB, r"blocks.\1.attn.proj.\2"),
        (_LAYER + r"(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)" + WB, r"blocks.\1.mlp.fc1.\2"),
        (_LAYER + r"mlp\.(gate|up)_proj" + WB, r"blocks.\1.mlp.fc1.\3#\2"),
        (_LAYER + r"(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)" + WB, r"blocks.\1.mlp.fc2.\2"),
        (_LAYER + r"(?:layer_scale([12])\.lambda1)", r"blocks.\1.ls\2.gamma"),
        (_LAYER + r"lambda_([12])", r"blocks.\1.ls\2.gamma"),
        (
            _LAYER + r"(?:attention\.attention\.)?relative_position_bias\.(relative_position_bias_table)",
            r"blocks.\1.attn.\2",
        ),
        (
            r"(?:encoder\.relative_position_bias|shared_position_bias)\.relative_position_bias_table",
            "blocks.*.attn.relative_position_bias_table",
        ),
        (r"layernorm" + WB, r"norm.\1"),
        (r"pooler\.layernorm" + WB, r"fc_norm.\1"),
    ),
    other=(
        (r"embeddings\.mask_token", PRETRAINING_TOKEN),
        (r"decoder\.[\w.]*", DECODER),
        (r"[\w.]*relative_position_index", INDEX),
        (r"pooler\.dense\.[\w.]*", "pooler, of the library's own and not of the weights"),
        (r"lm_head\.[\w.]*", PRETRAINING_HEAD),
        (r"(?:cls_|distillation_)?classifier\.[\w.]*", CLASSIFIER),
    ),
    beside=((r"layernorm" + WB, r"norm.\1"),),  # of BEiT's masked image modelling
)

MM = Naming(
    title="OpenMMLab names",
    anchor="patch_embed.projection.weight",
    prefixes=("backbone.", ""),
    encoder=(
        (r"(cls_token|pos_embed)", r"\1"),
        (r"patch_embed\.projection" + WB, r"patch_embed.proj.\1"),
        (rf"layers\.{I}\.ln([12])" + WB, r"blocks.\1.norm\2.\3"),
        (rf"layers\.{I}\.attn\.(qkv|proj)" + WB, r"blocks.\1.attn.\2.\3"),
        (rf"layers\.{I}\.attn\.([qv])_bias", r"blocks.\1.attn.qkv.bias#\2"),
        (rf"layers\.{I}\.attn\.attn\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
        (rf"layers\.{I}\.attn\.attn\.out_proj" + WB, r"blocks.\1.attn.proj.\2"),
        (rf"layers\.{I}\.attn\.(relative_position_bias_table)", r"blocks.\1.attn.\2"),
        (rf"layers\.{I}\.ffn\.layers\.0\.0" + WB, r"blocks.\1.mlp.fc1.\2"),
        (rf"layers\.{I}\.ffn\.layers\.1" + WB, r"blocks.\1.mlp.fc2.\2"),
        (rf"layers\.{I}\.gamma_([12])", r"blocks.\1.ls\2.gamma"),
        (r"ln1" + WB, r"norm.\1"),
        (r"ln2" + WB, r"fc_norm.\1"),
    ),
    other=(
        (rf"layers\.{I}\.attn\.relative_position_index", INDEX),
        (r"(?:decode_head|auxiliary_head)\.[\w.]*", DENSE_HEAD),
        (r"data_preprocessor\.(?:mean|std)", "pixel statistics"),
        (r"neck\.[\w.]*", "neck of pre-training"),
        (r"head\.(?:cls_head|predictor)\.[\w.]*", PRETRAINING_HEAD),  # BEiT, MoCo v3
        (r"head\.[\w.]*", CLASSIFIER),
        (r"mask_token", PRETRAINING_TOKEN),
    ),
)

_FLAX_BLOCK = rf"Transformer/encoderblock_{I}/"
_FLAX_WB = "/(weight|bias)"

FLAX = Naming(
    title="Flax names (google-research/vision_transformer)",
    anchor="embedding/weight",
    prefixes=("", "opt/target/"),
    encoder=(
        (r"cls", "cls_token"),
        (r"Transformer/posembed_input/pos_embedding", "pos_embed"),
        (r"embedding" + _FLAX_WB, r"patch_embed.proj.\1"),
        (_FLAX_BLOCK + r"LayerNorm_0" + _FLAX_WB, r"blocks.\1.norm1.\2"),
        (_FLAX_BLOCK + r"LayerNorm_2" + _FLAX_WB, r"blocks.\1.norm2.\2"),
        (_FLAX_BLOCK + r"MultiHeadDotProductAttention_1/(q)uery" + _FLAX_WB, r"blocks.\1.attn.qkv.\3#\2"),
        (_FLAX_BLOCK + r"MultiHeadDotProductAttention_1/(k)ey" + _FLAX_WB, r"blocks.\1.attn.qkv.\3#\2"),
        (_FLAX_BLOCK + r"MultiHeadDotProductAttention_1/(v)alue" + _FLAX_WB, r"blocks.\1.attn.qkv.\3#\2"),
        (_FLAX_BLOCK + r"MultiHeadDotProductAttention_1/out" + _FLAX_WB, r"blocks.\1.attn.proj.\2"),
        (_FLAX_BLOCK + r"MlpBlock_3/Dense_0" + _FLAX_WB, r"blocks.\1.mlp.fc1.\2"),
        (_FLAX_BLOCK + r"MlpBlock_3/Dense_1" + _FLAX_WB, r"blocks.\1.mlp.fc2.\2"),
        (r"Transformer/encoder_norm" + _FLAX_WB, r"norm.\1"),
    ),
    other=((r"(?:head|pre_logits)/[\w/]*", CLASSIFIER),),
)

NAMINGS = (VIT, HF, MM, FLAX)
