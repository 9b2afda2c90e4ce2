"""The keywords of `config.json`: the published files are taken whole, and nothing is silently ignored."""

from __future__ import annotations

from typing import Any

import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.models import FlaxUNet2DConditionModel as UNet
from maxdiffusion.models.unet_config import NEUTRAL

# The UNet of Stable Diffusion XL base 1.0 as published, nulls and all.
SDXL_FILE: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": "0.19.0.dev0",
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_embed_type_num_heads": 64,
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_dim": 2048,
    "cross_attention_norm": None,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_only_cross_attention": None,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "sample_size": 128,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "upcast_attention": None,
    "use_linear_projection": True,
}


def test_the_published_file_of_sdxl_is_taken_whole() -> None:
    model = UNet.from_config(SDXL_FILE, remat_policy="full")
    assert model.runtime.remat.policy == "full"
    assert [level.num_heads for level in model.down_levels()] == [5, 10, 20]
    assert [level.num_transformers for level in model.down_levels()] == [0, 2, 10]
    assert [level.num_transformers for level in model.up_levels()] == [10, 2, 0]
    assert model.mid_level().num_transformers == 10


def test_a_key_that_the_file_leaves_out_has_the_originals_default() -> None:
    assert UNet.from_config({}).cross_attention_dim == 1280
    assert UNet().cross_attention_dim == 768


def test_attention_head_dim_is_the_number_of_heads_unless_that_is_given() -> None:
    assert UNet(attention_head_dim=8).down_levels()[0].num_heads == 8
    assert UNet(num_attention_heads=5).down_levels()[0].num_heads == 5
    agreeing = UNet(num_attention_heads=(5, 10, 20, 20), attention_head_dim=64)
    assert agreeing.down_levels()[1].num_heads == 10


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_keyword_of_other_unets_is_taken_at_its_neutral_value_only(name: str) -> None:
    assert UNet(**{name: NEUTRAL[name]}) == UNet()
    with pytest.raises(UsageError, match=f"{name}=.* is not supported: leave it at"):
        UNet(**{name: "other"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_out_chanels": [8]}, "did you mean 'block_out_channels'"),
        ({"act_fn": "siluu"}, "did you mean 'silu'"),
        ({"down_block_types": ["CrossAttnDownBlock2d"] * 4}, "did you mean 'CrossAttnDownBlock2D'"),
        ({"down_block_types": ["DownBlock2D"] * 3}, "down_block_types has 3 entries for 4 levels"),
        ({"up_block_types": ["AttnUpBlock2D"] * 4}, "up_block_types: 'AttnUpBlock2D' is not supported"),
        ({"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, "mid_block_type"),
        ({"addition_embed_type": "text"}, "addition_embed_type"),
        ({"addition_embed_type": "text_time"}, "needs addition_time_embed_dim"),
        ({"class_embed_type": "projection"}, "needs projection_class_embeddings_input_dim"),
        ({"class_embed_type": "projecton"}, "did you mean 'projection'"),
        ({"resnet_time_scale_shift": "spatial"}, "resnet_time_scale_shift"),
        ({"attention_head_dim": 7}, "7 attention heads do not divide 320 channels"),
        ({"num_attention_heads": 5, "attention_head_dim": 7}, "num_attention_heads=5 x attention_head_dim=7"),
        ({"norm_num_groups": 48}, "norm_num_groups=48 does not divide 320"),
        ({"layers_per_block": [2, 2]}, "layers_per_block has 2 entries for 4 levels"),
        ({"cross_attention_dim": [8, 8, 8, 16]}, "differs between levels"),
        ({"mid_block_only_cross_attention": True}, "mid_block_only_cross_attention=True is not supported"),
        ({"reverse_transformer_layers_per_block": [1]}, "has 1 entries for 4 levels"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        UNet.from_config(config)
    assert message in str(caught.value)
