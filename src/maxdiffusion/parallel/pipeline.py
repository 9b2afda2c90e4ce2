"""Pipeline parallelism: equal layers lie in stages along a mesh axis, and microbatches flow from stage to stage.

The schedules are GPipe (Huang et al. 2019) and the circular, or interleaved, one (Narayanan et al. 2021, section 2.2).
The stage axis is manual (`jax.shard_map`), so that every move along it is written here, and so are the axes that share
the batch and nothing else, so that gradients are summed along them once; the others are the partitioner's, as outside.
The loop is differentiated by JAX: its backward pass is the reversed pipeline.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from maxdiffusion.errors import LayoutWarning, UsageError
from maxdiffusion.log import say_once
from maxdiffusion.parallel.collectives import permute
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.rules import axes_of
from maxdiffusion.specs import PipelineSpec

log = logging.getLogger(__name__)
Carry = TypeVar("Carry")

MICROBATCHES_PER_STAGE = 4
"""So many microbatches a stage leave a bubble of a fifth at most (Huang et al. 2019, section 2.3)."""


def num_ticks(stages: int, microbatches: int, repeats: int = 1) -> int:
    """Steps of the pipeline until the last stage has finished the last microbatch.

    A round of a circular schedule takes `max(stages, microbatches)` ticks: a microbatch that comes back early waits.

    Args:
        stages: devices along the stage axis.
        microbatches: parts of the batch.
        repeats: rounds that a microbatch makes through the stages; 1 for GPipe.
    """
    return (repeats - 1) * max(stages, microbatches) + microbatches + stages - 1


def bubble_fraction(stages: int, microbatches: int, repeats: int = 1) -> float:
    """Share of its time that a stage does no useful work, when all layers cost the same and moves are hidden.

    `(S - 1) / (R M + S - 1)` for S stages, M >= S microbatches (any M with one round) and R rounds.

    Args:
        stages: devices along the stage axis.
        microbatches: parts of the batch.
        repeats: rounds that a microbatch makes through the stages; 1 for GPipe.

    Raises:
        UsageError: a number is below 1.
    """
    for name, value in (("stages", stages), ("microbatches", microbatches), ("repeats", repeats)):
        if value < 1:
            raise UsageError(f"{name}={value}: write a whole number, 1 or more")
    return 1 - repeats * microbatches / num_ticks(stages, microbatches, repeats)


def assignment(num_layers: int, stages: int, repeats: int = 1) -> Int[np.ndarray, "stages repeats slots"]:
    """Which layer each stage applies in each round, in order; -1 stands for the identity.

    The layers are cut, in order, into `stages * repeats` runs whose lengths differ by one at most; run k belongs to
    stage `k % stages` and to round `k // stages`.

    Args:
        num_layers: layers of the stack.
        stages: devices along the stage axis.
        repeats: rounds; 1 for GPipe, where each stage has the neighbouring layers that it stores.
    """
    runs = np.array_split(np.arange(num_layers), stages * repeats)
    table = np.full((repeats, stages, max(map(len, runs))), -1)
    for index, run in enumerate(runs):
        table[index // stages, index % stages, : len(run)] = run
    return table.swapaxes(0, 1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one stack is pipelined.

    Attributes:
        axes: mesh axes of the stages.
        stages: number of stages.
        repeats: rounds through the stages.
        num_layers: layers of the stack.
        batch: samples.
        microbatches: parts of the batch.
        samples: samples of a microbatch; together they may be more than the batch, and copies fill them.
        reason: one line for people: the numbers, why these, and what pins them.
    """

    axes: tuple[str, ...]
    stages: int
    repeats: int
    num_layers: int
    batch: int
    microbatches: int
    samples: int
    reason: str

    @property
    def period(self) -> int:
        """Ticks of a round."""
        return max(self.stages, self.microbatches) if self.repeats > 1 else self.microbatches

    @property
    def ticks(self) -> int:
        """Ticks of the loop."""
        return num_ticks(self.stages, self.microbatches, self.repeats)


