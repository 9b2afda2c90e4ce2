"""The UNet's parts: residual blocks, spatial transformers, and the levels made of them (channels last)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.halo import PICTURE
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
    return layout.constrain(x, *PICTURE)


def constrain_tokens(layout: Layout, x: Float[Array, "b l c"]) -> Float[Array, "b l c"]:
    """`x` laid out by the names of a token stream."""
    return layout.constrain(x, "activation_batch", "activation_length", "activation_embed")


class ResnetBlock(nn.Module, kw_only=True):
    """Two convolutions with the time embedding between, around a shortcut (He et al. 2016, Ho et al. 2020).

    Attributes:
        channels: of the result.
        config: the level.
        runtime: how the model runs.
        filled: rows that are no padding; None for all.
    """

    channels: int
    config: BlockConfig
    runtime: Runtime
    filled: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], time: Float[Array, "b t"]) -> Float[Array, "b h w channels"]:
        config, runtime, filled = self.config, self.runtime, self.filled
        x = checkpoint_name(x, BLOCK_INPUT)
        act = activation(config.act_fn)

        def norm(name: str) -> GroupNorm:
            return GroupNorm(
                num_groups=config.num_groups, epsilon=config.epsilon, filled=filled, runtime=runtime, name=name
            )

        def conv(name: str, size: int = 3) -> Conv:
            return Conv(features=self.channels, size=size, filled=filled, runtime=runtime, name=name)

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
        filled: positions that are no padding, the others behind them; None for all.
    """

    config: BlockConfig
    runtime: Runtime
    filled: int | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l c"], text: Float[Array, "b keys width"], mask: Bool[Array, "b keys"] | None
    ) -> Float[Array, "b l c"]:
        runtime, x = self.runtime, checkpoint_name(x, BLOCK_INPUT)

        def attend(name: str) -> Attention:
            return Attention(num_heads=self.config.num_heads, runtime=runtime, name=name)

        def normed(name: str) -> Array:
            return LayerNorm(runtime=runtime, name=name)(x)

        # The stream is whole on every device that shares its heads: cut as the feature map is, it would be gathered
        # for each product.
        x = constrain_tokens(runtime.layout, x)
        # The original masks only the second attention, even where the first one reads the text too.
        first = (text, None) if self.config.only_cross else (None, self._seen(x))
        x = constrain_tokens(runtime.layout, x + attend("attn1")(normed("norm1"), *first))
        x = constrain_tokens(runtime.layout, x + attend("attn2")(normed("norm2"), text, mask))
        return constrain_tokens(runtime.layout, x + FeedForward(runtime=runtime, name="ff")(normed("norm3")))

    def _seen(self, x: Float[Array, "b l c"]) -> Bool[Array, "b l"] | None:
        """True for positions that are no padding; None where all are."""
        if self.filled is None:
            return None
        return jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1) < self.filled


class SpatialTransformer(nn.Module, kw_only=True):
    """Transformer blocks over the positions of a picture (Rombach et al. 2022), around a shortcut.

    Attributes:
        config: the level.
        runtime: how the model runs.
        filled: rows that are no padding; None for all.
    """

    config: BlockConfig
    runtime: Runtime
    filled: int | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], text: Float[Array, "b keys width"], mask: Bool[Array, "b keys"] | None
    ) -> Float[Array, "b h w c"]:
        config, runtime = self.config, self.runtime
        batch, height, width, channels = x.shape
        norm = GroupNorm(num_groups=config.num_groups, epsilon=1e-6, filled=self.filled, runtime=runtime, name="norm")
        h = norm(x)
        h = h.reshape(batch, height * width, channels)
        h = Dense(features=(channels,), names=("conv_in", "embed"), runtime=runtime, name="proj_in")(h)
        h = constrain_tokens(runtime.layout, h)
        h = apply_stack(
            TransformerBlock,
            h,
            text,
            mask,
            num_layers=config.num_transformers,
            name=TRANSFORMER_BLOCKS,
            runtime=runtime,
            attributes={"config": config, "runtime": runtime, "filled": self.filled and self.filled * width},
        )
        h = Dense(features=(channels,), names=("embed", "conv_out"), runtime=runtime, name="proj_out")(h)
        return constrain_picture(runtime.layout, x + h.reshape(x.shape))


class Downsample(nn.Module, kw_only=True):
    """Halves height and width (rounded up) by a convolution of stride 2.

    Attributes:
        runtime: how the model runs.
        filled: rows that are no padding, before; None for all.
    """

    runtime: Runtime
    filled: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
        x = Conv(features=x.shape[-1], stride=2, filled=self.filled, runtime=self.runtime, name="conv")(x)
        return constrain_picture(self.runtime.layout, x)


class Upsample(nn.Module, kw_only=True):
    """Doubles height and width by repetition, crops to the size of the skip to come, and convolves.

    Attributes:
        runtime: how the model runs.
        filled: rows that are no padding, afterwards; None for all.
    """

    runtime: Runtime
    filled: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], size: tuple[int, int]) -> Float[Array, "b h2 w2 c"]:
        batch, height, width, channels = x.shape
        x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
        x = x.reshape(batch, 2 * height, 2 * width, channels)[:, : size[0], : size[1]]
        conv = Conv(features=channels, filled=self.filled, runtime=self.runtime, name="conv")
        x = conv(constrain_picture(self.runtime.layout, x))
        return constrain_picture(self.runtime.layout, x)


class _Level(nn.Module, kw_only=True):
    """What the levels share.

    Attributes:
        config: the level.
        runtime: how the model runs.
        filled: rows that are no padding, at this level and at the one that a doubling leads to; None for all.
    """

    config: BlockConfig
    runtime: Runtime
    filled: tuple[int | None, int | None] = (None, None)

    def resnet(self, index: int) -> ResnetBlock:
        """The residual block number `index`."""
        block = remat(ResnetBlock, self.runtime)
        return block(
            channels=self.config.channels,
            config=self.config,
            filled=self.filled[0],
            runtime=self.runtime,
            name=f"resnets_{index}",
        )

    def transformer(self, index: int) -> SpatialTransformer:
        """The spatial transformer number `index`."""
        name = f"attentions_{index}"
        return SpatialTransformer(config=self.config, filled=self.filled[0], runtime=self.runtime, name=name)


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
            x = Downsample(filled=self.filled[0], runtime=self.runtime, name="downsamplers_0")(x)
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
            upsample = Upsample(filled=self.filled[1], runtime=self.runtime, name="upsamplers_0")
            x = upsample(x, (height, width))
        return x, skips
