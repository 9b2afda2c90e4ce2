"""The UNet of Stable Diffusion 1.x, 2.x and XL: noisy latents, a time and a text to a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Num

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.halo import padded_rows
from maxdiffusion.models.unet_blocks import DownLevel, MidLevel, UpLevel, constrain_picture
from maxdiffusion.models.unet_config import UNetKeywords, keywords_of
from maxdiffusion.nn.activations import activation
from maxdiffusion.nn.conv import Conv
from maxdiffusion.nn.linear import Dense, Embed
from maxdiffusion.nn.model import EXECUTION, DiffusionModel, at_border
from maxdiffusion.nn.norms import GroupNorm
from maxdiffusion.nn.timestep import TimestepEmbedding, sinusoids
from maxdiffusion.parallel.layout import Layout

Times: TypeAlias = Num[Array, "batch"] | Num[Array, ""] | int | float


@struct.dataclass
class UNet2DConditionOutput:
    """What the UNet returns.

    Attributes:
        sample: (batch, out_channels, height, width) in the model's dtype.
    """

    sample: Array


class FlaxUNet2DConditionModel(UNetKeywords, DiffusionModel, kw_only=True):
    """The conditional UNet (Rombach et al. 2022; Podell et al. 2023), by the keywords of diffusers' `config.json`.

    With no keywords that describe the network it is the UNet of Stable Diffusion 1.5 (859,520,964 parameters).
    Execution keywords (`mesh`, `attention_kernel`, `dtype`, ...) are those of `DiffusionModel`, the others those of
    `UNetKeywords`.

        model = FlaxUNet2DConditionModel(mesh=mesh, attention_kernel="flash")
        params = model.init_weights(jax.random.key(0))
        noise = model.apply({"params": params}, latents, timesteps, text_states).sample
    """

    keeps_precision = (
        "(.*/)?(conv_in|conv_out)",
        "(.*/)?(time|add|class)_embedding/.*",
    )
    modulations = ("(.*/)?time_emb_proj",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> Self:
        """The model that a `config.json` of diffusers describes.

        Args:
            config: the file's dict.
            overrides: constructor keywords, of the network or of its execution, that come first.

        Raises:
            UsageError: an unknown key, with the nearest known one, or a value that is not supported.
        """
        return cls(**keywords_of({**config, **overrides}, EXECUTION))

    def validate(self) -> None:
        """Checks the keywords that describe the network.

        Raises:
            UsageError: with the keyword's name and what would work.
        """
        self.check_keywords()

    def dummy_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the smallest call that makes every parameter, as `jax.ShapeDtypeStruct`s."""
        side = 2 ** (self.num_levels - 1)
        return self.call_shapes(1, height=side, width=side, text=1)

    def call_shapes(self, batch: int, *, height: int, width: int, text: int) -> dict[str, Any]:
        """Keyword arguments of a call on latents of this size, as `jax.ShapeDtypeStruct`s."""

        def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *shape), dtype)

        inputs: dict[str, Any] = {"sample": array(self.in_channels, height, width), "timesteps": array()}
        if self.reads_text:
            inputs["encoder_hidden_states"] = array(text, self.text_width)
        class_shapes = {"identity": (self.time_width,), "timestep": ()}
        if self.class_embed_type is not None:
            inputs["class_labels"] = array(
                *class_shapes.get(self.class_embed_type, (self.projection_class_embeddings_input_dim or 0,))
            )
        elif self.num_class_embeds is not None:
            inputs["class_labels"] = array(dtype=jnp.int32)
        if self.addition_embed_type == "text_time":
            assert self.projection_class_embeddings_input_dim is not None and self.addition_time_embed_dim is not None
            inputs["added_cond_kwargs"] = {
                "text_embeds": array(self.projection_class_embeddings_input_dim - self.addition_time_embed_dim),
                "time_ids": array(1),
            }
        return inputs

    def usual_inputs(self, layout: Layout | None = None) -> dict[str, Any]:
        """The same for latents of `sample_size` (64 without one), their rows as a layout pads them, and 77 words."""
        side = self.sample_size or 64
        height, width = (side, side) if isinstance(side, int) else side
        height = padded_rows(height, self.num_levels, layout or self.layout)
        return self.call_shapes(1, height=height, width=width, text=77)

    @at_border
    @nn.compact
    def __call__(
        self,
        sample: Float[Array, "batch in_channels height width"],
        timesteps: Times,
        encoder_hidden_states: Float[Array, "batch keys text_width"] | None = None,
        *,
        class_labels: Num[Array, "batch *width"] | None = None,
        added_cond_kwargs: Mapping[str, Array] | None = None,
        encoder_attention_mask: Bool[Array, "batch keys"] | None = None,
    ) -> UNet2DConditionOutput:
        """The prediction for noisy latents.

        Args:
            sample: noisy latents; any height and width.
            timesteps: one time for all, or one an example; integers or floats.
            encoder_hidden_states: states of the text; only a model without attention does without.
            class_labels: classes, for a model with class embeddings: whole numbers (a table), times (`timestep`) or
                vectors.
            added_cond_kwargs: `text_embeds` (batch, width) and `time_ids` (batch, numbers), for a model with
                `addition_embed_type="text_time"`.
            encoder_attention_mask: True for the text tokens to read.

        Raises:
            UsageError: an input that the model needs is missing, has the wrong size, or is of no use to it.
        """
        if sample.ndim != 4 or sample.shape[1] != self.in_channels or 0 in sample.shape:
            raise UsageError(
                f"sample has shape {sample.shape}, but this model takes (batch, {self.in_channels}, height, width), "
                "each 1 or more"
            )
        height = sample.shape[2]
        padded = padded_rows(height, self.num_levels, self.layout)
        x = self._constrain_latents(jnp.pad(self.layout.enter(sample), ((0, 0), (0, 0), (0, padded - height), (0, 0))))
        text = self._text(encoder_hidden_states, sample.shape[0])
        mask = self._mask(encoder_attention_mask, text)
        time = self._time(sample.shape[0], timesteps, class_labels, added_cond_kwargs)
        filled = height if padded > height else None
        out = self._constrain_latents(self._levels(x, time, text, mask, filled))
        return UNet2DConditionOutput(sample=out[:, :, :height])

    def _constrain_latents(self, x: Array) -> Array:
        return self.layout.constrain(
            x, "activation_batch", "activation_channels", "activation_height", "activation_width"
        )

    def _levels(self, x: Array, time: Array, text: Array | None, mask: Array | None, filled: int | None) -> Array:
        """Down, through the middle and up again; channels second outside, last inside; `filled` rows no padding."""
        runtime, layout, last = self.runtime, self.layout, self.num_levels - 1
        rows = [filled and -(-filled // 2**level) for level in range(self.num_levels)]
        x = jnp.transpose(x, (0, 2, 3, 1)).astype(runtime.dtype)
        if self.center_input_sample:
            x = 2 * x - 1
        channels, size = self.block_out_channels[0], self.conv_in_kernel
        x = Conv(features=channels, size=size, filled=filled, runtime=runtime, name="conv_in")(x)
        x = constrain_picture(layout, x)
        skips = [x]
        for index, config in enumerate(self.down_levels()):
            level = DownLevel(config=config, filled=(rows[index], None), runtime=runtime, name=f"down_blocks_{index}")
            x, new = level(x, time, text, mask)
            skips += new
        if self.mid_level().num_resnets:
            level = MidLevel(config=self.mid_level(), filled=(rows[last], None), runtime=runtime, name="mid_block")
            x = level(x, time, text, mask)
        for index, config in enumerate(self.up_levels()):
            of_level = (rows[last - index], rows[max(last - index - 1, 0)])
            level = UpLevel(config=config, filled=of_level, runtime=runtime, name=f"up_blocks_{index}")
            x, skips = level(x, skips, time, text, mask)
        norm = GroupNorm(
            num_groups=self.norm_num_groups,
            epsilon=self.norm_eps,
            filled=filled,
            runtime=runtime,
            name="conv_norm_out",
        )
        x = activation(self.act_fn)(norm(x))
        size = self.conv_out_kernel
        x = Conv(features=self.out_channels, size=size, filled=filled, runtime=runtime, name="conv_out")(x)
        return jnp.transpose(x, (0, 3, 1, 2))

    def _mask(self, mask: Array | None, text: Array | None) -> Array | None:
        """The mask of text tokens laid out."""
        if mask is None:
            return None
        if text is None or mask.shape != text.shape[:2]:
            takes = "no text" if text is None else f"a mask of shape {text.shape[:2]}, as encoder_hidden_states"
            raise UsageError(f"encoder_attention_mask has shape {mask.shape}, but this call takes {takes}")
        if mask.dtype != jnp.bool_:
            raise UsageError(f"encoder_attention_mask has dtype {mask.dtype}: give booleans, True for tokens to read")
        return self.layout.constrain(mask, "activation_batch", "activation_kv_length")

    def _text(self, states: Array | None, batch: int) -> Array | None:
        """The text states laid out and cast, None for a model that reads none."""
        if not self.reads_text:
            return None
        wanted = f"(batch {batch}, tokens, {self.text_width}), 1 token or more"
        if states is None:
            raise UsageError(f"encoder_hidden_states is missing: give the text states, of shape {wanted}")
        if states.ndim != 3 or states.shape[0] != batch or states.shape[2] != self.text_width or not states.shape[1]:
            raise UsageError(f"encoder_hidden_states has shape {states.shape}, but this model takes {wanted}")
        states = self.layout.constrain(states, "activation_batch", "activation_kv_length", "activation_embed")
        return states.astype(self.runtime.dtype)

    def _time(
        self,
        batch: int,
        timesteps: Times,
        class_labels: Array | None,
        added: Mapping[str, Array] | None,
    ) -> Float[Array, "batch time_width"]:
        """The time embedding, with what the other conditions add to it."""
        times = jnp.asarray(timesteps)
        if times.shape not in ((), (batch,)):
            raise UsageError(f"timesteps has shape {times.shape}: give one time, or one for each of {batch} examples")
        times = self.layout.constrain(jnp.broadcast_to(times, (batch,)), "activation_batch")
        time = self._embedding("time_embedding")(self._sinusoids(times, self.block_out_channels[0]))
        for term in (self._class_embedding(class_labels), self._added_embedding(added)):
            if term is not None:
                time = time + term
        return time

    def _sinusoids(self, values: Array, features: int) -> Array:
        return sinusoids(values, features, flip_sin_to_cos=self.flip_sin_to_cos, freq_shift=self.freq_shift)

    def _embedding(self, name: str) -> TimestepEmbedding:
        return TimestepEmbedding(features=self.time_width, act_fn=self.act_fn, runtime=self.runtime, name=name)

    def _class_embedding(self, labels: Array | None) -> Array | None:
        kind = self.class_embed_type
        if kind is None and self.num_class_embeds is None:
            if labels is not None:
                raise UsageError("class_labels is of no use: this model has no class embedding; leave it out")
            return None
        if labels is None:
            raise UsageError("class_labels is missing: this model has a class embedding")
        if kind is None:
            assert self.num_class_embeds is not None
            labels = self.layout.constrain(labels, "activation_batch")
            term = Embed(
                num_embeddings=self.num_class_embeds,
                features=self.time_width,
                runtime=self.runtime,
                name="class_embedding",
            )(labels)
            return self.layout.constrain(term, "activation_batch", "activation_embed")
        if kind == "timestep":
            labels = self._sinusoids(labels, self.block_out_channels[0])
        labels = self.layout.constrain(labels, "activation_batch", "activation_embed").astype(self.runtime.dtype)
        if kind == "identity":
            return labels
        if kind == "simple_projection":
            dense = Dense(
                features=(self.time_width,), names=("mlp", "embed"), runtime=self.runtime, name="class_embedding"
            )
            return self.layout.constrain(dense(labels), "activation_batch", "activation_embed")
        return self._embedding("class_embedding")(labels)

    def _added_embedding(self, added: Mapping[str, Array] | None) -> Array | None:
        if self.addition_embed_type is None:
            if added:
                raise UsageError(
                    f"added_cond_kwargs ({', '.join(sorted(added))}) is of no use: this model has no "
                    "addition_embed_type; leave it out"
                )
            return None
        assert self.addition_time_embed_dim is not None and self.projection_class_embeddings_input_dim is not None
        missing = [name for name in ("text_embeds", "time_ids") if name not in (added or {})]
        if added is None or missing:
            raise UsageError(
                f"added_cond_kwargs lacks {' and '.join(missing)}: addition_embed_type='text_time' needs both "
                "text_embeds and time_ids"
            )
        ids, pooled = added["time_ids"], added["text_embeds"]
        width = pooled.shape[-1] + ids.shape[-1] * self.addition_time_embed_dim
        if width != self.projection_class_embeddings_input_dim:
            raise UsageError(
                f"text_embeds of width {pooled.shape[-1]} and {ids.shape[-1]} time_ids of width "
                f"{self.addition_time_embed_dim} make {width}, but this model takes "
                f"{self.projection_class_embeddings_input_dim}"
            )
        times = self._sinusoids(ids, self.addition_time_embed_dim).reshape(ids.shape[0], -1)
        joined = jnp.concatenate([pooled.astype(jnp.float32), times], axis=-1)
        joined = self.layout.constrain(joined, "activation_batch", "activation_embed")
        return self._embedding("add_embedding")(joined)
