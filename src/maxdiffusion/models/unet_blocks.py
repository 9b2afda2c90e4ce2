"""The UNet's parts: residual blocks, spatial transformers, and the levels made of them (channels last)."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from maxdiffusion.models.unet_config import BlockConfig
from maxdiffusion.nn.activations import activation
from maxdiffusion.nn.attention import Attention
from maxdiffusion.nn.conv import Conv
from maxdiffusion.nn.feed_forward import FeedForward
from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.norms import GroupNorm, LayerNorm
from maxdiffusion.nn.stack import BLOCK_INPUT, apply_stack, remat
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime

TRANSFORMER_BLOCKS = "transformer_blocks"
"""Name of the stacks of equal blocks, the ones that `scan_layers` scans."""


def constrain_picture(layout: Layout, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """`x` laid out by the names of pictures, channels last."""
    return layout.constrain(x, "activation_batch", "activation_height", "activation_width", "activation_channels")


class ResnetBlock(nn.Module, kw_only=True):
    """Two convolutions with the time embedding between, around a shortcut (He et al. 2016, Ho et al. 2020).

    Attributes:
        channels: of the result.
        config: the level.
        runtime: how the model runs.
    """

    channels: int
    config: BlockConfig
    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], time: Float[Array, "b t"]) -> Float[Array, "b h w channels"]:
        config, runtime, x = self.config, self.runtime, checkpoint_name(x, BLOCK_INPUT)
        act = activation(config.act_fn)

        def norm(name: str) -> GroupNorm:
            return GroupNorm(num_groups=config.num_groups, epsilon=config.epsilon, runtime=runtime, name=name)

        def conv(name: str, size: int = 3) -> Conv:
            return Conv(features=self.channels, size=size, runtime=runtime, name=name)

        projection = Dense(
            features=((1 + config.scale_shift) * self.channels,),
            names=("embed", "conv_out"),
            runtime=runtime,
            name="time_emb_proj",
        )
        shift = projection(act(time))[:, None, None, :]
        h = constrain_picture(runtime.layout, conv("conv1")(act(norm("norm1")(x))))
        h = checkpoint_name(h, "hidden")
        if config.scale_shift:
            scale, shift = jnp.split(shift, 2, axis=-1)
            h = norm("norm2")(h) * (1 + scale) + shift
        else:
            h = norm("norm2")(h + shift)
        h = checkpoint_name(conv("conv2")(act(h)), "feed_forward")
        if x.shape[-1] != self.channels:
            x = conv("conv_shortcut", size=1)(x)
        return constrain_picture(runtime.layout, x + h)


class TransformerBlock(nn.Module, kw_only=True):
    """Self-attention, attention to the text, and a feed-forward network, each after a norm and around a shortcut.

    Attributes:
        config: the level.
        runtime: how the model runs.
    """

    config: BlockConfig
    runtime: Runtime

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l c"], text: Float[Array, "b keys width"], mask: Bool[Array, "b keys"] | None
    ) -> Float[Array, "b l c"]:
        runtime, x = self.runtime, checkpoint_name(x, BLOCK_INPUT)

        def attend(name: str) -> Attention:
            return Attention(num_heads=self.config.num_heads, runtime=runtime, name=name)

        normed = LayerNorm(runtime=runtime, name="norm1")(x)
        # The original masks only the second attention, even where the first one reads the text too.
        x = x + attend("attn1")(normed, text if self.config.only_cross else None)
        x = x + attend("attn2")(LayerNorm(runtime=runtime, name="norm2")(x), text, mask)
        return x + FeedForward(runtime=runtime, name="ff")(LayerNorm(runtime=runtime, name="norm3")(x))


class SpatialTransformer(nn.Module, kw_only=True):
    """Transformer blocks over the positions of a picture (Rombach et al. 2022), around a shortcut.

    Attributes:
        config: the level.
        runtime: how the model runs.
    """

    config: BlockConfig
    runtime: Runtime

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], text: Float[Array, "b keys width"], mask: Bool[Array, "b keys"] | None
    ) -> Float[Array, "b h w c"]:
        config, runtime = self.config, self.runtime
        batch, height, width, channels = x.shape
        h = GroupNorm(num_groups=config.num_groups, epsilon=1e-6, runtime=runtime, name="norm")(x)
        h = h.reshape(batch, height * width, channels)
        h = Dense(features=(channels,), names=("conv_in", "embed"), runtime=runtime, name="proj_in")(h)
        h = runtime.layout.constrain(h, "activation_batch", "activation_length", "activation_embed")
        h = apply_stack(
            TransformerBlock,
            h,
            text,
            mask,
            num_layers=config.num_transformers,
            name=TRANSFORMER_BLOCKS,
            runtime=runtime,
            attributes={"config": config, "runtime": runtime},
        )
        h = Dense(features=(channels,), names=("embed", "conv_out"), runtime=runtime, name="proj_out")(h)
        return constrain_picture(runtime.layout, x + h.reshape(x.shape))


class Downsample(nn.Module, kw_only=True):
    """Halves height and width (rounded up) by a convolution of stride 2.

    Attributes:
        runtime: how the model runs.
    """

    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
        x = Conv(features=x.shape[-1], stride=2, runtime=self.runtime, name="conv")(x)
        return constrain_picture(self.runtime.layout, x)


class Upsample(nn.Module, kw_only=True):
    """Doubles height and width by repetition, crops to the size of the skip to come, and convolves.

    Attributes:
        runtime: how the model runs.
    """

    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], size: tuple[int, int]) -> Float[Array, "b h2 w2 c"]:
        batch, height, width, channels = x.shape
        x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
        x = x.reshape(batch, 2 * height, 2 * width, channels)[:, : size[0], : size[1]]
        x = Conv(features=channels, runtime=self.runtime, name="conv")(constrain_picture(self.runtime.layout, x))
        return constrain_picture(self.runtime.layout, x)


class _Level(nn.Module, kw_only=True):
    """What the levels share.

    Attributes:
        config: the level.
        runtime: how the model runs.
    """

    config: BlockConfig
    runtime: Runtime

    def resnet(self, index: int) -> ResnetBlock:
        """The residual block number `index`."""
        block = remat(ResnetBlock, self.runtime)
        name = f"resnets_{index}"
        return block(channels=self.config.channels, config=self.config, runtime=self.runtime, name=name)

    def transformer(self, index: int) -> SpatialTransformer:
        """The spatial transformer number `index`."""
        return SpatialTransformer(config=self.config, runtime=self.runtime, name=f"attentions_{index}")


class DownLevel(_Level, kw_only=True):
    """A level on the way down; also returns what the way up will read."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b h w c"],
        time: Float[Array, "b t"],
        text: Float[Array, "b keys width"] | None,
        mask: Bool[Array, "b keys"] | None,
    ) -> tuple[Float[Array, "b h2 w2 c2"], list[Array]]:
        skips: list[Array] = []
        for index in range(self.config.num_resnets):
            x = self.resnet(index)(x, time)
            if text is not None and self.config.num_transformers:
                x = self.transformer(index)(x, text, mask)
            skips.append(x)
        if self.config.resample:
            x = Downsample(runtime=self.runtime, name="downsamplers_0")(x)
            skips.append(x)
        return x, skips


