"""The transformer of FLUX.1: noisy image tokens, a time and a text to a velocity (MMDiT, Esser et al. 2024)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Num

from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.kernels.rope import Rotation, rotation
from maxdiffusion.models.flux_blocks import (
    DoubleBlock,
    SingleBlock,
    Streams,
    TimeTextEmbedding,
    constrain_tokens,
    join,
    part,
)
from maxdiffusion.models.spec import ModelSpec
from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.model import DiffusionModel, at_border
from maxdiffusion.nn.modulation import Modulation, modulate
from maxdiffusion.nn.stack import apply_stack
from maxdiffusion.parallel.layout import Layout

DOUBLE_BLOCKS, SINGLE_BLOCKS = "transformer_blocks", "single_transformer_blocks"
"""Names of the two stacks of equal blocks, the ones that `scan_layers` scans."""

_SIZES = (
    "patch_size",
    "in_channels",
    "num_layers",
    "num_single_layers",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "pooled_projection_dim",
)


@struct.dataclass
class Transformer2DModelOutput:
    """What the transformer returns.

    Attributes:
        sample: (batch, image tokens, patch_size ** 2 * out_channels) in the model's dtype.
    """

    sample: Array


class FlaxFluxTransformer2DModel(DiffusionModel, kw_only=True):
    """The transformer of FLUX.1 (Black Forest Labs 2024), by the keywords of diffusers' `config.json`.

    With no keywords that describe the network it is that of FLUX.1 [schnell] (11,891,178,560 parameters); with
    `guidance_embeds=True` that of FLUX.1 [dev] (11,901,408,320). Execution keywords (`mesh`, `attention_kernel`,
    `dtype`, ...) are those of `DiffusionModel`.

        model = FlaxFluxTransformer2DModel(mesh=mesh, dtype="bfloat16", scan_layers=True)
        params = model.init_weights(jax.random.key(0))
        velocity = model.apply({"params": params}, latents, text, pooled, 0.5, img_ids, txt_ids).sample

    Attributes:
        patch_size: the result has `patch_size ** 2 * out_channels` channels a token (the published models fold
            patches before the network and have 1).
        in_channels: of an image token.
        out_channels: of the result; None for `in_channels`.
        num_layers: double blocks, with a stream for the image and one for the text.
        num_single_layers: single blocks, after them, over both in one stream.
        attention_head_dim: width of an attention head.
        num_attention_heads: number of heads; the streams are as wide as all heads together.
        joint_attention_dim: width of the text states.
        pooled_projection_dim: width of the pooled text.
        guidance_embeds: the model knows its guidance scale, by distillation.
        axes_dims_rope: channels of a head that each axis of the position ids turns; together a head.
    """

    takes_patches = True
    keeps_precision = (
        "(.*/)?(x_embedder|context_embedder|proj_out)",
        "(.*/)?time_text_embed/.*",
    )
    modulations = ("(.*/)?norm[^/]*/linear",)

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: Sequence[int] = (16, 56, 56)

    @property
    def width(self) -> int:
        """Width of the token streams."""
        return self.num_attention_heads * self.attention_head_dim

    def validate(self) -> None:
        """Checks the keywords that describe the network.

        Raises:
            UsageError: with the keyword's name and what would work.

        Warns:
            MaxDiffusionWarning: in float16, whose range the activations of the published weights leave.
        """
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes |= {} if self.out_channels is None else {"out_channels": self.out_channels}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"{name}={size!r}: write a whole number, 1 or more")
        dims = tuple(self.axes_dims_rope)
        if sum(dims) != self.attention_head_dim or any(dim < 2 or dim % 2 for dim in dims):
            raise UsageError(
                f"axes_dims_rope={dims} must be even numbers that add up to attention_head_dim="
                f"{self.attention_head_dim}, but add up to {sum(dims)}"
            )
        if self.runtime.dtype == jnp.float16:
            text = "FLUX.1 in float16 can overflow to nan: the weights were released in bfloat16, write dtype=bfloat16"
            warnings.warn(text, MaxDiffusionWarning, stacklevel=2)

    def dummy_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the smallest call that makes every parameter, as `jax.ShapeDtypeStruct`s."""
        return self.call_shapes(1, height=2, width=2, text=1)

    def call_shapes(self, batch: int, *, height: int, width: int, text: int) -> dict[str, Any]:
        """Keyword arguments of a call on latents of this size, 2 x 2 of which are a token."""
        image = height // 2 * (width // 2)

        def array(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

        inputs = {
            "hidden_states": array(image, self.in_channels),
            "encoder_hidden_states": array(text, self.joint_attention_dim),
            "pooled_projections": array(self.pooled_projection_dim),
            "timestep": array(),
            "img_ids": array(image, len(self.axes_dims_rope)),
            "txt_ids": array(text, len(self.axes_dims_rope)),
        }
        return inputs | ({"guidance": array()} if self.guidance_embeds else {})

    def usual_inputs(self, layout: Layout | None = None) -> dict[str, Any]:
        """The same for a picture of 1024 x 1024 pixels (64 x 64 tokens) and 512 words."""
        return self.call_shapes(1, height=128, width=128, text=512)

    def setup(self) -> None:
        def embedder(reads: str) -> Dense:
            return Dense(features=(self.width,), names=(reads, "mlp"), runtime=self.runtime)

        self.x_embedder, self.context_embedder = embedder("conv_in"), embedder("cross_embed")
        self.time_text_embed = TimeTextEmbedding(features=self.width, runtime=self.runtime)
        self.norm_out = Modulation(num_parts=2, runtime=self.runtime)
        features = (self.patch_size**2 * (self.out_channels or self.in_channels),)
        self.proj_out = Dense(features=features, names=("embed", "conv_out"), runtime=self.runtime)

    @at_border
    @nn.compact
    def __call__(
        self,
        hidden_states: Float[Array, "batch image in_channels"],
        encoder_hidden_states: Float[Array, "batch text joint_attention_dim"],
        pooled_projections: Float[Array, "batch pooled_projection_dim"],
        timestep: Num[Array, "*batch"] | float,
        img_ids: Num[Array, "*batch image axes"],
        txt_ids: Num[Array, "*batch text axes"],
        guidance: Num[Array, "*batch"] | float | None = None,
        *,
        encoder_attention_mask: Bool[Array, "batch text"] | None = None,
    ) -> Transformer2DModelOutput:
        """The velocity for noisy image tokens.

        Args:
            hidden_states: noisy image tokens; any number of them, in the order of `img_ids`.
            encoder_hidden_states: states of the text.
            pooled_projections: one vector for the whole text.
            timestep: from 0 (data) to 1 (noise); one for all, or one an example.
            img_ids: position of each image token along each axis of `axes_dims_rope`, the same for all examples or
                one set an example.
            txt_ids: position of each text token; zeros in the published models.
            guidance: scale, one for all or one an example; for a model with `guidance_embeds` only.
            encoder_attention_mask: True for the text tokens that may be read. The published models were trained
                without one and read their padding.

        Raises:
            UsageError: an input has the wrong shape, is missing, or is of no use to this model.
        """
        self.check_tokens(hidden_states, encoder_hidden_states, pooled_projections, encoder_attention_mask)
        runtime, layout = self.runtime, self.layout
        (batch, num_image), num_text = hidden_states.shape[:2], encoder_hidden_states.shape[1]
        cond = self.condition(timestep, guidance, pooled_projections)
        turn = self.turn(txt_ids, img_ids, (batch, num_text, num_image))
        mask = self.mask(encoder_attention_mask, (batch, num_text), num_image)
        streams = Streams(image=self.embed_image(hidden_states), text=self.embed_text(encoder_hidden_states))
        attributes = {"num_heads": self.num_attention_heads, "runtime": runtime}
        streams = apply_stack(
            DoubleBlock,
            streams,
            cond,
            turn,
            mask,
            num_layers=self.num_layers,
            name=DOUBLE_BLOCKS,
            runtime=runtime,
            attributes=attributes,
        )
        x = constrain_tokens(layout, join(layout, streams.text, streams.image))
        x = apply_stack(
            SingleBlock,
            x,
            cond,
            turn,
            mask,
            num_layers=self.num_single_layers,
            name=SINGLE_BLOCKS,
            runtime=runtime,
            attributes=attributes,
        )
        x = constrain_tokens(layout, part(layout, x, streams.text.shape[1])[1])
        return Transformer2DModelOutput(sample=self.velocity(x, cond)[:, :num_image])

    def embed_image(self, x: Float[Array, "batch image in_channels"]) -> Float[Array, "batch image width"]:
        """Image tokens as the blocks read them, filled up where the devices of a sequence need equal parts."""
        return self._embed(self.x_embedder, x)

    def embed_text(self, x: Float[Array, "batch text joint_attention_dim"]) -> Float[Array, "batch text width"]:
        """Text tokens as the blocks read them, filled up likewise."""
        return self._embed(self.context_embedder, x)

    def _embed(self, embedder: Dense, x: Array) -> Array:
        x = constrain_tokens(self.layout, self._even(x)).astype(self.runtime.dtype)
        return constrain_tokens(self.layout, embedder(x))

    def velocity(
        self, x: Float[Array, "batch image width"], cond: Float[Array, "batch width"]
    ) -> Float[Array, "batch image channels"]:
        """What the image tokens stand for after the blocks."""
        scale, shift = self.norm_out(cond)
        return constrain_tokens(self.layout, self.proj_out(modulate(x, shift, scale)))

    @nn.nowrap
    def _even(self, x: Array) -> Array:
        """(batch, tokens, ...) with tokens added for equal parts on the devices that share a sequence."""
        more = -x.shape[1] % self.layout.divisor("activation_length")
        return jnp.pad(x, [(0, more if dim == 1 else 0) for dim in range(x.ndim)]) if more else x

    @nn.nowrap
    def check_tokens(self, image: Array, text: Array, pooled: Array, mask: Array | None) -> None:
        """Refuses inputs that do not fit the model or one another.

        Raises:
            UsageError: with the shape that this model takes.
        """
        _check("hidden_states", image, (None, None, self.in_channels), "batch, image tokens, in_channels")
        batch, num_text = image.shape[0], None if text.ndim < 2 else text.shape[1]
        _check(
            "encoder_hidden_states", text, (batch, None, self.joint_attention_dim), "batch, tokens, joint_attention_dim"
        )
        _check("pooled_projections", pooled, (batch, self.pooled_projection_dim), "batch, pooled_projection_dim")
        if mask is not None:
            _check("encoder_attention_mask", mask, (batch, num_text), "batch, text tokens")
            if mask.dtype != jnp.bool_:
                raise UsageError(
                    f"encoder_attention_mask has dtype {mask.dtype}: give booleans, True for tokens to read"
                )

    def condition(
        self, timestep: Num[Array, "*batch"] | float, guidance: Num[Array, "*batch"] | float | None, pooled: Array
    ) -> Float[Array, "batch width"]:
        """What modulates every block.

        Raises:
            UsageError: a scalar has the wrong shape, or guidance is missing or of no use.
        """
        if self.guidance_embeds and guidance is None:
            raise UsageError("guidance is missing: this model has guidance_embeds; give a scale such as 3.5")
        if guidance is not None and not self.guidance_embeds:
            raise UsageError("guidance is of no use: this model has no guidance_embeds; leave it out")
        layout, batch = self.layout, pooled.shape[0]

        def each(value: Num[Array, "*batch"] | float, name: str) -> Array:
            array = jnp.asarray(value)
            if array.shape not in ((), (batch,)):
                raise UsageError(
                    f"{name} has shape {array.shape}: give one number, or one for each of {batch} examples"
                )
            return layout.constrain(jnp.broadcast_to(array, (batch,)), "activation_batch")

        return self.time_text_embed(
            each(timestep, "timestep"),
            None if guidance is None else each(guidance, "guidance"),
            layout.constrain(pooled, "activation_batch", "activation_embed"),
        )

    @nn.nowrap
    def turn(self, txt_ids: Array, img_ids: Array, sizes: tuple[int, int, int]) -> Rotation:
        """The rotation of text and image tokens, in the order of `join`."""
        batch, num_text, num_image = sizes
        both = []
        for name, ids, tokens in (("txt_ids", txt_ids, num_text), ("img_ids", img_ids, num_image)):
            lead = (batch,) if ids.ndim == 3 else ()
            axes = len(self.axes_dims_rope)
            _check(name, ids, (*lead, tokens, axes), f"{'batch, ' if lead else ''}tokens, axes")
            both.append(self._even(ids.astype(jnp.float32).reshape(-1, tokens, axes)))
        rows = max(ids.shape[0] for ids in both)
        ids = join(self.layout, *(jnp.broadcast_to(ids, (rows, *ids.shape[1:])) for ids in both))
        names = (None if rows < batch else "activation_batch", "activation_length", None)
        turn = rotation(self.layout.constrain(ids, *names), self.axes_dims_rope)
        return Rotation(*(self.layout.constrain(table, *names) for table in turn))

    @nn.nowrap
    def mask(
        self, mask: Array | None, text: tuple[int, int], num_image: int
    ) -> Bool[Array, "batch text_and_image"] | None:
        """The mask of all tokens: those of the image are never hidden, those that only fill up always are."""
        seen = [jnp.ones(text, bool) if mask is None else mask, jnp.ones((text[0], num_image), bool)]
        even = [self._even(part) for part in seen]
        if mask is None and [part.shape for part in even] == [part.shape for part in seen]:
            return None
        return self.layout.constrain(join(self.layout, *even), "activation_batch", "activation_kv_length")


def _check(name: str, array: Array, wanted: tuple[int | None, ...], meaning: str) -> None:
    """Refuses an array of another shape; None stands for any size but 0.

    Raises:
        UsageError: with the shape that this model takes.
    """
    fits = array.ndim == len(wanted) and all(size in (None, got) for size, got in zip(wanted, array.shape, strict=True))
    if not fits or 0 in array.shape:
        takes = ", ".join("1 or more" if size is None else str(size) for size in wanted)
        raise UsageError(f"{name} has shape {tuple(array.shape)}, but this call takes ({takes}): {meaning}")


_TINY: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (2, 2, 4),
}

FLUX_DEV = ModelSpec(
    name="flux-dev",
    family="flux",
    license="FLUX.1 [dev] Non-Commercial License",
    denoiser=FlaxFluxTransformer2DModel,
    depths=("num_layers", "num_single_layers"),
    config={"guidance_embeds": True},
    tiny={**_TINY, "guidance_embeds": True},
)

FLUX_SCHNELL = ModelSpec(
    name="flux-schnell",
    family="flux",
    license="Apache-2.0",
    denoiser=FlaxFluxTransformer2DModel,
    depths=("num_layers", "num_single_layers"),
    config={"guidance_embeds": False},
    tiny=_TINY,
)
