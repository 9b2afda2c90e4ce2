"""What each strategy has to move in one training step, by its textbook formula: from sizes alone, nothing compiled.

A step is one forward and one backward pass. Bytes are counted as in `tools.traffic`: those of the whole array that a
group of devices holds together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan, plan_context
from maxdiffusion.kernels.attention.select import Call
from maxdiffusion.kernels.halo import PICTURE, padded_rows, plan_bands
from maxdiffusion.models.flux import DOUBLE_BLOCKS, SINGLE_BLOCKS, FlaxFluxTransformer2DModel
from maxdiffusion.models.unet import FlaxUNet2DConditionModel
from maxdiffusion.models.unet_blocks import TRANSFORMER_BLOCKS
from maxdiffusion.nn.attention import attention_calls
from maxdiffusion.nn.conv import Conv, conv_calls
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel import pipeline
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.report import path_name

SUMS = ("reduce-scatter", "all-reduce")
"""Collectives that sum what devices hold; a compiler without the first one uses the second."""

_CONDITION: dict[type[DiffusionModel], tuple[str, ...]] = {
    FlaxFluxTransformer2DModel: ("time_text_embed", "norm", "norm1", "norm1_context", "norm_out"),
    FlaxUNet2DConditionModel: ("time_embedding", "add_embedding", "class_embedding", "time_emb_proj"),
}
"""Modules that read the time, the pooled text or the class of a sample, not its tokens."""

_OF_TEXT = ("attn2/to_k", "attn2/to_v")
"""Projections of a UNet that read the words: whole on every device, whoever has the picture's tokens."""

