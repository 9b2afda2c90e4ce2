"""FLUX.1 by patch pipelining: image and text in patches, with the keys and values of each block kept between steps.

Both sequences are cut into the same number of neighbouring ranges, and a patch is one range of each: PipeFusion sends
all text with the first patch, which would then take longer than the others, and all stages work at the pace of the
slowest. Ranges that do not come out even are filled with tokens that nothing reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.rope import Rotation
from maxdiffusion.models.flux import DOUBLE_BLOCKS, SINGLE_BLOCKS, FlaxFluxTransformer2DModel
from maxdiffusion.models.flux_blocks import (
    FRESH,
    KEPT,
    DoubleBlock,
    Keys,
    SingleBlock,
    Streams,
    constrain_tokens,
    join,
    part,
)
from maxdiffusion.parallel import patches as patch_pipeline
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.patches import At, Flow

Stores: TypeAlias = tuple[Keys, Keys]
"""Keys and values of the double and of the single blocks, (layers, batch, patches, tokens of a patch, heads, dim)."""

Cond: TypeAlias = Mapping[str, Any]
"""Keywords of the model's call other than `hidden_states` and `timestep`."""

Update: TypeAlias = Callable[[Any, Float[Array, "batch tokens channels"], Int[Array, ""]], Any]
"""(x of a patch and what a solver carries with it, velocity of the patch, step) -> the same for the next step."""

_STACKS = (DOUBLE_BLOCKS, SINGLE_BLOCKS)
_STORE = ("layers", "activation_batch", None, None, "activation_heads", "activation_kv")


class Cut(NamedTuple):
    """How many patches there are, and how many tokens of text and image one has."""

    patches: int
    text: int
    image: int


def cut_of(model: FlaxFluxTransformer2DModel, num_image: int, num_text: int) -> Cut:
    """The cut of sequences of this length.

    Args:
        model: with `pipeline_patches`.
        num_image: image tokens.
        num_text: text tokens.

    Raises:
        UsageError: the model has no `pipeline_patches`, or more than there are image tokens.
    """
    patches = model.runtime.pipeline.patches
    if not patches:
        raise UsageError("the model has no patches: write pipeline_patches=8, or sample without patch pipelining")
    if patches > num_image:
        raise UsageError(
            f"pipeline_patches={patches} are more than the {num_image} image tokens: write {num_image} or fewer"
        )
    equal = model.layout.divisor("activation_length")

    def of_patch(num_tokens: int) -> int:
        length = -(-num_tokens // patches)
        return length + -length % equal

    return Cut(patches, of_patch(num_text), of_patch(num_image))


def split(x: Shaped[Array, "*lead tokens _"], patches: int, length: int, axis: int = 1) -> Shaped[Array, "..."]:
    """Neighbouring tokens as patches (..., patches, length, ...), each filled with zeros.

    What is a patch depends on the number of patches alone: `length` may be more than its tokens, where the devices of
    a sequence need equal parts.

    Args:
        x: tokens along `axis`.
        patches: their number.
        length: tokens of a patch, filled.
        axis: of the tokens.
    """
    tokens = -(-x.shape[axis] // patches)

    def filled(x: Array, more: int, axis: int) -> Array:
        return jnp.pad(x, [(0, more if dim == axis else 0) for dim in range(x.ndim)])

    x = filled(x, tokens * patches - x.shape[axis], axis)
    return filled(x.reshape(*x.shape[:axis], patches, tokens, *x.shape[axis + 1 :]), length - tokens, axis + 1)


def in_front(x: Float[Array, "batch tokens _"], patches: int, length: int) -> Float[Array, "patches batch length _"]:
    """Patches as the first dimension, as a pipeline takes them; arguments as `split`."""
    return split(x, patches, length).swapaxes(0, 1)


def joined(x: Float[Array, "patches batch length _"], num_tokens: int) -> Float[Array, "batch tokens _"]:
    """The sequence that `in_front` has cut."""
    x = x.swapaxes(0, 1)[:, :, : -(-num_tokens // x.shape[0])]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]


def empty_stores(model: FlaxFluxTransformer2DModel, num_image: int, cond: Cond) -> Stores:
    """Stores of the right form that hold nothing yet; `synchronous` fills them.

    Args:
        model: with `pipeline_patches`.
        num_image: image tokens.
        cond: gives batch and text tokens.

    Raises:
        UsageError: as `cut_of`.
    """
    batch, num_text = cond["encoder_hidden_states"].shape[:2]
    cut = cut_of(model, num_image, num_text)
    heads = (model.num_attention_heads, model.attention_head_dim)

    def empty(num_layers: int) -> Keys:
        lead = patch_pipeline.rows(model.layout, num_layers), batch, cut.patches, cut.text + cut.image
        zeros = jnp.zeros((*lead, *heads), model.runtime.dtype)
        return Keys(*(model.layout.constrain(zeros, *_STORE) for _ in Keys._fields))

    return empty(model.num_layers), empty(model.num_single_layers)


def synchronous(
    model: FlaxFluxTransformer2DModel,
    params: Any,
    stores: Stores,
    x: Float[Array, "batch image channels"],
    timestep: Float[Array, " batch"],
    cond: Cond,
) -> tuple[Stores, Float[Array, "batch image channels"]]:
    """The exact velocity, and stores that hold this step's keys and values.

    The whole sequence goes through one stage after the other.

    Args:
        model: with `pipeline_patches`.
        params: of the scanned model.
        stores: what they hold does not matter.
        x: noisy image tokens.
        timestep: one for each sample.
        cond: see `Cond`.

    Raises:
        UsageError: an input does not fit.
    """
    prepared, layout = _Prepared.of(model, params, x, timestep[None], cond), model.layout
    num_image, num_text = prepared.tokens
    text = _call(model, params, cond["encoder_hidden_states"], "embed_text")
    h = join(layout, text, _call(model, params, x, "embed_image"))
    filled_text = text.shape[1]  # more than the text, where the devices of a sequence need equal parts
    shared = {
        "cond": prepared.cond,
        "turn": model.turn(cond["txt_ids"], cond["img_ids"], (x.shape[0], num_text, num_image)),
        "mask": model.mask(cond.get("encoder_attention_mask"), (x.shape[0], num_text), num_image),
    }

    def layer(block: Any, shared: Any, weights: Any, kept: Keys, h: Array, at: At) -> tuple[Array, Keys]:
        variables, reads = {"params": weights}, (shared["cond"][at.step], shared["turn"], shared["mask"])
        h, own = _applied(block, variables, h, filled_text, reads)
        both = (part(layout, tokens, filled_text) for tokens in own)
        return h, Keys(
            *(_by_patch(model, text[:, :num_text], image[:, :num_image], prepared.cut) for text, image in both)
        )

    filled = []
    for name, store, block in zip(_STACKS, stores, _blocks(model), strict=True):
        # One patch for a pipeline of one stack: the whole sequence, whose store is the stores of all patches.
        flow = Flow(
            enter=lambda shared, x, at: x,
            lanes=(functools.partial(layer, block),),
            leave=lambda shared, h, x, at: h,
        )
        whole = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:2], 1, -1, *leaf.shape[4:]), store)
        (new,), (h,) = patch_pipeline.run(flow, (params[name],), (whole,), h[None], shared, steps=1, layout=layout)
        filled.append(_stored(layout, jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), new, store)))
    image = constrain_tokens(layout, part(layout, h, filled_text)[1])
    velocity = _call(model, params, image, "velocity", prepared.cond[0])
    return (filled[0], filled[1]), velocity[:, :num_image]


