"""What each strategy has to move in one training step, by its textbook formula: from sizes alone, nothing compiled.

A step is one forward and one backward pass. Bytes are counted as in `tools.traffic`: those of the whole array that a
group of devices holds together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan, plan_context
from maxdiffusion.models.flux import DOUBLE_BLOCKS, SINGLE_BLOCKS, FlaxFluxTransformer2DModel
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel import pipeline
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.report import path_name

SUMS = ("reduce-scatter", "all-reduce")
"""Collectives that sum what devices hold; a compiler without the first one uses the second."""

_CONDITION = ("time_text_embed", "norm", "norm1", "norm1_context", "norm_out")
"""Modules of FLUX.1 that read the time and the pooled text of a sample, not its tokens."""

_BLOCKS = ("transformer_blocks", "single_transformer_blocks", "blocks", "resnets")
"""Names, before their number, of the blocks that `nn.stack.remat` is given; stacked ones are known by their axis."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One thing that a strategy moves.

    Attributes:
        what: in words, such as `gradients`.
        kinds: collectives that may do it, the textbook's first.
        axes: mesh axes along which it moves, in the order of the mesh.
        bytes: of the array that one such collective moves.
        count: how often in one step.
        part_of: bytes of the array of whose sum this is the second half, as one device of those that share the first
            half has it; 0 where it is no such half. One sum along the axes of both halves does the work of both.
    """

    what: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: int
    count: int
    part_of: int = 0


class NoFormulaError(UsageError):
    """There is no formula for this model on this mesh; what it moves can be measured all the same."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What the formulas need to know of one parameter.

    Attributes:
        bytes: that a device uses, of one layer where layers are stacked: the whole, or its part where tensors cut it.
        layers: that a device has of it, 1 where nothing is stacked.
        again: whether it belongs to a block, which gathers it again in the backward pass.
        gathered: mesh axes that only store it.
        of_tokens: whether tokens meet it, so that devices with parts of a sequence have parts of its gradient.
    """

    bytes: int
    layers: int
    again: bool
    gathered: tuple[str, ...]
    of_tokens: bool


def data_parallel(
    parameters: Iterable[Parameter], axes: tuple[str, ...], what: str = "gradients"
) -> Iterator[Exchange]:
    """Each gradient summed once over the devices that share the batch: `P` bytes (Li et al. 2020, PyTorch DDP).

    Args:
        parameters: those that every device uses whole.
        axes: mesh axes that share the batch, or its sequences.
        what: in words.
    """
    for one in parameters:
        yield Exchange(what=what, kinds=("all-reduce",), axes=axes, bytes=one.bytes, count=one.layers)


def fully_sharded(parameters: Iterable[Parameter], axes: tuple[str, ...], layout: Layout) -> Iterator[Exchange]:
    """Each parameter gathered before its use, forward and backward, each gradient reduced and scattered: `2 P` and `P`
    bytes (Rajbhandari et al. 2020, ZeRO stage 3; Zhao et al. 2023, FSDP: what lies outside the blocks is kept from the
    forward to the backward pass). Replicas, if there are any, then sum their parts: `P / n` bytes.

    Args:
        parameters: those that are stored in parts.
        axes: mesh axes that share the batch.
        layout: sizes of the mesh axes.
    """
    for one in parameters:
        times = one.layers * (2 if one.again else 1)
        yield Exchange(what="parameters", kinds=("all-gather",), axes=one.gathered, bytes=one.bytes, count=times)
        yield Exchange(what="gradients", kinds=SUMS, axes=one.gathered, bytes=one.bytes, count=one.layers)
        rest = tuple(axis for axis in axes if axis not in one.gathered)
        part = one.bytes // layout.size(one.gathered)
        if rest:
            yield Exchange(
                what="replicas", kinds=("all-reduce",), axes=rest, bytes=part, count=one.layers, part_of=one.bytes
            )


def ring(plan: Plan, key_bytes: int) -> Iterator[Exchange]:
    """Of one attention: keys and values go `n - 1` steps forward and again backward, where their gradients go `n`
    steps, home again (Liu et al. 2023): `2 (n - 1) + 2 (n - 1) + 2 n` permutes of a device's part.

    Args:
        plan: devices of the ring.
        key_bytes: of a device's part of the keys.
    """
    n = plan.ring
    for what, count in (("keys and values", 4 * (n - 1)), ("gradients of keys and values", 2 * n)):
        yield Exchange(what=what, kinds=("collective-permute",), axes=plan.axes, bytes=key_bytes, count=count)


def ulysses(plan: Plan, query_bytes: int) -> Iterator[Exchange]:
    """Of one attention: queries, keys, values and the output swap tokens for heads, forward and backward (Jacobs et al.
    2023): 8 all-to-alls of a device's part.

    Args:
        plan: devices that swap.
        query_bytes: of a device's part of the queries.
    """
    yield Exchange(what="tokens for heads", kinds=("all-to-all",), axes=plan.axes, bytes=query_bytes, count=8)


def tensor_parallel(axes: tuple[str, ...], regions: Sequence[int]) -> Iterator[Exchange]:
    """Of each region between a product that cuts heads or hidden units and the one that sums over them: the result
    summed forward, the gradient of the input backward (Shoeybi et al. 2019, section 3): two all-reduces of the tokens.

    A transformer block has two regions, attention and feed-forward; one that runs them beside one another has one
    (Chowdhery et al. 2022, section 2).

    Args:
        axes: mesh axes that cut them.
        regions: bytes of the tokens of each region on a device.
    """
    for tokens in regions:
        yield Exchange(what="tokens", kinds=("all-reduce",), axes=axes, bytes=tokens, count=2)


def pipelined(plan: pipeline.Plan, carry: Sequence[int]) -> Iterator[Exchange]:
    """Of one stack: what the layers hand on, one microbatch of it a tick and direction (Huang et al. 2019; Narayanan et
    al. 2021); once a call the result from the last stage, and the gradient of the input to the first.

    Args:
        plan: ticks, microbatches.
        carry: bytes of each array that the layers hand on, of all samples of a device.
    """
    for whole in carry:
        part, moves = whole * plan.samples // plan.batch, 2 * plan.ticks
        yield Exchange(what="microbatches", kinds=("collective-permute",), axes=plan.axes, bytes=part, count=moves)
        yield Exchange(what="ends of the pipeline", kinds=("all-reduce",), axes=plan.axes, bytes=whole, count=2)


def budget(model: DiffusionModel, *, batch: int, height: int, width: int, text: int) -> tuple[Exchange, ...]:
    """What one training step of a model has to move on its mesh.

    Args:
        model: on its mesh, with its rules.
        batch: samples, as `call_shapes` takes them.
        height: of the latents.
        width: of the latents.
        text: tokens of the text.

    Raises:
        NoFormulaError: there is no formula for this model on such a mesh.
    """
    layout = model.layout
    if batch % layout.batch_divisor:
        raise NoFormulaError(
            f"{batch} samples do not divide by the {layout.batch_divisor} devices that share them, for which there is "
            "no formula: give the axes data, fsdp and cfg fewer devices"
        )
    (rows,) = layout.resolve("activation_batch").axes
    if isinstance(model, FlaxFluxTransformer2DModel):
        (length,) = layout.resolve("activation_length").axes
        tokens = _flux(model, batch, height // 2 * (width // 2), text)
        return (*_parameters_moved(model, rows, length), *tokens)
    idle = [axis for axis, size in layout.sizes.items() if size > 1 and axis not in rows]
    if idle:
        raise NoFormulaError(
            f"{type(model).__name__} has formulas for axes that share the batch, not for '{idle[0]}': give a mesh of "
            "data and fsdp, or measure a FLUX.1"
        )
    return tuple(_parameters_moved(model, rows, ()))


def _parameters_moved(model: DiffusionModel, rows: tuple[str, ...], length: tuple[str, ...]) -> Iterator[Exchange]:
    """Parameters and gradients, along the axes that share the batch and those that share its sequences."""
    layout = model.layout
    shapes, names = model.abstract_params()
    parameters = []
    for (path, leaf), axes in zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(names, is_leaf=lambda leaf: isinstance(leaf, tuple)),
        strict=True,
    ):
        stored = {axis for dim in layout.stored(*axes, shape=leaf.shape).axes for axis in dim}
        used = leaf.size * jnp.dtype(leaf.dtype).itemsize // layout.size(stored - set(rows))
        stacked = axes[:1] == ("layers",)
        layers = leaf.shape[0] // layout.size(stored & set(pipeline.stage_axes(layout))) if stacked else 1
        parameters.append(
            Parameter(
                bytes=used // layers,
                layers=layers,
                again=stacked or any(part.rpartition("_")[0] in _BLOCKS for part in path_name(path).split("/")),
                gathered=tuple(axis for axis in rows if axis in stored),
                of_tokens=not any(part in path_name(path).split("/") for part in _CONDITION),
            )
        )
    if length:
        yield from data_parallel(
            (one for one in parameters if one.of_tokens), length, "gradients of parts of a sequence"
        )
    if rows:
        yield from data_parallel((one for one in parameters if not one.gathered), rows)
    yield from fully_sharded((one for one in parameters if one.gathered), rows, layout)


def _flux(model: FlaxFluxTransformer2DModel, batch: int, image: int, text: int) -> Iterator[Exchange]:
    """The tokens that FLUX.1 moves.

    Raises:
        NoFormulaError: the mesh mixes strategies, or heads or layers do not divide.
    """
    layout, heads = model.layout, model.num_attention_heads
    tensor, length = layout.resolve("heads").axes[0], layout.resolve("activation_length").axes[0]
    stages = pipeline.stage_axes(layout)
    tensor = tuple(axis for axis in tensor if axis not in layout.resolve("activation_batch").axes[0])
    if len([axes for axes in (tensor, length, stages) if axes]) > 1:
        raise NoFormulaError(
            f"there are formulas for one of tensor, context and stage at a time, beside data and fsdp, not for "
            f"{layout.written((*tensor, *length, *stages))}: give a mesh with one of these axes"
        )
    if heads % layout.size(tensor):
        raise NoFormulaError(
            f"{heads} heads do not divide by {layout.written(tensor)}, for which there is no formula: give a divisor"
        )
    uneven = next((n for n in (model.num_layers, model.num_single_layers) if n % layout.size(stages)), None)
    if uneven:
        raise NoFormulaError(
            f"{uneven} layers do not divide by {layout.written(stages)}, so every stage has them all, for which there "
            "is no formula: give a divisor"
        )
    here = batch // layout.divisor("activation_batch")
    item = jnp.dtype(model.runtime.dtype).itemsize
    of_image, of_text = (here * tokens // layout.size(length) * model.width * item for tokens in (image, text))
    if tensor:
        yield from _flux_tensor(model, tensor, here, (of_image, of_text))
    if length:
        shape = (batch, image + text, heads, model.attention_head_dim)
        plan = plan_context(shape, shape, spec=model.runtime.attention, layout=layout)
        for _ in range(model.num_layers + model.num_single_layers):
            if plan.ulysses > 1:
                yield from ulysses(plan, of_image + of_text)
            if plan.ring > 1:
                yield from ring(plan, of_image + of_text)
    if stages:
        both = (of_image + of_text,)
        stacks = {
            DOUBLE_BLOCKS: (model.num_layers, (of_image, of_text)),
            SINGLE_BLOCKS: (model.num_single_layers, both),
        }
        for name, (depth, carry) in stacks.items():
            plan = pipeline.plan(layout, model.runtime.pipeline, num_layers=depth, batch=batch, name=name)
            yield from pipelined(plan, carry)


def _flux_tensor(
    model: FlaxFluxTransformer2DModel, axes: tuple[str, ...], batch: int, tokens: tuple[int, int]
) -> Iterator[Exchange]:
    """Tensor parallelism, and what it needs besides: columns gathered where a product cuts its output and the next one
    needs it whole (Shoeybi et al. 2019, the column-parallel layer): the embeddings of tokens, the output, and the
    modulations, where the gradient of the condition is summed. For the gradient of the last product's input its kernel
    is gathered instead, which is smaller than the tokens.
    """
    yield from tensor_parallel(axes, model.num_layers * 2 * [*tokens] + model.num_single_layers * [sum(tokens)])
    channels = model.patch_size**2 * (model.out_channels or model.in_channels)
    for what, size in (
        ("embedded tokens", tokens[0]),
        ("embedded tokens", tokens[1]),
        ("output", tokens[0] // model.width * channels),
    ):
        yield Exchange(what=what, kinds=("all-gather",), axes=axes, bytes=size, count=1)
    wide = batch * model.width * jnp.dtype(model.runtime.dtype).itemsize
    for parts, count in ((6, 2 * model.num_layers), (3, model.num_single_layers), (2, 1)):
        yield Exchange(what="modulations", kinds=("all-gather",), axes=axes, bytes=parts * wide, count=count)
        yield Exchange(what="condition", kinds=("all-reduce",), axes=axes, bytes=wide, count=count)
