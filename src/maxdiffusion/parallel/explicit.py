"""The border between Explicit meshes, which a caller may work with, and the Auto mesh that a layout works on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.parallel.rules import axes_of


@contextlib.contextmanager
def scope(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Puts `mesh` in place of an Explicit mesh that the caller has set with `jax.set_mesh`."""
    if mesh is None or not is_explicit(jax.sharding.get_abstract_mesh()):
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        yield


def enter(x: Any, target: NamedSharding) -> Any:
    """`x` laid out as `target`, on whose Auto mesh it is from here on; its gradient goes back as `x` came."""
    given = jax.typeof(x).sharding
    if is_explicit(given.mesh):
        return _to_auto(target, given, x)
    return jax.lax.with_sharding_constraint(x, target)


def leave(mesh: Mesh | AbstractMesh, y: Any, like: Any) -> Any:
    """`y` as an array of the Explicit mesh that `like` lies on; unchanged where that is not Explicit.

    Args:
        mesh: the Auto mesh that `y` lies on.
        y: the array.
        like: an array of the caller; its spec is kept for the dimensions of `y` that it divides.
    """
    given = jax.typeof(like).sharding
    if not is_explicit(given.mesh) or is_explicit(jax.typeof(y).sharding.mesh) or not isinstance(mesh, Mesh):
        return y
    sizes = dict(zip(given.mesh.axis_names, given.mesh.axis_sizes, strict=True))
    padded = (*given.spec, *(None,) * y.ndim)[: y.ndim]
    fits = (
        axes if size % math.prod(sizes[axis] for axis in axes_of(axes)) == 0 else None
        for axes, size in zip(padded, y.shape, strict=True)
    )
    return _to_explicit(mesh, NamedSharding(given.mesh, P(*fits)), y)


def is_explicit(mesh: Any) -> bool:
    """Whether arrays on this abstract mesh carry their sharding in their type."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _to_auto(target: NamedSharding, given: NamedSharding, x: Any) -> Any:
    with scope(target.mesh):
        return jax.lax.with_sharding_constraint(x, target)


def _to_auto_fwd(target: NamedSharding, given: NamedSharding, x: Any) -> tuple[Any, None]:
    return _to_auto(target, given, x), None


def _to_auto_bwd(target: NamedSharding, given: NamedSharding, _: None, cotangent: Any) -> tuple[Any]:
    return (jax.sharding.reshard(cotangent, given),)


_to_auto.defvjp(_to_auto_fwd, _to_auto_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _to_explicit(mesh: Mesh, target: NamedSharding, y: Any) -> Any:
    return jax.sharding.reshard(y, target)


def _to_explicit_fwd(mesh: Mesh, target: NamedSharding, y: Any) -> tuple[Any, None]:
    return jax.sharding.reshard(y, target), None


def _to_explicit_bwd(mesh: Mesh, target: NamedSharding, _: None, cotangent: Any) -> tuple[Any]:
    with scope(mesh):
        return (jax.lax.with_sharding_constraint(cotangent, NamedSharding(mesh, P(*target.spec))),)


_to_explicit.defvjp(_to_explicit_fwd, _to_explicit_bwd)
