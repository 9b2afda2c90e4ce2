"""FLUX.1's blocks: two streams with one attention over both, and one stream with attention beside a feed-forward.

Both follow the rule of `nn.linear`: what the original keeps in one matrix for heads and hidden units stands here as
two, so that a mesh axis shards heads as heads and units as units.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.kernels.rope import Rotation, rotate
from maxdiffusion.nn.feed_forward import FeedForward
from maxdiffusion.nn.linear import Dense, added_up, read_by_all
from maxdiffusion.nn.modulation import Modulation, modulate
from maxdiffusion.nn.norms import RMSNorm
from maxdiffusion.nn.parameters import uniform
from maxdiffusion.nn.stack import BLOCK_INPUT
from maxdiffusion.nn.timestep import TimestepEmbedding, sinusoids
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime

MLP_RATIO = 4
"""Hidden units for each channel of the stream, in every published FLUX.1."""

KEPT, FRESH = "kept", "fresh"
"""Collections of an attention: turned keys and values of all patches that it reads beside its own patch, and those of
the tokens that it is given. Without the first it reads the tokens that it is given and no others."""

_TIME_FEATURES = 256
_UNITS_A_TIME = 1000.0
"""Times lie in 0 to 1 and guidance is a small number; the sinusoids were made for thousands."""


class Streams(NamedTuple):
    """The two token streams of a double block."""

    image: Float[Array, "batch image width"]
    text: Float[Array, "batch text width"]


def constrain_tokens(layout: Layout, x: Float[Array, "b l c"]) -> Float[Array, "b l c"]:
    """`x` laid out by the names of a token stream."""
    return layout.constrain(x, "activation_batch", "activation_length", "activation_embed")


def join(
    layout: Layout, text: Shaped[Array, "b text ..."], image: Shaped[Array, "b image ..."]
) -> Shaped[Array, "b text_and_image ..."]:
    """One sequence of both, the text first; where devices share the tokens, each device's text before its image.

    So that nothing moves: with the whole text first, nearly every token would go to another device. Attention reads
    its keys in any order, and the rotation, the mask and both streams are joined alike. `part` is the inverse. Both
    lengths divide by the devices that share a sequence.
    """
    parts = layout.divisor("activation_length")
    cut = [x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]) for x in (text, image)]
    return jnp.concatenate(cut, axis=2).reshape(text.shape[0], -1, *text.shape[2:])


def part(layout: Layout, x: Shaped[Array, "b text_and_image ..."], num_text: int) -> tuple[Array, Array]:
    """The text and the image of a sequence that `join` has made."""
    parts = layout.divisor("activation_length")
    cut = x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:])
    text, image = cut[:, :, : num_text // parts], cut[:, :, num_text // parts :]
    return text.reshape(x.shape[0], num_text, *x.shape[2:]), image.reshape(x.shape[0], -1, *x.shape[2:])


class Keys(NamedTuple):
    """What an attention keeps of tokens: their turned keys, and their values."""

    keys: Float[Array, "..."]
    values: Float[Array, "..."]

    def replaced(self, patch: Int[Array, ""], own: Keys) -> Keys:
        """Those of all patches (batch, patches, length, heads, dim), one patch replaced, as one sequence."""

        def one(all_patches: Array, new: Array) -> Array:
            start = (0, patch, 0, 0, 0)
            whole = jax.lax.dynamic_update_slice(all_patches, new[:, None].astype(all_patches.dtype), start)
            return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

        return Keys(one(self.keys, own.keys), one(self.values, own.values))


class TimeTextEmbedding(nn.Module, kw_only=True):
    """The condition of every block: embeddings of time, guidance (where the model knows it) and pooled text, added.

    Attributes:
        features: width of the result.
        runtime: how the model runs.
    """

    features: int
    runtime: Runtime

    @nn.compact
    def __call__(
        self, time: Float[Array, "b"], guidance: Float[Array, "b"] | None, pooled: Float[Array, "b width"]
    ) -> Float[Array, "b features"]:
        def embed(x: Array, name: str) -> Array:
            return TimestepEmbedding(features=self.features, runtime=self.runtime, name=name)(x)

        def waves(values: Array) -> Array:
            values = values.astype(jnp.float32) * _UNITS_A_TIME
            return sinusoids(values, _TIME_FEATURES, flip_sin_to_cos=True)

        cond = embed(waves(time), "timestep_embedder")
        if guidance is not None:
            cond = cond + embed(waves(guidance), "guidance_embedder")
        return cond + embed(pooled, "text_embedder")


class _Attention(nn.Module, kw_only=True):
    """What both attentions share: projections to heads with normed queries and keys, and the attention itself.

    Attributes:
        num_heads: number of heads; together they are as wide as the stream.
        runtime: how the model runs.
    """

    num_heads: int
    runtime: Runtime

    def project(
        self, x: Array, layers: tuple[str, str, str], norms: tuple[str, str], *beside: Dense
    ) -> list[Float[Array, "b l ..."]]:
        """Queries and keys, each head divided by its root mean square, values, and the results of layers beside."""
        heads = (self.num_heads, x.shape[-1] // self.num_heads)
        names = ("embed", "heads", "kv")
        to_heads = [Dense(features=heads, names=names, runtime=self.runtime, name=layer) for layer in layers]
        q, k, v, *others = read_by_all([*to_heads, *beside], x)
        q, k, v = checkpoint_name((q, k, v), "qkv")
        q, k = (RMSNorm(runtime=self.runtime, name=norm)(part) for norm, part in zip(norms, (q, k), strict=True))
        return [q, k, v, *others]

    def attend(
        self, q: Array, k: Array, v: Array, turn: Rotation, mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b l h d"]:
        """Attention with turned queries and keys; see `KEPT` and `FRESH`."""
        runtime, own = self.runtime, Keys(rotate(k, turn), v)
        if self.is_mutable_collection(FRESH) and not self.is_initializing():
            self.put_variable(FRESH, "own", own)
        if self.has_variable(KEPT, "others"):
            own = self.get_variable(KEPT, "others").replaced(self.get_variable(KEPT, "patch"), own)
        return attention(
            rotate(q, turn),
            own.keys,
            own.values,
            mask=mask,
            spec=runtime.attention,
            layout=runtime.layout,
            precision=runtime.precision,
        )


class JointAttention(_Attention, kw_only=True):
    """Every token of both streams reads every token of both, each stream with projections of its own (Esser et al.
    2024); the sequence is that of `join`."""

    @nn.compact
    def __call__(self, streams: Streams, turn: Rotation, mask: Bool[Array, "b l"] | None) -> Streams:
        image = self.project(streams.image, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
        text = self.project(streams.text, ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k"))
        layout = self.runtime.layout
        q, k, v = (join(layout, *pair) for pair in zip(text, image, strict=True))
        of_text, of_image = part(layout, self.attend(q, k, v, turn, mask), streams.text.shape[1])

        def out(y: Array, name: str) -> Array:
            features, names = (streams.image.shape[-1],), ("heads", "kv", "embed")
            y = Dense(features=features, names=names, num_inputs=2, runtime=self.runtime, name=name)(y)
            return checkpoint_name(constrain_tokens(layout, y), "attention_output")

        return Streams(image=out(of_image, "to_out_0"), text=out(of_text, "to_add_out"))


class SelfAttention(_Attention, kw_only=True):
    """Every token reads every token; the heads are handed on as they are, and the result of a layer beside."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l c"], turn: Rotation, mask: Bool[Array, "b l"] | None, beside: Dense
    ) -> tuple[Float[Array, "b l h d"], Float[Array, "b l units"]]:
        q, k, v, units = self.project(x, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), beside)
        return self.attend(q, k, v, turn, mask), units


