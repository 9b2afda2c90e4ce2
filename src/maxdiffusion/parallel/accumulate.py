"""A batch worked off in parts: each device cuts its own rows, and sums cross the devices once, where they may."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.pipeline import mesh_here
from maxdiffusion.parallel.rules import axes_of

log = logging.getLogger(__name__)
Tree: TypeAlias = Any


def accumulate(
    fn: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    params: Tree,
    batch: Tree,
    shared: Tree,
    *,
    parts: int,
    layout: Layout,
    batch_shardings: Tree,
    param_shardings: Tree,
) -> tuple[Tree, Tree]:
    """`fn(params, part, shared)` for each part of the batch, one after the other.

    Part m of k has the samples m, m + k, m + 2 k, ...: a batch that is cut over devices is cut further without a move.
    Sums are added up in float32, laid out as the parameters. Along mesh axes that share the batch and store no
    parameter, each device adds up its own and they are summed once, after the last part; along the others (fully
    sharded parameters) each part gathers them anew, and its gradient is scattered to where it is stored.

    Args:
        fn: `(params, part, shared) -> (sums, rows)`: sums have the shapes of `params`, rows one entry a sample of the
            part. Sums over the samples must be plain sums: divide by what is known beforehand, or afterwards.
        params: what `fn` reads as a whole.
        batch: tree of arrays whose first dimension is the batch.
        shared: tree of arrays that every part reads.
        parts: how many; times the devices that share the batch, they divide it.
        layout: mesh and rules.
        batch_shardings: a NamedSharding for each array of `batch`; all cut the first dimension alike.
        param_shardings: a NamedSharding for each array of `params`.

    Returns:
        (sums, rows): float32 sums over the whole batch, and rows in the order of the batch.
    """
    rows = axes_of((*jax.tree.leaves(batch_shardings)[0].spec, None)[0])
    own = _summed_once(rows, jax.tree.leaves(param_shardings))
    rest = tuple(axis for axis in rows if axis not in own and layout.sizes[axis] > 1)
    say_once(
        log,
        f"accumulation: {parts} parts, whose gradients are summed once a step along {layout.written(own) or 'no axis'}"
        + (f", and after each part along {layout.written(rest)}, where weights are stored in parts" if rest else ""),
    )

    def pinned(sums: Tree) -> Tree:
        mesh = mesh_here(layout)
        return jax.tree.map(
            lambda leaf, stored: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, stored.spec)),
            sums,
            param_shardings,
        )

    def run(params: Tree, cut: Tree, shared: Tree) -> tuple[Tree, Tree]:
        def one(sums: Tree, part: Tree) -> tuple[Tree, Tree]:
            # Tied to the part: what is made of the parameters alone, their gathering above all, would be moved in front
            # of the loop, and all gathered parameters would lie in memory while it runs.
            held, part = jax.lax.optimization_barrier((params, part))
            new, rows = fn(held, part, shared)
            return pinned(jax.tree.map(lambda old, more: old + more.astype(jnp.float32), sums, new)), rows

        zeros = pinned(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))
        sums, rows = jax.lax.scan(one, zeros, cut)
        return (jax.lax.psum(sums, own) if own else sums), rows

    if own:
        of_rows = P(None, own)
        run = jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(P(), of_rows, P()),
            out_specs=(P(), of_rows),
            axis_names=set(own),
            check_vma=False,
        )

    def cut(leaf: Any, sharding: NamedSharding) -> Any:
        halves = leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(halves, NamedSharding(sharding.mesh, P(None, *sharding.spec)))

    sums, rows = run(params, jax.tree.map(cut, batch, batch_shardings), shared)
    return sums, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:]), rows)


def _summed_once(rows: tuple[str, ...], stored: list[NamedSharding]) -> tuple[str, ...]:
    """The mesh axes that cut a batch, as far as they store no parameter: the first ones, as the cut is nested."""
    storing = {axis for sharding in stored for entry in sharding.spec for axis in axes_of(entry)}
    return tuple(itertools.takewhile(lambda axis: axis not in storing, rows))
