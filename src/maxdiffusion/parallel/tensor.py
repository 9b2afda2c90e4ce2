"""Products whose sums over devices are made once: several that read one stream, and several that add up to one.

Left to the partitioner, every product with a cut kernel is summed over its mesh axes on its own: three all-reduces for
the gradient of what queries, keys and values read, where one will do (Shoeybi et al. 2019, the operators f and g).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.parallel.layout import Layout, partition

Axes: TypeAlias = Sequence[tuple[str, ...]]
Names: TypeAlias = tuple[str | None, ...]
_STREAM = ("activation_batch", "activation_length", "activation_embed")


def fan_out(
    layout: Layout,
    product: Callable[[Array, Array], Array],
    x: Float[Array, "b l embed"],
    kernels: Sequence[Float[Array, "embed ..."]],
    names: Sequence[Names],
) -> list[Array]:
    """`product(x, kernel)` for each kernel; the gradient of `x` is summed over the mesh axes that cut them once.

    Args:
        layout: mesh and rules.
        product: contracts the last dimension of the first with the first of the second.
        x: what all read.
        kernels: laid out for use.
        names: logical axes of each kernel.
    """
    cuts = [layout.cut_in_use(name, kernel.shape) for kernel, name in zip(kernels, names, strict=True)]
    stream = layout.resolve(*_STREAM, shape=x.shape).axes
    axes = _shared([cut[1:] for cut in cuts], stream)
    if not axes or any(cut[0] for cut in cuts):
        return [product(x, kernel) for kernel in kernels]

    def run(x: Array, *kernels: Array) -> tuple[Array, ...]:
        return tuple(product(x[0], kernel) for kernel in kernels)

    # A copy for each device: then shard_map sums no gradient, and the partitioner sums that of the copies once.
    copies = jnp.broadcast_to(x[None], (layout.size(axes), *x.shape))
    outs = tuple(partition((*stream[:2], *cut[1:])) for cut in cuts)
    return list(layout.mapped(run, (partition((axes, *stream)), *map(partition, cuts)), outs)(copies, *kernels))


def fan_in(
    layout: Layout,
    product: Callable[[Array, Array], Array],
    xs: Sequence[Float[Array, "b l ..."]],
    kernels: Sequence[Float[Array, "... embed"]],
    names: Sequence[Names],
) -> Float[Array, "b l embed"]:
    """The sum of `product(x, kernel)` over all pairs; summed over the mesh axes that cut the kernels once.

    Args:
        layout: mesh and rules.
        product: contracts the dimensions of the first behind (b, l) with all but the last of the second.
        xs: what each kernel reads.
        kernels: laid out for use.
        names: logical axes of each kernel.
    """
    cuts = [layout.cut_in_use(name, kernel.shape) for kernel, name in zip(kernels, names, strict=True)]
    stream = layout.resolve(*_STREAM, shape=(*xs[0].shape[:2], kernels[0].shape[-1])).axes
    axes = _shared([cut[:-1] for cut in cuts], stream)
    if not axes or any(cut[-1] for cut in cuts):
        return functools.reduce(jnp.add, map(product, xs, kernels))

    def run(*arrays: Array) -> Array:
        return functools.reduce(jnp.add, map(product, arrays[: len(xs)], arrays[len(xs) :]))[None]

    reads = [partition((*stream[:2], *cut[:-1])) for cut in cuts]
    parts = layout.mapped(run, (*reads, *map(partition, cuts)), partition((axes, *stream)))(*xs, *kernels)
    return jnp.sum(parts, axis=0, dtype=parts.dtype)


def _shared(cuts: Sequence[Axes], stream: Axes) -> tuple[str, ...]:
    """The mesh axes that cut one dimension of every kernel, and neither the tokens nor their width; else none."""
    found = {axes for cut in cuts for axes in cut if axes}
    once = all(len([axes for axes in cut if axes]) == 1 for cut in cuts)
    if len(found) != 1 or not once or stream[2]:
        return ()
    (axes,) = found
    return () if set(axes) & {*stream[0], *stream[1]} else axes