_STACKS = (DOUBLE_BLOCKS, SINGLE_BLOCKS, TRANSFORMER_BLOCKS)
"""Names of stacks that are pipelined where there are stages."""

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
        devices: that reduce and scatter it, each keeping a part; 1 where every one keeps the whole.
        counted: whether there is a formula; else `bytes` and `count` are 0, and what moves is shown under this name.
    """

    what: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: int
    count: int
    part_of: int = 0
    devices: int = 1
    counted: bool = True


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
        uses: how often a step uses one of its layers at the ticks of a pipeline; 0 where it uses each of them once.
        once: mesh axes along which gradients of a pipeline are summed once a step, after its last tick.
    """

    bytes: int
    layers: int
    again: bool
    gathered: tuple[str, ...]
    of_tokens: bool
    uses: int = 0
    once: tuple[str, ...] = ()

    def sums(self, axes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """Sums of its gradient along these axes: layers that one holds, and how often it is made. Along some axes a
        pipeline sums at every tick, along others all layers at once after the last."""
        if not self.uses:
            yield axes, 1, self.layers
            return
        after = tuple(axis for axis in axes if axis in self.once)
        each = tuple(axis for axis in axes if axis not in after)
        for some, layers, times in ((after, self.layers, 1), (each, 1, self.uses)):
            if some:
                yield some, layers, times


def data_parallel(parameters: Iterable[Parameter], axes: tuple[str, ...]) -> Iterator[Exchange]:
    """Each gradient summed once over the devices that share the batch: `P` bytes (Li et al. 2020, PyTorch DDP).

    Args:
        parameters: those that every device uses whole.
        axes: mesh axes that share the batch.
    """
    for one in parameters:
        for some, layers, count in one.sums(axes):
            size = one.bytes * layers
            yield Exchange(what="gradients", kinds=("all-reduce",), axes=some, bytes=size, count=count)


def fully_sharded(parameters: Iterable[Parameter], axes: tuple[str, ...], layout: Layout) -> Iterator[Exchange]:
    """Each parameter gathered before its use, forward and backward, each gradient reduced and scattered: `2 P` and `P`
    bytes (Rajbhandari et al. 2020, ZeRO stage 3; Zhao et al. 2023, FSDP: what lies outside the blocks is kept from the
    forward to the backward pass). Replicas, if there are any, then sum their parts: `P / n` bytes. In a pipeline every
    tick is a use; the forward pass, which reads the same weights at every tick, gathers them before the first.

    Args:
        parameters: those that are stored in parts.
        axes: mesh axes that share the batch.
        layout: sizes of the mesh axes.
    """
    for one in parameters:
        times = one.layers + ((one.uses or one.layers) if one.again else 0)
        yield Exchange(what="parameters", kinds=("all-gather",), axes=one.gathered, bytes=one.bytes, count=times)
        for some, layers, count in one.sums(one.gathered):
            n, size = layout.size(some), one.bytes * layers
            yield Exchange(what="gradients", kinds=SUMS, axes=some, bytes=size, count=count, devices=n)
        rest = tuple(axis for axis in axes if axis not in one.gathered)
        yield from _of_stored_part("replicas", one, rest, layout)


def sequence_parallel(parameters: Iterable[Parameter], axes: tuple[str, ...], layout: Layout) -> Iterator[Exchange]:
    """Devices that share a sequence are replicas of what its tokens meet: each sums the part of a gradient that it
    stores, `P / n` bytes (Jacobs et al. 2023, section 3.2), at every use.

    Args:
        parameters: all.
        axes: mesh axes that share a sequence.
        layout: sizes of the mesh axes.
    """
    for one in parameters:
        if one.of_tokens:
            yield from _of_stored_part("gradients of parts of a sequence", one, axes, layout)


def _of_stored_part(what: str, one: Parameter, axes: tuple[str, ...], layout: Layout) -> Iterator[Exchange]:
    """Sums along mesh axes of the part of a gradient that a device stores; none without axes."""
    part = one.bytes // layout.size(one.gathered)
    for some, layers, count in one.sums(axes) if axes else ():
        yield Exchange(
            what=what,
            kinds=("all-reduce",),
            axes=some,
            bytes=part * layers,
            count=count,
            part_of=one.bytes * layers,
        )


def _split(plan: Plan, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes of the rings and of the swaps: the outer and the inner ones, or all where they do not part there."""
    for at in range(len(plan.axes)):
        if layout.size(plan.axes[at:]) == plan.ulysses and at:
            return plan.axes[:at], plan.axes[at:]
    return plan.axes, plan.axes


def ring(plan: Plan, key_bytes: int, axes: tuple[str, ...] | None = None, *, kept: bool = False) -> Iterator[Exchange]:
    """Of one attention: keys and values go `n - 1` steps forward and again backward, where their gradients go `n`
    steps, home again (Liu et al. 2023): `2 (n - 1) + 2 (n - 1) + 2 n` permutes of a device's part.

    Args:
        plan: devices of the ring.
        key_bytes: of a device's part of the keys.
        axes: mesh axes of the ring, where they are not all of the plan's.
        kept: whether the backward pass still has the keys of the forward pass.
    """
    n = plan.ring
    for what, count in (("keys and values", (2 if kept else 4) * (n - 1)), ("gradients of keys and values", 2 * n)):
        yield Exchange(what=what, kinds=("collective-permute",), axes=axes or plan.axes, bytes=key_bytes, count=count)


def ulysses(plan: Plan, query_bytes: int, axes: tuple[str, ...] | None = None) -> Iterator[Exchange]:
    """Of one attention: queries, keys, values and the output swap tokens for heads, forward and backward (Jacobs et al.
    2023): 8 all-to-alls of a device's part.

    Args:
        plan: devices that swap.
        query_bytes: of a device's part of the queries.
        axes: mesh axes of the swap, where they are not all of the plan's.
    """
    yield Exchange(what="tokens for heads", kinds=("all-to-all",), axes=axes or plan.axes, bytes=query_bytes, count=8)


def gathered_keys(plan: Plan, key_bytes: int) -> Iterator[Exchange]:
    """Of one attention: keys and values gathered forward and kept, their gradients reduced and scattered (Li et al.
    2021, sequence parallelism; Korthikanti et al. 2022, the conjugate of the gather): 2 of each, of the whole keys.

    Args:
        plan: devices that share the sequence.
        key_bytes: of a device's part of the keys.
    """
    whole = key_bytes * plan.parts
    yield Exchange(what="keys and values", kinds=("all-gather",), axes=plan.axes, bytes=whole, count=2)
    yield Exchange(what="gradients of keys and values", kinds=SUMS, axes=plan.axes, bytes=whole, count=2)


def exchanged(
    plan: Plan, layout: Layout, query_bytes: int, key_bytes: int, *, looped: bool = True
) -> Iterator[Exchange]:
    """What one attention exchanges along a sequence: hybrid is a swap, and a ring of what it has swapped (Fang and Zhao
    2024). Keys of another sequence, whole on every device, move nothing, but their gradients are summed.

    Args:
        plan: of the attention.
        layout: sizes of the mesh axes.
        query_bytes: of a device's part of the queries.
        key_bytes: of a device's part of the keys.
        looped: whether a loop runs it. Else XLA's CPU compiler finds, of two devices that swap their keys, that the
            backward pass makes the permutes of the forward pass, and keeps what these brought.
    """
    of_ring, of_swap = _split(plan, layout) if plan.ring > 1 and plan.ulysses > 1 else (plan.axes, plan.axes)
    if plan.ulysses > 1:
        yield from ulysses(plan, query_bytes, of_swap)
    if plan.ring > 1:
        kept = plan.ring == 2 and not looped and layout.platform == "cpu"
        yield from ring(plan, key_bytes, of_ring, kept=kept)
    if plan.strategy == "gather":
        yield from gathered_keys(plan, key_bytes)
    if plan.strategy == "local" and plan.axes:
        what = "gradients of keys and values of the text"
        yield Exchange(what=what, kinds=("all-reduce",), axes=plan.axes, bytes=key_bytes, count=2)


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


def pipelined(plan: pipeline.Plan, carry: Sequence[int], weights: Sequence[int] = ()) -> Iterator[Exchange]:
    """Of one stack: what the layers hand on, one microbatch of it a tick and direction (Huang et al. 2019; Narayanan et
    al. 2021); once a call the result from the last stage, and the gradient of the input to the first. A circular
    schedule besides sends the weights of a stage to those that apply them, and their gradients back, once a call.

    Args:
        plan: ticks, microbatches.
        carry: bytes of each array that the layers hand on, of all samples of a device.
        weights: bytes of each array of weights that a stage stores, all its layers.
    """
    for whole in carry:
        part, moves = whole * plan.samples // plan.batch, 2 * plan.ticks
        yield Exchange(what="microbatches", kinds=("collective-permute",), axes=plan.axes, bytes=part, count=moves)
        yield Exchange(what="ends of the pipeline", kinds=("all-reduce",), axes=plan.axes, bytes=whole, count=2)
    for stored in weights if plan.repeats > 1 else ():
        yield Exchange(what="weights of the rounds", kinds=("all-to-all",), axes=plan.axes, bytes=stored, count=2)


def convolved(rows: Sequence[int], axes: tuple[str, ...], *, differentiated: bool) -> Iterator[Exchange]:
    """Of one convolution of bands: the border rows from above and from below, and backward their gradients home
    (Dryden et al. 2019, section 3.1: the halo exchange).

    Args:
        rows: bytes of the rows that a device gets from each side.
        axes: mesh axes that cut the rows.
        differentiated: whether the feature map has a gradient; the latents have none.
    """
    for size in rows:
        count = 2 if differentiated else 1
        yield Exchange(what="border rows", kinds=("collective-permute",), axes=axes, bytes=size, count=count)


def channel_parallel(axes: tuple[str, ...], size: int, *, kept: bool, differentiated: bool) -> Iterator[Exchange]:
    """Of one convolution cut by output channels, whose feature map is cut by channels as well: it is gathered forward,
    and again for the gradient of the kernel; its own gradient is reduced and scattered (Dryden et al. 2019, section
    3.2: channel and filter parallelism).

    Args:
        axes: mesh axes that cut the channels.
        size: bytes of the feature map of a device, all channels.
        kept: the gathered one is kept for the backward pass.
        differentiated: whether the feature map has a gradient; the latents have none.
    """
    yield Exchange(what="channels", kinds=("all-gather",), axes=axes, bytes=size, count=1 if kept else 2)
    if differentiated:
        yield Exchange(what="gradients of channels", kinds=SUMS, axes=axes, bytes=size, count=1)


@dataclass(frozen=True, kw_only=True)
class _Network:
    """A model, its mesh, and the sizes of a call.

    Attributes:
        model: on its mesh, with its rules.
        batch: samples of all devices.
        height: of the latents.
        width: of the latents.
        text: tokens of the text.
        shapes: of the parameters.
        names: their logical axes.
    """

    model: DiffusionModel
    batch: int
    height: int
    width: int
    text: int
    shapes: Any
    names: Any

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def item(self) -> int:
        """Bytes of a number of an activation."""
        return jnp.dtype(self.model.runtime.dtype).itemsize

    @property
    def rows(self) -> tuple[str, ...]:
        """Mesh axes that share the batch."""
        return self.layout.resolve("activation_batch").axes[0]

    @property
    def here(self) -> int:
        """Samples of a device."""
        return self.batch // self.layout.size(self.rows)

    @property
    def length(self) -> tuple[str, ...]:
        """Mesh axes that share a sequence."""
        return self.layout.resolve("activation_length").axes[0]

    @property
    def tensor(self) -> tuple[str, ...]:
        """Mesh axes that share the heads."""
        return tuple(axis for axis in self.layout.resolve("heads").axes[0] if axis not in self.rows)

    def stack(self, path: Sequence[str]) -> int:
        """Layers of the stack that a module belongs to; 0 for none."""
        shapes, names = self.shapes, self.names
        for part in path:
            if part not in shapes:
                break
            shapes, names = shapes[part], names[part]
        name = jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, tuple))[0]
        return jax.tree.leaves(shapes)[0].shape[0] if name[:1] == ("layers",) else 0

    def plan(self, path: Sequence[str]) -> pipeline.Plan | None:
        """How the stack that a module belongs to is pipelined; None where it is not.

        Raises:
            NoFormulaError: the layers do not divide by the stages.
        """
        layers, stages = self.stack(path), pipeline.stage_axes(self.layout)
        if not stages or layers < 2:
            return None
        if layers % self.layout.size(stages):
            raise NoFormulaError(
                f"{layers} layers do not divide by {self.layout.written(stages)}, so every stage has them all, for "
                "which there is no formula: give a divisor"
            )
        if self.model.runtime.pipeline.schedule == "circular" and set(self.rows) & self.layout.storing:
            raise NoFormulaError(
                "a circular pipeline whose weights are stored in parts sends them whole, and gathers them as the "
                "compiler likes, for which there is no formula: give a mesh without fsdp, or the schedule gpipe"
            )
        spec, name = self.model.runtime.pipeline, next((part for part in path if part in _STACKS), path[0])
        return pipeline.plan(self.layout, spec, num_layers=layers, batch=self.batch, name=name)

    def runs(self, path: Sequence[str]) -> tuple[int, int]:
        """How often a step runs a module of a device forward, and on how many samples of this device each time."""
        plan, layers = self.plan(path), self.stack(path)
        if plan is None:
            return max(layers, 1), self.here
        # Of each round a stage has its share of the layers; it works on one of the rounds at a tick.
        slots = layers // (plan.stages * plan.repeats)
        return plan.ticks * slots, plan.samples // self.layout.size(self.rows)

    def attentions(self) -> list[tuple[str, Call]]:
        """The attentions of a call, one for all layers of a stack."""
        calls = attention_calls(*self._call())
        return list(dict.fromkeys(calls)) if self.model.runtime.scan_layers else list(calls)

    def convolutions(self) -> list[tuple[str, tuple[int, ...], Conv]]:
        """The convolutions of a call."""
        return list(conv_calls(*self._call()))

    def _call(self) -> tuple[Any, ...]:
        """A call without the mesh, and the shapes of its arguments; rows padded as on the mesh."""
        network, height = self.model.alone(), self.height
        if isinstance(self.model, FlaxUNet2DConditionModel):
            height = padded_rows(height, self.model.num_levels, self.layout)

        def call(params: Any, inputs: Any) -> Any:
            return network.apply({"params": params}, **inputs)

        inputs = network.call_shapes(self.batch, height=height, width=self.width, text=self.text)
        return call, network.abstract_params()[0], inputs


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
    shapes, names = model.abstract_params()
    network = _Network(model=model, batch=batch, height=height, width=width, text=text, shapes=shapes, names=names)
    if isinstance(model, FlaxFluxTransformer2DModel):
        tokens = _flux(network)
    elif isinstance(model, FlaxUNet2DConditionModel):
        tokens = _unet(network)
    else:
        idle = [axis for axis, size in layout.sizes.items() if size > 1 and axis not in network.rows]
        if idle:
            raise NoFormulaError(
                f"{type(model).__name__} has formulas for axes that share the batch, not for '{idle[0]}': give a mesh "
                "of data and fsdp, or measure a FLUX.1 or a Stable Diffusion"
            )
        tokens = iter(())
    return (*tokens, *_parameters_moved(network))


def _parameters_moved(network: _Network) -> Iterator[Exchange]:
    """Parameters and gradients, along the axes that share the batch and those that share its sequences."""
    layout, rows, parameters = network.layout, network.rows, []
    condition = _CONDITION.get(type(network.model), ())
    stages = pipeline.stage_axes(layout)
    for (path, leaf), axes in zip(
        jax.tree_util.tree_leaves_with_path(network.shapes),
        jax.tree.leaves(network.names, is_leaf=lambda leaf: isinstance(leaf, tuple)),
        strict=True,
    ):
        stored = {axis for dim in layout.stored(*axes, shape=leaf.shape).axes for axis in dim}
        used = leaf.size * jnp.dtype(leaf.dtype).itemsize // layout.size(stored - set(rows))
        stacked = axes[:1] == ("layers",)
        layers = leaf.shape[0] // layout.size(stored & set(stages)) if stacked else 1
        name = path_name(path)
        parts = name.split("/")
        plan = network.plan(parts) if stacked else None
        manual = tuple(itertools.takewhile(lambda axis: axis not in layout.storing, rows))
        parameters.append(
            Parameter(
                bytes=used // layers,
                layers=layers,
                again=stacked or any(part.rpartition("_")[0] in _BLOCKS for part in parts),
                gathered=tuple(axis for axis in rows if axis in stored),
                of_tokens=not any(part in condition for part in parts) and not any(one in name for one in _OF_TEXT),
                uses=0 if plan is None else plan.ticks * (layers // plan.repeats),
                once=manual,
            )
        )
    if rows:
        yield from data_parallel((one for one in parameters if not one.gathered), rows)
    yield from fully_sharded((one for one in parameters if one.gathered), rows, layout)
    if network.length:
        yield from sequence_parallel(parameters, network.length, layout)


def _attended(network: _Network) -> Iterator[Exchange]:
    """What the attentions exchange along the axes that share a sequence.

    Raises:
        NoFormulaError: their heads do not divide by the axes that share them.
    """
    layout, item = network.layout, network.item
    for module, call in network.attentions():
        heads = call.q_shape[2]
        if heads % layout.size(network.tensor):
            raise NoFormulaError(
                f"{heads} heads do not divide by {layout.written(network.tensor)}, for which there is no formula: give "
                "a divisor"
            )
        if not network.length:
            continue
        plan = plan_context(
            call.q_shape,
            call.k_shape,
            spec=network.model.runtime.attention,
            layout=layout,
            full_mask=call.full_mask,
        )
        times, samples = network.runs(module.split("/"))
        width = heads // layout.size(network.tensor) * call.q_shape[3] * item
        of_queries = samples * call.q_shape[1] // layout.size(network.length) * width
        parts = 1 if plan.strategy == "local" else plan.parts
        of_keys, looped = samples * call.k_shape[1] // parts * width, network.stack(module.split("/")) > 1
        for one in exchanged(plan, layout, of_queries, of_keys, looped=looped):
            yield replace(one, count=one.count * times)


def _flux(network: _Network) -> Iterator[Exchange]:
    """The tokens that FLUX.1 moves.

    Raises:
        NoFormulaError: heads or layers do not divide.
    """
    yield from _attended(network)
    model, layout = network.model, network.layout
    assert isinstance(model, FlaxFluxTransformer2DModel)
    image = network.height // 2 * (network.width // 2)
    part = model.width * network.item

    def tokens(samples: int) -> tuple[int, int]:
        of_image, of_text = (samples * n // layout.size(network.length) * part for n in (image, network.text))
        return of_image, of_text

    whole = tokens(network.here)
    for name, carry in {DOUBLE_BLOCKS: whole, SINGLE_BLOCKS: (sum(whole),)}.items():
        plan = network.plan((name,))
        if plan is not None:
            yield from pipelined(plan, carry, list(_stored_weights(network, (name,))))
    if network.tensor:
        yield from _flux_tensor(network, tokens)


def _stored_weights(network: _Network, path: Sequence[str]) -> Iterator[int]:
    """Bytes of each array of a stack that a device stores."""
    shapes, names = network.shapes, network.names
    for part in path:
        shapes, names = shapes[part], names[part]
    leaves = jax.tree.leaves(names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    for leaf, axes in zip(jax.tree.leaves(shapes), leaves, strict=True):
        stored = [axis for dim in network.layout.stored(*axes, shape=leaf.shape).axes for axis in dim]
        yield leaf.size * jnp.dtype(leaf.dtype).itemsize // network.layout.size(stored)


def _flux_tensor(network: _Network, tokens: Callable[[int], tuple[int, int]]) -> Iterator[Exchange]:
    """Tensor parallelism, and what it needs besides: columns gathered where a product cuts its output and the next one
    needs it whole (Shoeybi et al. 2019, the column-parallel layer): the embeddings of tokens, the output, and the
    modulations, where the gradient of the condition is summed, or their kernels are gathered for it: the partitioner
    does so where other devices have the same condition. For the gradient of the last product's input its kernel is
    gathered instead, which is smaller than the tokens.
    """
    model, axes = network.model, network.tensor
    assert isinstance(model, FlaxFluxTransformer2DModel)
    stages = pipeline.stage_axes(network.layout)

    def modulated(parts: int, samples: int, times: int, *, kernels: bool) -> Iterator[Exchange]:
        wide = model.width * network.item
        for what, kind, size in (
            ("modulations", "all-gather", samples * parts * wide),
            ("kernels of modulations", "all-gather", model.width * parts * wide)
            if kernels
            else ("condition", "all-reduce", samples * wide),
        ):
            yield Exchange(what=what, kinds=(kind,), axes=axes, bytes=size, count=times)

    depths = {DOUBLE_BLOCKS: model.num_layers, SINGLE_BLOCKS: model.num_single_layers}
    for name, depth in depths.items():
        times, samples = network.runs((name,)) if model.runtime.scan_layers else (depth, network.here)
        # A double block has two regions and two modulations of its two streams each, a single one has one of each.
        regions = [*tokens(samples)] * 2 if name == DOUBLE_BLOCKS else [sum(tokens(samples))]
        for one in tensor_parallel(axes, regions):
            yield replace(one, count=one.count * times)
        for parts in (6, 6) if name == DOUBLE_BLOCKS else (3,):
            yield from modulated(parts, samples, times, kernels=bool(network.length))
    yield from modulated(2, network.here, 1, kernels=bool(network.length or stages))
    if stages:
        wide = tuple(axis for axis, size in network.layout.sizes.items() if size > 1)
        what = "gradient of the last modulation, to where it is stored"
        yield Exchange(what=what, kinds=("collective-permute",), axes=wide, bytes=0, count=0, counted=False)
    of_image, of_text = tokens(network.here)
    channels = model.patch_size**2 * (model.out_channels or model.in_channels)
    for what, size in (
        ("embedded tokens", of_image),
        ("embedded tokens", of_text),
        ("output", of_image // model.width * channels),
    ):
        yield Exchange(what=what, kinds=("all-gather",), axes=axes, bytes=size, count=1)


def _unet(network: _Network) -> Iterator[Exchange]:
    """The tokens and feature maps that a UNet moves.

    Raises:
        NoFormulaError: heads or layers do not divide, or rows are not cut as its sequences are.
    """
    layout, item = network.layout, network.item
    of_rows = layout.resolve("activation_height").axes[0]
    if of_rows != network.length:
        raise NoFormulaError(
            f"rows of feature maps lie over ({layout.written(of_rows)}) and sequences over "
            f"({layout.written(network.length)}), for which there is no formula: give both rules the same axes"
        )
    stages, others = pipeline.stage_axes(layout), (*network.tensor, *network.length)
    if stages and others:
        raise NoFormulaError(
            f"most of a UNet lies outside of its pipelined stack, and what of it the devices of "
            f"{layout.written(stages)} share beside {layout.written(others)} is the compiler's choice, for which there "
            "is no formula: give a mesh without one of these axes"
        )
    yield from _attended(network)
    for module, call in network.attentions():
        path = module.split("/")
        first = path[-1] == "attn1"
        times, samples = network.runs(path)
        _, length, heads, width = call.q_shape
        tokens = length // layout.size(network.length) * heads * width * item
        if network.tensor:
            # The feed-forward network of a block counts with its first attention.
            for one in tensor_parallel(network.tensor, (2 if first else 1) * [samples * tokens]):
                yield replace(one, count=one.count * times)
        if first and path[-2] == TRANSFORMER_BLOCKS:
            plan = network.plan(path)
            if plan is not None:
                yield from pipelined(plan, [network.here * tokens], list(_stored_weights(network, path[:-1])))
        if first and network.tensor:
            # Around the blocks of a picture: products from its channels to whole tokens, and back.
            ends = (("embedded tokens", "all-gather"), ("gradients of embedded tokens", "all-reduce"))
            for what, kind in ends if path[-2] in (TRANSFORMER_BLOCKS, f"{TRANSFORMER_BLOCKS}_0") else ():
                yield Exchange(what=what, kinds=(kind,), axes=network.tensor, bytes=network.here * tokens, count=1)
    if network.length or network.tensor:
        yield from _unet_pictures(network)


def _unet_pictures(network: _Network) -> Iterator[Exchange]:
    """What convolutions move of a UNet's feature maps.

    Raises:
        NoFormulaError: the rows of one do not divide.
    """
    layout = network.layout
    for module, shape, layer in network.convolutions():
        differentiated = module != "conv_in"
        bands = plan_bands(shape, layer.features, rows=layer.window, columns=layer.window, layout=layout)
        if bands.reason and not bands.axes:
            raise NoFormulaError(f"{module}: {bands.reason}, for which there is no formula: give more rows")
        _, _, width, channels = shape
        of_row = network.here * width * channels * network.item
        borders = [of_row * rows for rows in (bands.above, bands.below) if rows]
        yield from convolved(borders, bands.axes, differentiated=differentiated)
        cut = layout.resolve(*PICTURE, shape=shape).axes[3]
        if cut:
            # Bands are gathered with their border rows to come, which are kept for the gradient of the kernel.
            size = of_row * bands.rows
            yield from channel_parallel(cut, size, kept=bool(bands.axes), differentiated=differentiated)
    if network.tensor:
        for kind in ("all-to-all", "collective-permute"):
            what = "channels of skips, to where those of both lie"
            yield Exchange(what=what, kinds=(kind,), axes=network.tensor, bytes=0, count=0, counted=False)
