"""`pictures`: a small UNet on folded pixels and a small text transformer, trained together from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Float32, Int

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.halo import padded_rows
from maxdiffusion.models.spec import ModelSpec
from maxdiffusion.models.text.transformer import TextOutput, TextTransformer
from maxdiffusion.models.unet import FlaxUNet2DConditionModel
from maxdiffusion.nn.model import EXECUTION, DiffusionModel, at_border
from maxdiffusion.parallel.layout import Layout


class Pictures(DiffusionModel, kw_only=True):
    """Text to image in pixel space; its parameters are {"text": ..., "unet": ...}.

    `fold` x `fold` pixels become one position with `fold ** 2` times the channels, so that the network spends its work
    on positions that differ. Beside the pixels it is told where each position lies (Liu et al. 2018, CoordConv). The
    words reach it twice: their states by cross-attention, and one vector for all of them beside the time embedding
    (`class_embed_type="projection"`), which scales and shifts every residual block.

    Execution keywords (`mesh`, `dtype`, ...) are those of `DiffusionModel`.

    Attributes:
        image_size: height and width that the model is trained for, in pixels; other sizes that fold can be run.
        image_channels: 3 for RGB.
        fold: pixels a position, in each direction.
        position_waves: octaves of sines and cosines of row and column that tell positions, beside row and column
            themselves; 0 tells nothing.
        block_out_channels: channels of each level of the UNet, finest first.
        attention_levels: whether each level has attention; the middle always has.
        layers_per_block: residual blocks of each level on the way down (one more on the way up).
        head_dim: width of an attention head of the UNet.
        norm_num_groups: of the group norms.
        vocab_size: number of word ids.
        max_length: longest text, in ids.
        text_width: of the text states.
        text_layers: blocks of the text transformer.
        text_heads: attention heads of the text transformer.
    """

    keeps_precision = FlaxUNet2DConditionModel.keeps_precision
    modulations = FlaxUNet2DConditionModel.modulations

    image_size: int = 64
    image_channels: int = 3
    fold: int = 2
    position_waves: int = 3
    block_out_channels: Sequence[int] = (128, 256, 384)
    attention_levels: Sequence[bool] = (False, True, True)
    layers_per_block: int = 2
    head_dim: int = 32
    norm_num_groups: int = 32
    vocab_size: int = 2048
    max_length: int = 16
    text_width: int = 256
    text_layers: int = 4
    text_heads: int = 8

    def validate(self) -> None:
        """Checks what the UNet and the text transformer do not check themselves.

        Raises:
            UsageError: with the keyword's name and what would work.
        """
        if len(self.attention_levels) != len(self.block_out_channels):
            raise UsageError(
                f"attention_levels has {len(self.attention_levels)} entries for {len(self.block_out_channels)} levels "
                "of block_out_channels: give one true or false a level"
            )
        for name in ("head_dim", "norm_num_groups", "layers_per_block"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: write a whole number, 1 or more")
        if self.fold < 1:
            raise UsageError(f"fold={self.fold}: write 1 (no folding) or more pixels")
        if self.position_waves < 0:
            raise UsageError(f"position_waves={self.position_waves}: write 0 (none) or more octaves")
        if self.image_size % self.fold:
            raise UsageError(f"image_size={self.image_size} does not divide by fold={self.fold}: choose a multiple")
        for level, channels in enumerate(self.block_out_channels):
            if channels % self.head_dim:
                raise UsageError(
                    f"head_dim={self.head_dim} does not divide the {channels} channels of level {level} in "
                    "block_out_channels: choose a divisor of every entry"
                )

    def setup(self) -> None:
        """The two networks, run as this model is run."""
        execution = {name: getattr(self, name) for name in EXECUTION}
        self.text = TextTransformer(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            width=self.text_width,
            num_layers=self.text_layers,
            num_heads=self.text_heads,
            **execution,
        )
        channels = self.image_channels * self.fold**2
        self.unet = FlaxUNet2DConditionModel(
            sample_size=self.image_size // self.fold,
            in_channels=channels + position_channels(2, 2, self.position_waves).shape[0],
            out_channels=channels,
            block_out_channels=self.block_out_channels,
            down_block_types=tuple(_kind("Down", attends) for attends in self.attention_levels),
            up_block_types=tuple(_kind("Up", attends) for attends in reversed(self.attention_levels)),
            layers_per_block=self.layers_per_block,
            num_attention_heads=tuple(channels // self.head_dim for channels in self.block_out_channels),
            norm_num_groups=self.norm_num_groups,
            resnet_time_scale_shift="scale_shift",
            cross_attention_dim=self.text_width,
            class_embed_type="projection",
            projection_class_embeddings_input_dim=self.text_width,
            **execution,
        )

    def dummy_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the smallest call that makes every parameter, as `jax.ShapeDtypeStruct`s."""
        side = self.fold * 2 ** (len(self.block_out_channels) - 1)
        return self.call_shapes(1, height=side, width=side, text=self.max_length)

    def call_shapes(self, batch: int, *, height: int, width: int, text: int) -> dict[str, Any]:
        """Keyword arguments of a call on pictures of this size, as `jax.ShapeDtypeStruct`s."""
        return {
            "images": jax.ShapeDtypeStruct((batch, height, width, self.image_channels), jnp.float32),
            "timesteps": jax.ShapeDtypeStruct((batch,), jnp.float32),
            "ids": jax.ShapeDtypeStruct((batch, min(text, self.max_length)), jnp.int32),
            "mask": jax.ShapeDtypeStruct((batch, min(text, self.max_length)), jnp.bool_),
        }

    def usual_inputs(self, layout: Layout | None = None) -> dict[str, Any]:
        """The same for a picture of `image_size`."""
        rows = padded_rows(self.image_size // self.fold, len(self.block_out_channels), layout or self.layout)
        return self.call_shapes(1, height=self.fold * rows, width=self.image_size, text=self.max_length)

    @at_border
    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        timesteps: Float[Array, " batch"],
        ids: Int[Array, "batch length"],
        mask: Bool[Array, "batch length"],
    ) -> Float[Array, "batch height width channels"]:
        """The prediction for noisy pictures, as `denoise` of `encode`."""
        encoded = self.encode(ids, mask)
        return self.denoise(images, timesteps, encoded, mask)

    @at_border
    def encode(self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]) -> TextOutput:
        """The text as the UNet reads it; once for all steps of sampling.

        Args:
            ids: word ids.
            mask: True for ids that are no padding.
        """
        return self.text(ids, mask)

    @at_border
    def denoise(
        self,
        images: Float[Array, "batch height width channels"],
        timesteps: Float[Array, " batch"],
        text: TextOutput,
        mask: Bool[Array, "batch length"],
    ) -> Float[Array, "batch height width channels"]:
        """The prediction for noisy pictures.

        Args:
            images: noisy pixels, channels last, of any height and width that fold.
            timesteps: as `Process.timestep` gives them.
            text: from `encode`.
            mask: of the same texts.

        Returns:
            In the shape of `images` and the model's dtype.

        Raises:
            UsageError: the pictures do not fold.
        """
        height, width = images.shape[1:3]
        if height % self.fold or width % self.fold:
            raise UsageError(f"pictures of {height} x {width} pixels do not fold: give multiples of fold={self.fold}")
        folded = rearrange(images, "b (h p) (w q) c -> b (p q c) h w", p=self.fold, q=self.fold)
        places = jnp.asarray(
            position_channels(height // self.fold, width // self.fold, self.position_waves), folded.dtype
        )
        places = jnp.broadcast_to(places[None], (folded.shape[0], *places.shape))
        output = self.unet(
            jnp.concatenate([folded, places], axis=1),
            timesteps,
            text.states,
            class_labels=text.pooled,
            encoder_attention_mask=mask,
        ).sample
        return rearrange(output, "b (p q c) h w -> b (h p) (w q) c", p=self.fold, q=self.fold)


def position_channels(height: int, width: int, num_waves: int) -> Float32[np.ndarray, "channels height width"]:
    """Row and column from -1 to 1, and sines and cosines of both with periods of 4, 2, 1, ...; all made on the host.

    Args:
        height: rows of positions.
        width: columns of positions.
        num_waves: octaves; 0 gives no channel at all.
    """
    if num_waves == 0:
        return np.zeros((0, height, width), np.float32)
    ends = [np.linspace(-1, 1, size) if size > 1 else np.zeros(1) for size in (height, width)]
    axes = np.stack(np.meshgrid(*ends, indexing="ij"))
    phases = [2.0**octave * np.pi / 2 * axes for octave in range(num_waves)]
    waves = [wave(phase) for phase in phases for wave in (np.sin, np.cos)]
    return np.concatenate([axes, *waves]).astype(np.float32)


def _kind(way: str, attends: bool) -> str:
    return f"CrossAttn{way}Block2D" if attends else f"{way}Block2D"


PICTURES = ModelSpec(
    name="pictures",
    family="pictures",
    license="Apache-2.0",
    denoiser=Pictures,
    depths=("text_layers",),
    config={},
    tiny={
        "image_size": 8,
        "block_out_channels": (16, 32),
        "attention_levels": (False, True),
        "layers_per_block": 1,
        "head_dim": 8,
        "norm_num_groups": 4,
        "vocab_size": 64,
        "max_length": 8,
        "text_width": 16,
        "text_layers": 1,
        "text_heads": 2,
    },
)