class DoubleBlock(nn.Module, kw_only=True):
    """Joint attention, then a feed-forward network for each stream; modulated before, gated after.

    Attributes:
        num_heads: of attention.
        runtime: how the model runs.
    """

    num_heads: int
    runtime: Runtime

    @nn.compact
    def __call__(
        self, streams: Streams, cond: Float[Array, "b c"], turn: Rotation, mask: Bool[Array, "b l"] | None
    ) -> Streams:
        runtime, streams = self.runtime, checkpoint_name(streams, BLOCK_INPUT)
        image = Modulation(num_parts=6, runtime=runtime, name="norm1")(cond)
        text = Modulation(num_parts=6, runtime=runtime, name="norm1_context")(cond)
        normed = Streams(*(modulate(x, *parts[:2]) for x, parts in zip(streams, (image, text), strict=True)))
        read = JointAttention(num_heads=self.num_heads, runtime=runtime, name="attn")(normed, turn, mask)

        def finish(x: Array, read: Array, parts: tuple[Array, ...], name: str) -> Array:
            _, _, gate, shift, scale, gate_after = parts
            x = x + gate.astype(x.dtype) * read
            feed_forward = FeedForward(hidden="gelu-approximate", multiple=MLP_RATIO, runtime=runtime, name=name)
            x = x + gate_after.astype(x.dtype) * feed_forward(modulate(x, shift, scale))
            return constrain_tokens(runtime.layout, x)

        return Streams(
            image=finish(streams.image, read.image, image, "ff"),
            text=finish(streams.text, read.text, text, "ff_context"),
        )


class SingleBlock(nn.Module, kw_only=True):
    """Attention and a feed-forward network beside one another (Dehghani et al. 2023), over text and image in one.

    The original's `proj_out` reads heads and hidden units from one matrix; here `proj_out_attn` and `proj_out_mlp` are
    its two parts, with one bias.

    Attributes:
        num_heads: of attention.
        runtime: how the model runs.
    """

    num_heads: int
    runtime: Runtime

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l c"], cond: Float[Array, "b c"], turn: Rotation, mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b l c"]:
        runtime, width, x = self.runtime, x.shape[-1], checkpoint_name(x, BLOCK_INPUT)
        shift, scale, gate = Modulation(num_parts=3, runtime=runtime, name="norm")(cond)
        normed = constrain_tokens(runtime.layout, modulate(x, shift, scale))
        to_units = Dense(features=(MLP_RATIO * width,), names=("embed", "mlp"), runtime=runtime, name="proj_mlp")
        heads, units = SelfAttention(num_heads=self.num_heads, runtime=runtime, name="attn")(
            normed, turn, mask, to_units
        )
        units = jax.nn.gelu(checkpoint_name(units, "hidden"), approximate=True)
        units = runtime.layout.constrain(units, "activation_batch", "activation_length", "activation_mlp")
        init = uniform((1 + MLP_RATIO) * width)
        of_heads = Dense(
            features=(width,),
            names=("heads", "kv", "embed"),
            num_inputs=2,
            use_bias=False,
            kernel_init=init,
            runtime=runtime,
            name="proj_out_attn",
        )
        of_units = Dense(
            features=(width,), names=("mlp", "embed"), kernel_init=init, runtime=runtime, name="proj_out_mlp"
        )
        y = constrain_tokens(runtime.layout, added_up([of_heads, of_units], [heads, units]))
        y = checkpoint_name(y, "feed_forward")
        return constrain_tokens(runtime.layout, x + gate.astype(x.dtype) * y)