def stage_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes that hold the stages of a pipeline: those of `layers`, unless activations use one of them as well.

    Where they do, as with the rules `("layers", "fsdp"), ("activation_batch", "fsdp")`, the axis only stores the
    layers, and the scan gathers one after the other.
    """
    (axes,) = layout.resolve("layers").axes
    of_activations = {
        axis for name, wanted in layout.rules if name.startswith("activation_") for axis in axes_of(wanted)
    }
    return () if of_activations & set(axes) else axes


def num_stages(layout: Layout) -> int:
    """Devices along the stage axes; 1 without any."""
    return layout.size(stage_axes(layout))


def applies(layout: Layout, *, num_layers: int, name: str) -> bool:
    """Whether a stack is pipelined: there are stages, and more than one layer.

    Args:
        layout: mesh and rules.
        num_layers: layers of the stack.
        name: of the stack, for the log.

    Raises:
        UsageError: under `strict`, a stack of one layer on a mesh with stages.

    Warns:
        LayoutWarning: a stack of one layer on a mesh with stages: every stage repeats its work.
    """
    axes = stage_axes(layout)
    if axes and num_layers == 1:
        say_idle(layout, axes, f"the stack '{name}' has 1 layer, which cannot be cut: give it more layers")
    return bool(axes) and num_layers > 1


def say_idle(layout: Layout, axes: tuple[str, ...], cause: str) -> None:
    """Says that stages repeat each other's work.

    Args:
        layout: mesh and rules.
        axes: mesh axes of the stages.
        cause: why, and what to change in the model.

    Raises:
        UsageError: under `strict`.

    Warns:
        LayoutWarning: else.
    """
    stages = layout.size(axes)
    text = (
        f"the {stages} stages of mesh axis '{'+'.join(axes)}' repeat the same work: {cause}, or give the devices to "
        "another mesh axis"
    )
    if layout.strict:
        raise UsageError(f"{text} (strict)")
    warnings.warn(text, LayoutWarning, stacklevel=3)


def plan(layout: Layout, spec: PipelineSpec, *, num_layers: int, batch: int, name: str) -> Plan:
    """The pipeline of a stack; says once in the log what it will be, and why.

    Without a wish the number of microbatches is the largest that cuts the batch evenly, up to four a stage (a round of
    a circular schedule needs only one a stage). A wish that does not cut the batch evenly is met by copies of samples,
    whose results are dropped: the numbers are exact, and a run whose sample grids have another batch size than its
    training does not end because of them. The log names the nearest counts that need none.

    Args:
        layout: has stage axes.
        spec: the wishes.
        num_layers: layers of the stack.
        batch: samples.
        name: of the stack, for the log.
    """
    axes, stages = stage_axes(layout), num_stages(layout)
    repeats = 1
    if spec.schedule == "circular":
        repeats = spec.repeats or max(1, -(-num_layers // stages))
    (shards,) = layout.resolve("activation_batch", shape=(batch,)).axes
    divisor = layout.size(shards)
    legal = [count for count in range(1, batch + 1) if batch % (count * divisor) == 0]
    if spec.microbatches is None:
        most = max(stages, -(-MICROBATCHES_PER_STAGE * stages // repeats))
        microbatches = max(count for count in legal if count <= most)
        why = f"the largest count up to {most} that cuts the batch evenly; pipeline_microbatches pins it"
    else:
        microbatches, why = spec.microbatches, "pinned by pipeline_microbatches"
    samples = -(-batch // (microbatches * divisor)) * divisor
    if microbatches not in legal:
        below = [count for count in legal if count < microbatches][-1:]
        near = below + [count for count in legal if count > microbatches][:1]
        why += (
            f", with {microbatches * samples - batch} copies of samples that fill it up and are dropped at the end: "
            + (f"{' or '.join(map(str, near))} microbatches need none")
        )
    if microbatches < stages:
        why += f"; fewer than the {stages} stages, so some always wait: give a larger batch, or more microbatches of it"
    idle = (assignment(num_layers, stages, repeats) < 0).all(axis=(1, 2)).sum()
    if idle:
        why += f"; {idle} of the stages have no layer and hand on what comes: choose at most {num_layers} stages"
    reason = (
        f"pipeline: {num_layers} layers '{name}' over {stages} stages ({'+'.join(axes)}), {spec.schedule}"
        + (f" in {repeats} rounds" if repeats > 1 else "")
        + f", bubble {bubble_fraction(stages, microbatches, repeats):.0%}: {batch} samples as {microbatches} "
        + f"microbatches of {samples} ({why})"
    )
    say_once(log, reason)
    return Plan(
        axes=axes,
        stages=stages,
        repeats=repeats,
        num_layers=num_layers,
        batch=batch,
        microbatches=microbatches,
        samples=samples,
        reason=reason,
    )


def pipeline(
    layer: Callable[[Any, Carry, Any], Carry],
    params: Any,
    x: Carry,
    inputs: Any,
    *,
    plan: Plan,
    layout: Layout,
    remat: Callable[[Any], Any] = lambda layer: layer,
) -> Carry:
    """`x` after all layers: the same as a loop over them, to the order of sums.

    Along the stage axis, a tick moves the carry of one microbatch to the next stage and nothing else; GPipe moves no
    weights. A circular schedule first sends each layer from the stage that stores it to the one that applies it, once
    a call: `(S - 1) / S` of a stage's weights, and of their gradients on the way back.

    Args:
        layer: `(parameters of one layer, x, inputs) -> x`, sample by sample.
        params: tree of arrays whose first dimension is the layers, in order.
        x: what the layers hand on: a tree of floating arrays whose first dimension is the batch.
        inputs: what every layer reads: a tree of arrays whose first dimension is the batch, or 1 for what all samples
            share; scalars and None are shared too.
        plan: from `plan`.
        layout: mesh and rules.
        remat: what `jax.checkpoint` makes of a layer. It is given the layer together with the choice of its weights,
            so that a circular schedule, which chooses them anew at each tick, does not keep a copy for each.

    Raises:
        UsageError: the first dimension of an input is neither the batch nor 1.
    """
    cut = functools.partial(_microbatches, plan=plan, layout=layout)
    table = assignment(plan.num_layers, plan.stages, plan.repeats)
    arranged, exchange = _arrange(params, table, plan)
    arrays = jax.tree.map(cut, x), jax.tree.map(cut, inputs)
    shards = _manual_shards(layout, plan)
    of_samples = P(plan.axes, None, shards or None)
    specs = jax.tree.map(
        lambda given: of_samples if jnp.ndim(given) and jnp.shape(given)[0] == plan.batch else P(plan.axes), (x, inputs)
    )
    run = jax.shard_map(
        functools.partial(_stage, layer, remat, plan),
        mesh=mesh_here(layout),
        in_specs=(P(plan.axes), P(plan.axes), P(plan.axes), P(plan.axes), specs),
        out_specs=of_samples,
        axis_names={*plan.axes, *shards},
        check_vma=False,
    )
    # Outside of jit, a shard_map that leaves axes to the partitioner cannot run.
    out = jax.jit(run, inline=True)(jnp.arange(plan.stages), jnp.asarray(table >= 0), exchange, arranged, arrays)
    return jax.tree.map(functools.partial(_joined, plan=plan), out)


def _microbatches(x: Any, *, plan: Plan, layout: Layout) -> Array:
    """(stages, microbatches, samples, ...): microbatch m has the samples m, m + M, m + 2 M, ..., so that a batch that
    is cut over devices is cut further without a move. What all samples share has one microbatch, as it is."""
    x = jnp.asarray(x)
    if x.ndim == 0 or (x.shape[0] == 1 and plan.batch > 1):
        parts = x[None]
    elif x.shape[0] != plan.batch:
        raise UsageError(
            f"a stack in a pipeline reads an input of shape {x.shape}, but the batch is {plan.batch}: give it the "
            "batch as first dimension, or 1 for what all samples share"
        )
    else:
        total = plan.microbatches * plan.samples
        if total != plan.batch:
            x = jnp.take(x, np.arange(total) % plan.batch, axis=0)
        parts = x.reshape(plan.samples, plan.microbatches, *x.shape[1:]).swapaxes(0, 1)
    # A copy for each stage, not one for all: then no gradient is summed over the stages before the loop has ended.
    copies = jnp.broadcast_to(parts[None], (plan.stages, *parts.shape))
    shards: tuple[str, ...] = ()
    if x.ndim and x.shape[0] != 1:
        (shards,) = layout.resolve("activation_batch", shape=(plan.samples,)).axes
    spec = (plan.axes, None, shards or None, *(P.UNCONSTRAINED,) * parts.ndim)[: copies.ndim]
    return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh_here(layout), P(*spec)))


def _manual_shards(layout: Layout, plan: Plan) -> tuple[str, ...]:
    """Mesh axes of the batch that are manual beside the stages: the first ones, as far as they store no parameter.

    Along these a gradient is summed once, after the loop: what is the partitioner's is summed at every tick.
    """
    (shards,) = layout.resolve("activation_batch", shape=(plan.samples,)).axes
    stores = layout.storing
    return tuple(itertools.takewhile(lambda axis: axis not in stores, shards))


def mesh_here(layout: Layout) -> Mesh | AbstractMesh:
    """The mesh of a layout as it is here: within a `shard_map`, some of its axes are manual."""
    here = jax.sharding.get_abstract_mesh()
    assert layout.mesh is not None
    return here if here.manual_axes else layout.mesh


def _joined(out: Array, *, plan: Plan) -> Array:
    """The batch, from what every stage has collected: only the last stage's is meant, the others' sum is not."""
    last = (np.arange(plan.stages) == plan.stages - 1).reshape(-1, *(1,) * (out.ndim - 1))
    out = jnp.sum(jnp.where(last, out, jnp.zeros((), out.dtype)), axis=0, dtype=out.dtype)
    return out.swapaxes(0, 1).reshape(-1, *out.shape[2:])[: plan.batch]


def laid_out(params: Any, table: Int[np.ndarray, "stages repeats slots"]) -> Any:
    """Parameters of a stack with one entry for each of `assignment`, for a cut of the first dimension over the stages.

    Where every stage stores what it applies, nothing changes. Else the stack is stored whole on every stage, since
    jit's arguments are cut evenly, and each takes its own.

    Args:
        params: tree of arrays whose first dimension is the layers, in order.
        table: from `assignment`.
    """
    layers = _applied(table).reshape(-1)
    if np.array_equal(layers, np.arange(table.max() + 1)):
        return params
    return jax.tree.map(lambda leaf: jnp.take(leaf, layers, axis=0), params)


def _applied(table: np.ndarray) -> np.ndarray:
    """The table with a layer in place of each identity: one that the stage has anyway is read and makes no number."""
    own = table.max(axis=(1, 2), keepdims=True)
    return np.where(table < 0, np.where(own < 0, table.max(), own), table)


def _arrange(params: Any, table: np.ndarray, plan: Plan) -> tuple[Any, Any]:
    """Parameters whose first dimension is cut over the stages, and how the stages exchange them inside.

    The exchange is None where each stage stores what it applies. Else it is a pair of tables: (stages, stages, most)
    slots that a stage sends to each other one, and (stages, rounds * slots) places of what it applies among all that
    it receives.
    """
    if plan.repeats == 1 or plan.num_layers % plan.stages:
        return laid_out(params, table), None
    layers = _applied(table)
    stored = plan.num_layers // plan.stages
    sent: list[list[list[int]]] = [[[] for _ in range(plan.stages)] for _ in range(plan.stages)]
    for target in range(plan.stages):
        for layer in np.unique(layers[target]):
            sent[layer // stored][target].append(int(layer))
    most = max(len(to) for source in sent for to in source)
    slots = np.zeros((plan.stages, plan.stages, most), np.int32)
    places = np.zeros((plan.stages, plan.repeats * table.shape[2]), np.int32)
    for source, row in enumerate(sent):
        for target, moved in enumerate(row):
            slots[source, target, : len(moved)] = [layer % stored for layer in moved]
            for slot, layer in enumerate(moved):
                places[target, layers[target].reshape(-1) == layer] = source * most + slot
    return params, (slots, places)


def _stage(
    layer: Callable[[Any, Any, Any], Any],
    remat: Callable[[Any], Any],
    plan: Plan,
    stage: Int[Array, " 1"],
    live: Bool[Array, "1 rounds slots"],
    exchange: Any,
    params: Any,
    arrays: tuple[Any, Any],
) -> Any:
    """What one stage does: its layers on one microbatch a tick; returns what it did in the last round, in order.

    A stage that has no microbatch at a tick works on real samples all the same, and its result goes nowhere: numbers
    stay finite, and gradients are exactly zero.
    """
    here, live = stage[0], live[0]
    x, inputs = jax.tree.map(lambda leaf: leaf[0], arrays)
    rounds, slots = live.shape
    params = jax.tree.map(
        lambda leaf: leaf.reshape(rounds, slots, *leaf.shape[1:]).swapaxes(0, 1),
        _exchanged(params, exchange, plan.axes),
    )
    all_live = (assignment(plan.num_layers, plan.stages, plan.repeats) >= 0).all()
    wait = plan.period - plan.stages + 1  # ticks from the last stage to the first, in a circular schedule
    circular = plan.repeats > 1
    ring = [(index, (index + 1) % plan.stages) for index in range(plan.stages if circular else plan.stages - 1)]

    @remat
    def apply(weights: Any, h: Any, which: Array, read: Any) -> Any:
        of_layer, is_live = _at(weights, which)
        out = layer(of_layer, h, read)
        if all_live:
            return out
        return jax.tree.map(lambda new, old: jnp.where(is_live, new, old), out, h)

    def tick(state: tuple[Any, Any, Any], time: Array) -> tuple[tuple[Any, Any, Any], None]:
        came, waiting, done = state
        turn = time - here
        which = jnp.clip(turn // plan.period, 0, rounds - 1)
        microbatch = jnp.clip(turn % plan.period, 0, plan.microbatches - 1)
        returned = _at(waiting, time % wait) if circular else came
        enters = (here == 0) & (jnp.asarray(not circular) | (turn < plan.period))
        h = jax.tree.map(
            lambda new, back, old: jnp.where(enters, new, jnp.where(here == 0, back, old)),
            _at(x, microbatch),
            returned,
            came,
        )
        read = _at(inputs, microbatch)
        h, _ = jax.lax.scan(lambda h, slot: (apply(slot, h, which, read), None), h, (params, live.T))
        # Early ticks write what is no result to the first place, which the first result then takes.
        done = _put(done, h, jnp.maximum(time - (plan.ticks - plan.microbatches), 0))
        came = jax.tree.map(lambda leaf: permute(leaf, plan.axes, ring), h)
        if circular:
            waiting = _put(waiting, came, time % wait)
        return (came, waiting, done), None

    first = _at(x, 0)
    waiting = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (wait, *leaf.shape)), first) if circular else None
    (_, _, done), _ = jax.lax.scan(tick, (first, waiting, x), jnp.arange(plan.ticks))
    return jax.tree.map(lambda leaf: leaf[None], done)


def _exchanged(params: Any, exchange: Any, axes: tuple[str, ...]) -> Any:
    """The parameters that this stage applies, from those that the stages store; see `_arrange`."""
    if exchange is None:
        return params
    slots, places = (table[0] for table in exchange)

    def one(leaf: Array) -> Array:
        sent = leaf[slots.reshape(-1)]
        return jax.lax.all_to_all(sent, axes, split_axis=0, concat_axis=0, tiled=True)[places]

    return jax.tree.map(one, params)


def _at(tree: Any, index: Array | int) -> Any:
    """Entry `index` of every array; the only entry of what all microbatches share."""

    def one(leaf: Array) -> Array:
        return leaf[0] if leaf.shape[0] == 1 else jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(one, tree)


def _put(tree: Any, entry: Any, index: Array) -> Any:
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, entry)
