"""Stable Diffusion 1.5, 2.1 and XL: one UNet, three configs (values from the published `unet/config.json` files)."""

from __future__ import annotations

from typing import Any

from maxdiffusion.models.spec import ModelSpec
from maxdiffusion.models.unet import FlaxUNet2DConditionModel

_FOUR_LEVELS: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}
_TINY: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 32,
}
_TINY_FIRST: dict[str, Any] = {
    **_TINY,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}

SD15 = ModelSpec(
    name="sd15",
    family="unet",
    license="CreativeML OpenRAIL-M",
    denoiser=FlaxUNet2DConditionModel,
    depths=("transformer_layers_per_block",),
    config={**_FOUR_LEVELS, "sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    tiny={**_TINY_FIRST, "attention_head_dim": 4},
)

SD21 = ModelSpec(
    name="sd21",
    family="unet",
    license="CreativeML OpenRAIL++-M",
    denoiser=FlaxUNet2DConditionModel,
    depths=("transformer_layers_per_block",),
    config={
        **_FOUR_LEVELS,
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    tiny={**_TINY_FIRST, "attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True},
)

SDXL = ModelSpec(
    name="sdxl",
    family="unet",
    license="CreativeML OpenRAIL++-M",
    denoiser=FlaxUNet2DConditionModel,
    depths=("transformer_layers_per_block",),
    config={
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    tiny={
        **_TINY,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
)