def patched_steps(
    model: FlaxFluxTransformer2DModel,
    params: Any,
    stores: Stores,
    x: Any,
    timesteps: Float[Array, "steps batch"],
    cond: Cond,
    update: Update,
) -> tuple[Stores, Any]:
    """Several steps that follow one another without draining the pipeline.

    Args:
        model: with `pipeline_patches`.
        params: of the scanned model.
        stores: from `synchronous`, or an earlier call.
        x: noisy image tokens by patch, from `in_front`; or a tuple of them and arrays (patches, ...) that a solver
            carries with each patch.
        timesteps: of each step, one for each sample.
        cond: see `Cond`.
        update: the solver's step of one patch.

    Returns:
        The stores and x after the last step.

    Raises:
        UsageError: an input does not fit.
    """
    layout = model.layout
    num_image = cond["img_ids"].shape[-2]
    prepared = _Prepared.of(model, params, joined(_tokens(x), num_image), timesteps, cond)
    cut = prepared.cut
    whole_text = split(cond["encoder_hidden_states"], cut.patches, cut.text)
    embedded = _call(model, params, whole_text.reshape(prepared.batch, -1, whole_text.shape[-1]), "embed_text")
    shared = {
        "cond": prepared.cond,
        "text": in_front(embedded, cut.patches, cut.text),
        "turn": _turn(model, cond, prepared),
        "mask": _mask(model, cond, prepared),
        "outer": {name: value for name, value in params.items() if name not in _STACKS},
    }

    def enter(shared: Any, x: Any, at: At) -> Array:
        image = _call(model, shared["outer"], _tokens(x), "embed_image")
        return constrain_tokens(layout, join(layout, shared["text"][at.patch], image))

    def layer(block: Any, shared: Any, weights: Any, kept: Keys, h: Array, at: At) -> tuple[Array, Keys]:
        variables = {"params": weights, KEPT: {"attn": {"others": kept, "patch": at.patch}}}
        turn = Rotation(*(table[:, at.patch] for table in shared["turn"]))
        return _applied(block, variables, h, cut.text, (shared["cond"][at.step], turn, shared["mask"]))

    def leave(shared: Any, h: Array, x: Any, at: At) -> Any:
        image = constrain_tokens(layout, part(layout, h, cut.text)[1])
        velocity = _call(model, shared["outer"], image, "velocity", shared["cond"][at.step])
        return update(x, velocity, at.step)

    flow = Flow(enter=enter, lanes=tuple(functools.partial(layer, block) for block in _blocks(model)), leave=leave)
    weights = tuple(params[name] for name in _STACKS)
    (double, single), x = patch_pipeline.run(flow, weights, stores, x, shared, steps=timesteps.shape[0], layout=layout)
    return (_stored(layout, double), _stored(layout, single)), x