class MidLevel(_Level, kw_only=True):
    """The middle: a residual block, then transformer and residual block by turns."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b h w c"],
        time: Float[Array, "b t"],
        text: Float[Array, "b keys width"] | None,
        mask: Bool[Array, "b keys"] | None,
    ) -> Float[Array, "b h w c"]:
        x = self.resnet(0)(x, time)
        for index in range(1, self.config.num_resnets):
            if text is not None and self.config.num_transformers:
                x = self.transformer(index - 1)(x, text, mask)
            x = self.resnet(index)(x, time)
        return x


class UpLevel(_Level, kw_only=True):
    """A level on the way up; takes the skips it needs from the end of `skips`, and leaves the rest."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b h w c"],
        skips: list[Array],
        time: Float[Array, "b t"],
        text: Float[Array, "b keys width"] | None,
        mask: Bool[Array, "b keys"] | None,
    ) -> tuple[Float[Array, "b h2 w2 c2"], list[Array]]:
        for index in range(self.config.num_resnets):
            skips, skip = skips[:-1], skips[-1]
            x = self.resnet(index)(jnp.concatenate([x, skip], axis=-1), time)
            if text is not None and self.config.num_transformers:
                x = self.transformer(index)(x, text, mask)
        if self.config.resample:
            height, width = skips[-1].shape[1:3]
            x = Upsample(runtime=self.runtime, name="upsamplers_0")(x, (height, width))
        return x, skips
