"""A small text transformer, trained from scratch with the denoiser: word ids to states and one pooled vector."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.errors import UsageError
from maxdiffusion.nn.attention import Attention
from maxdiffusion.nn.feed_forward import FeedForward
from maxdiffusion.nn.linear import Embed
from maxdiffusion.nn.model import DiffusionModel, at_border
from maxdiffusion.nn.norms import LayerNorm
from maxdiffusion.nn.parameters import lead_axes, parameter, uniform
from maxdiffusion.nn.stack import BLOCK_INPUT, apply_stack
from maxdiffusion.runtime import Runtime

TEXT_BLOCKS = "blocks"
"""Name of the stack of equal blocks, the one that `scan_layers` scans."""


@struct.dataclass
class TextOutput:
    """What a text encoder returns.

    Attributes:
        states: (batch, length, width), in the model's dtype; what stands at padding means nothing.
        pooled: (batch, width), the sum of the states that are no padding over the square root of their number, in the
            model's dtype.
    """

    states: Array
    pooled: Array


class TextBlock(nn.Module, kw_only=True):
    """Self-attention among the words and a feed-forward network, each after a norm and around a shortcut.

    Attributes:
        num_heads: of attention.
        runtime: how the model runs.
    """

    num_heads: int
    runtime: Runtime

    @nn.compact
    def __call__(self, x: Float[Array, "b l width"], mask: Bool[Array, "b l"]) -> Float[Array, "b l width"]:
        runtime, x = self.runtime, checkpoint_name(x, BLOCK_INPUT)
        normed = LayerNorm(runtime=runtime, name="norm1")(x)
        x = x + Attention(num_heads=self.num_heads, runtime=runtime, name="attn")(normed, mask=mask)
        return x + FeedForward(runtime=runtime, name="ff")(LayerNorm(runtime=runtime, name="norm2")(x))


class TextTransformer(DiffusionModel, kw_only=True):
    """A bidirectional transformer over word ids (Vaswani et al. 2017, with the norms first) with learnt positions.

    Execution keywords (`mesh`, `dtype`, ...) are those of `DiffusionModel`.

    Attributes:
        vocab_size: number of ids.
        max_length: longest text, in ids.
        width: of the states.
        num_layers: number of blocks.
        num_heads: of attention.
    """

    vocab_size: int = 1024
    max_length: int = 16
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4

    def validate(self) -> None:
        """Checks the sizes.

        Raises:
            UsageError: a size is not positive, or the heads do not divide the width.
        """
        for name in ("vocab_size", "max_length", "width", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: write a whole number, 1 or more")
        if self.width % self.num_heads:
            raise UsageError(f"num_heads={self.num_heads} does not divide width={self.width}: choose a divisor")

    def dummy_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the smallest call that makes every parameter, as `jax.ShapeDtypeStruct`s."""
        shape = (1, self.max_length)
        return {"ids": jax.ShapeDtypeStruct(shape, jnp.int32), "mask": jax.ShapeDtypeStruct(shape, jnp.bool_)}

    @at_border
    @nn.compact
    def __call__(self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]) -> TextOutput:
        """States of a batch of texts.

        Args:
            ids: word ids; an id out of range gives nan.
            mask: True for ids that are no padding; padding changes nothing in the states of the others.

        Raises:
            UsageError: the texts are longer than `max_length`, or the mask has another shape.
        """
        if ids.ndim != 2 or ids.shape[1] > self.max_length or mask.shape != ids.shape:
            raise UsageError(
                f"ids of shape {ids.shape} with a mask of shape {mask.shape}: this model takes two arrays of shape "
                f"(batch, at most {self.max_length})"
            )
        runtime, layout = self.runtime, self.layout
        names = ("activation_batch", "activation_length", "activation_embed")
        ids, mask = (layout.constrain(array, "activation_batch", "activation_length") for array in (ids, mask))
        # The norms divide by the size of the embeddings, so their size sets how fast words move apart at first.
        words = Embed(
            num_embeddings=self.vocab_size,
            features=self.width,
            table_init=uniform(1, gain=0.5),
            runtime=runtime,
            name="words",
        )(ids)
        table = (self.max_length, self.width)
        positions = parameter(self, "positions", uniform(1, gain=0.1), table, ("length", "embed"), runtime)
        positions = layout.table(positions, "length", "embed")
        x = layout.constrain(words + lead_axes(positions[: ids.shape[1]], 3), *names)
        x = apply_stack(
            TextBlock,
            x,
            mask,
            num_layers=self.num_layers,
            name=TEXT_BLOCKS,
            runtime=runtime,
            attributes={"num_heads": self.num_heads, "runtime": runtime},
        )
        x = layout.constrain(LayerNorm(runtime=runtime, name="norm")(x), *names)
        weight = mask[:, :, None].astype(jnp.float32)
        count = jnp.maximum(jnp.sum(weight, axis=1), 1.0)
        # Not the mean: one word that differs should count as much in a long caption as in a short one, nearly.
        pooled = (jnp.sum(weight * x.astype(jnp.float32), axis=1) * jax.lax.rsqrt(count)).astype(runtime.dtype)
        return TextOutput(states=x, pooled=layout.constrain(pooled, "activation_batch", "activation_embed"))