class _Prepared(NamedTuple):
    """What a call makes of its inputs: sizes, and the condition of each step (steps, batch, width)."""

    cut: Cut
    batch: int
    tokens: tuple[int, int]
    cond: Array

    @classmethod
    def of(cls, model: FlaxFluxTransformer2DModel, params: Any, x: Array, timesteps: Array, cond: Cond) -> _Prepared:
        text, pooled = cond["encoder_hidden_states"], cond["pooled_projections"]
        model.check_tokens(x, text, pooled, cond.get("encoder_attention_mask"))

        def condition(timestep: Array) -> Array:
            return model.apply({"params": params}, timestep, cond.get("guidance"), pooled, method="condition")  # type: ignore[return-value]

        return cls(
            cut=cut_of(model, x.shape[1], text.shape[1]),
            batch=x.shape[0],
            tokens=(x.shape[1], text.shape[1]),
            cond=jax.lax.map(condition, timesteps),
        )


def _tokens(x: Any) -> Array:
    return x[0] if isinstance(x, tuple) else x


def _call(model: FlaxFluxTransformer2DModel, params: Any, x: Array, method: str, *more: Array) -> Array:
    """A part of the model outside its stacks."""
    return model.apply({"params": params}, x, *more, method=method)  # type: ignore[return-value]


def _blocks(model: FlaxFluxTransformer2DModel) -> tuple[DoubleBlock, SingleBlock]:
    attributes: dict[str, Any] = {"num_heads": model.num_attention_heads, "runtime": model.runtime, "parent": None}
    return DoubleBlock(**attributes), SingleBlock(**attributes)


def _applied(block: Any, variables: Any, h: Array, num_text: int, reads: tuple[Any, ...]) -> tuple[Array, Keys]:
    """`h`, text and image in one, after a block of either kind; and its own keys and values."""
    layout = block.runtime.layout
    if isinstance(block, SingleBlock):
        h, out = block.apply(variables, h, *reads, mutable=[FRESH])
    else:
        text, image = part(layout, h, num_text)
        streams = Streams(image=constrain_tokens(layout, image), text=constrain_tokens(layout, text))
        streams, out = block.apply(variables, streams, *reads, mutable=[FRESH])
        h = join(layout, streams.text, streams.image)
    own: Any = out[FRESH]["attn"]["own"]
    return constrain_tokens(layout, h), own


def _by_patch(model: FlaxFluxTransformer2DModel, text: Array, image: Array, cut: Cut) -> Array:
    """(batch, patches, tokens of a patch, ...) of what there is for each token of text and image; each is a `join`."""
    parts = split(text, cut.patches, cut.text), split(image, cut.patches, cut.image)
    flat = join(model.layout, *(x.reshape(-1, *x.shape[2:]) for x in parts))
    return flat.reshape(*parts[0].shape[:2], *flat.shape[1:])


def _turn(model: FlaxFluxTransformer2DModel, cond: Cond, prepared: _Prepared) -> Rotation:
    """The rotation of each patch, (batch or 1, patches, tokens of a patch, pairs)."""
    cut = prepared.cut
    num_text, num_image = cut.patches * cut.text, cut.patches * cut.image

    def filled(ids: Array, length: int) -> Array:
        parts = split(ids, cut.patches, length, ids.ndim - 2)
        return parts.reshape(*ids.shape[:-2], cut.patches * length, ids.shape[-1])

    turn = model.turn(
        filled(cond["txt_ids"], cut.text), filled(cond["img_ids"], cut.image), (prepared.batch, num_text, num_image)
    )
    return Rotation(*(_by_patch(model, *part(model.layout, table, num_text), cut) for table in turn))


def _mask(model: FlaxFluxTransformer2DModel, cond: Cond, prepared: _Prepared) -> Bool[Array, "batch keys"] | None:
    """The mask of keys in the order of the stores; None where every one is a token to read."""
    cut, (num_image, num_text), mask = prepared.cut, prepared.tokens, cond.get("encoder_attention_mask")
    if mask is None and (cut.text * cut.patches, cut.image * cut.patches) == (num_text, num_image):
        return None
    text = jnp.ones((prepared.batch, num_text), bool) if mask is None else mask
    keys = _by_patch(model, text, jnp.ones((prepared.batch, num_image), bool), cut).reshape(prepared.batch, -1)
    return model.layout.constrain(keys, "activation_batch", "activation_kv_length")


def _stored(layout: Layout, store: Keys) -> Keys:
    return Keys(*(layout.constrain(leaf, *_STORE) for leaf in store))
