"""Patch pipelining: patches of a sequence flow through the stages and read what the others left, a step old at most.

PipeFusion (Fang et al. 2024, arXiv 2405.14430), for the steps of a sampler. A layer keeps something of every patch
(keys and values); a patch replaces its own entry and reads all of them: those of the patches before it from this
step, those behind it from the step before. So patches need not wait for one another, and neither do steps: as soon as
a patch has left the last stage, its next step enters the first. The numbers are those of a plain loop over steps,
patches and layers, whatever the number of stages.

A model may have several stacks, each cut over all stages. Each is a lane: at every tick a stage works on one patch
in each lane, and hands all of them to its neighbour at once. The ring carries a patch from the end of a lane to the
start of the next one, and from the last back to the first stage, which finishes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from maxdiffusion.parallel.collectives import permute
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.pipeline import assignment, laid_out, mesh_here, num_stages, stage_axes

Tree: TypeAlias = Any
"""Arrays; what their dimensions are is said where the tree is used."""


class At(NamedTuple):
    """Which patch of which step."""

    step: Int[Array, ""]
    patch: Int[Array, ""]


Layer: TypeAlias = Callable[[Tree, Tree, Tree, Tree, At], tuple[Tree, Tree]]
"""(shared, parameters of the layer, what it keeps of all patches, h, at) -> (h, what it keeps of this patch anew)."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What happens to a patch in a step.

    Attributes:
        enter: (shared, x of the patch, at) -> h, which the lanes hand on.
        lanes: the layer of each stack, in order; all take and give an h of one form.
        leave: (shared, h, x of the patch, at) -> x of the patch, for the next step.
    """

    enter: Callable[[Tree, Tree, At], Tree]
    lanes: tuple[Layer, ...]
    leave: Callable[[Tree, Tree, Tree, At], Tree]


def num_ticks(stages: int, patches: int, steps: int, lanes: int = 1) -> int:
    """Ticks until the last patch has left the last step.

    A patch is back at the first stage after `lanes * stages` ticks: with fewer patches than that, stages wait.

    Args:
        stages: devices along the stage axis.
        patches: parts of the sequence.
        steps: of the sampler.
        lanes: stacks of the model.
    """
    return (steps - 1) * max(patches, lanes * stages) + patches + lanes * stages - 1


def bubble_fraction(stages: int, patches: int, steps: int, lanes: int = 1) -> float:
    """Share of its time that a stage does no useful work; see `num_ticks`."""
    return 1 - steps * patches / num_ticks(stages, patches, steps, lanes)


def rows(layout: Layout, num_layers: int) -> int:
    """Entries of the store of a stack: one a layer, and where stages have unequal numbers of layers, some unused."""
    return assignment(num_layers, num_stages(layout)).size


def run(
    flow: Flow, params: tuple[Tree, ...], stores: tuple[Tree, ...], x: Tree, shared: Tree, *, steps: int, layout: Layout
) -> tuple[tuple[Tree, ...], Tree]:
    """`x` after some steps, and what the layers then keep. Not for training: it is not meant to be differentiated.

    Along the stage axis, a tick moves one patch of h for each lane to the next stage and from the last to the first;
    the result comes from the first stage once a call.

    Args:
        flow: what happens to a patch.
        params: for each lane, a tree of arrays whose first dimension is the layers.
        stores: for each lane, a tree of arrays (`rows`, batch, patches, ...): what each layer keeps of all patches.
        x: a tree of arrays (patches, ...).
        shared: a tree of arrays that every stage has whole.
        steps: number of steps, 1 or more.
        layout: mesh and rules; without stages the same numbers are computed in one place.

    Returns:
        The stores and x, as they were given.
    """
    axes, stages = stage_axes(layout), num_stages(layout)
    tables = [assignment(jax.tree.leaves(lane)[0].shape[0], stages) for lane in params]
    live = tuple(jnp.asarray(table[:, 0] >= 0) for table in tables)
    params = tuple(laid_out(lane, table) for lane, table in zip(params, tables, strict=True))
    patches = jax.tree.leaves(x)[0].shape[0]
    period = max(patches, len(flow.lanes) * stages)
    ticks = num_ticks(stages, patches, steps, len(flow.lanes))

    def on_stage(stage: Array, live: Any, params: Any, stores: Any, x: Tree, shared: Tree) -> tuple[Any, Tree]:
        here = stage[0]
        layers = [(row[0], lane) for row, lane in zip(live, params, strict=True)]

        def at(turn: Array) -> tuple[At, Bool[Array, ""]]:
            """What is worked on this number of ticks after the first patch, and whether there is such a patch."""
            patch, step = turn % period, turn // period
            inside = (turn >= 0) & (step < steps) & (patch < patches)
            return At(jnp.clip(step, 0, steps - 1), jnp.minimum(patch, patches - 1)), inside

        def tick(state: tuple[Any, Any, Tree], time: Array) -> tuple[tuple[Any, Any, Tree], None]:
            came, stores, x = state
            place, _ = at(time)
            entering = flow.enter(shared, _at(x, place.patch), place)
            # At the first stage a lane goes on with what the lane before it has finished.
            befores = [entering, *came[:-1]]
            gone, kept = [], []
            for lane, layer in enumerate(flow.lanes):
                place, inside = at(time - here - lane * stages)
                h = jax.tree.map(lambda first, other: jnp.where(here == 0, first, other), befores[lane], came[lane])
                h, store = _through(layer, shared, layers[lane], stores[lane], h, (place, inside))
                gone.append(h)
                kept.append(store)
            came = _handed_on(gone, axes, stages)
            place, inside = at(time - (len(flow.lanes) * stages - 1))
            old = _at(x, place.patch)
            new = flow.leave(shared, came[-1], old, place)
            x = _put(x, _chosen(inside & (here == 0), new, old), place.patch)
            return (came, tuple(kept), x), None

        first = flow.enter(shared, _at(x, 0), At(jnp.int32(0), jnp.int32(0)))
        state = [first] * len(flow.lanes), stores, x
        (_, stores, x), _ = jax.lax.scan(tick, state, jnp.arange(ticks))
        return stores, jax.tree.map(lambda leaf: leaf[None], x)

    index = jnp.arange(stages)
    if not axes:
        stores, x = on_stage(index, live, params, stores, x, shared)
        return stores, jax.tree.map(lambda leaf: leaf[0], x)
    by_stage = P(axes)
    spread = jax.shard_map(
        on_stage,
        mesh=mesh_here(layout),
        in_specs=(by_stage, by_stage, by_stage, by_stage, P(), P()),
        out_specs=(by_stage, by_stage),
        axis_names=set(axes),
        check_vma=False,
    )
    # Outside of jit, a shard_map that leaves axes to the partitioner cannot run.
    stores, x = jax.jit(spread, inline=True)(index, live, params, stores, x, shared)
    return stores, jax.tree.map(lambda leaf: _of_first(leaf, index), x)


def _through(
    layer: Layer,
    shared: Tree,
    layers: tuple[Bool[Array, " slots"], Tree],
    store: Tree,
    h: Tree,
    now: tuple[At, Bool[Array, ""]],
) -> tuple[Tree, Tree]:
    """`h` after the layers that this stage has of a stack, and their store; only a patch that there is is kept."""
    place, inside = now

    def one(state: tuple[Tree, Tree], xs: tuple[Array, Array, Tree]) -> tuple[tuple[Tree, Tree], None]:
        h, store = state
        slot, is_live, weights = xs
        kept = _at(store, slot)
        out, fresh = layer(shared, weights, kept, h, place)

        def write(leaf: Array, new: Array) -> Array:
            start = (slot, 0, place.patch, *(0,) * (leaf.ndim - 3))
            sizes = (1, leaf.shape[1], 1, *leaf.shape[3:])
            old = jax.lax.dynamic_slice(leaf, start, sizes)
            new = jnp.where(inside, new.astype(leaf.dtype).reshape(sizes), old)
            return jax.lax.dynamic_update_slice(leaf, new, start)

        return (_chosen(is_live, out, h), jax.tree.map(write, store, fresh)), None

    live, weights = layers
    (h, store), _ = jax.lax.scan(one, (h, store), (jnp.arange(live.shape[0]), live, weights))
    return h, store


def _handed_on(gone: list[Tree], axes: tuple[str, ...], stages: int) -> list[Tree]:
    """What the stage before has made in each lane; one move for each array of h."""
    if not axes:
        return gone
    ring = [(index, (index + 1) % stages) for index in range(stages)]
    lanes = jax.tree.map(lambda *parts: permute(jnp.stack(parts), axes, ring), *gone)
    return [_at(lanes, lane) for lane in range(len(gone))]


def _of_first(leaf: Array, index: Int[Array, " stages"]) -> Array:
    first = (index == 0).reshape(-1, *(1,) * (leaf.ndim - 1))
    return jnp.sum(jnp.where(first, leaf, jnp.zeros((), leaf.dtype)), axis=0, dtype=leaf.dtype)


def _chosen(condition: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _at(tree: Tree, index: Array | int) -> Tree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(tree: Tree, entry: Tree, index: Array) -> Tree:
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, entry)
