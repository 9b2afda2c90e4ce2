"""Weights of a run that become quantised while they are read: a tensor at a time, so that the whole is never here.

Stacks of layers may be stored layer by layer, and the other way round, as in `stored_layers`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from maxdiffusion.nn.quantisation import Storage, storing
from maxdiffusion.pipelines.run_folder import opened_part, weights_part

Flat = Mapping[str, Any]
"""Leaves by their path joined by `/`."""


def read_quantised(
    run: str | Path, like: Any, kernels: Mapping[str, Storage], *, master_dtype: Any = jnp.float32, step: int | None
) -> tuple[Any, int]:
    """The weights to make pictures with, as `read_weights`, their kernels stored quantised.

    On the devices there are never more than the quantised weights, the largest tensor and a little.

    Args:
        run: the run's folder.
        like: tree of float32 `jax.ShapeDtypeStruct` with the shardings to read into.
        kernels: how each is stored, by its path.
        master_dtype: of the run's trained weights, which are read where it keeps no averaged ones.
        step: of the checkpoint; None for the newest whole one.

    Raises:
        UsageError: there is no checkpoint, or it is of another model.
    """
    step, part, like = weights_part(run, like, master_dtype=master_dtype, step=step)
    wanted: Flat = flatten_dict(like, sep="/")  # type: ignore[assignment]
    made: dict[str, Any] = {}
    with opened_part(run, step, part, like) as (folder, form):
        there: Flat = flatten_dict(form, sep="/")  # type: ignore[assignment]
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            for batch in _batches(_units(wanted, there), there):
                names = {name for unit in batch for name in unit.sources}
                some = unflatten_dict({name: there[name] for name in names}, sep="/")
                arguments = ocp.checkpoint_utils.construct_restore_args(some)
                restore = ocp.args.PyTreeRestore(some, restore_args=arguments, partial_restore=True)
                read: dict[str, Any] = flatten_dict(reader.restore(folder, args=restore), sep="/")  # type: ignore
                for unit in batch:
                    sources = [read.pop(name) for name in unit.sources]
                    for target, index in unit.targets:
                        made[target] = kept(sources, wanted[target], kernels.get(target), index=index)
                    del sources
    return unflatten_dict({name: made[name] for name in wanted}, sep="/"), step


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What is read together: stored tensors, and what is made of them.

    Attributes:
        sources: tensors of the checkpoint.
        targets: leaves, each with its layer in a stack that is the only source; None where there is no such stack.
    """

    sources: tuple[str, ...]
    targets: tuple[tuple[str, int | None], ...]


def _units(wanted: Flat, there: Flat) -> list[_Unit]:
    found: dict[tuple[str, ...], list[tuple[str, int | None]]] = {}
    for name in wanted:
        sources, index = _sources(name, there)
        found.setdefault(sources, []).append((name, index))
    return [_Unit(sources=sources, targets=tuple(targets)) for sources, targets in found.items()]


def _sources(name: str, there: Flat) -> tuple[tuple[str, ...], int | None]:
    """The tensors that a leaf is made of, and which layer of the only one it is."""
    if name in there:
        return (name,), None
    parts = name.split("/")
    for place, part in enumerate(parts):

        def at(other: str, place: int = place) -> str:
            return "/".join([*parts[:place], other, *parts[place + 1 :]])

        layers = (at(f"{part}_{number}") for number in itertools.count())
        stack = tuple(itertools.takewhile(there.__contains__, layers))
        if stack:
            return stack, None
        base, _, number = part.rpartition("_")
        if number.isdigit() and at(base) in there:
            return (at(base),), int(number)
    raise AssertionError(name)  # the form of the checkpoint was checked


def _batches(units: Sequence[_Unit], there: Flat) -> Iterator[list[_Unit]]:
    """Units that are read at once: as much as the largest of them alone, since each reading takes its time."""

    def size(unit: _Unit) -> int:
        return sum(math.prod(there[name].shape) * there[name].dtype.itemsize for name in unit.sources)

    most = max(map(size, units))
    batch: list[_Unit] = []
    for unit in units:
        if batch and sum(map(size, batch)) + size(unit) > most:
            yield batch
            batch = []
        batch.append(unit)
    yield batch


def kept(sources: Sequence[jax.Array], like: Any, storage: Storage | None, *, index: int | None = None) -> Any:
    """A leaf from what is stored for it, quantised if it is a kernel.

    Args:
        sources: the tensor, or the layers of a stack.
        like: `jax.ShapeDtypeStruct` with the sharding of the leaf.
        storage: how it is kept; None as it is.
        index: which layer of a stack, where the source is one.
    """
    stacks = len(sources) > 1 or sources[0].ndim < len(like.shape)
    if not stacks and storage is not None:
        return storing(storage, tuple(like.shape), like.sharding, index)(sources[0])
    if not stacks:
        return sources[0] if index is None else _chosen(like.sharding, index)(sources[0])
    layers: list[Any] = list(sources)
    if storage is not None:
        for number, layer in enumerate(sources):
            layers[number] = storing(storage, layer.shape, None)(layer)
    form = like if storage is None else storage.form(like)
    return _stacked(jax.tree.structure(form), *(leaf.sharding for leaf in jax.tree.leaves(form)))(layers)


@functools.lru_cache(maxsize=4096)
def _stacked(structure: Any, *shardings: Any) -> Any:
    def stack(layers: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)

    placed = None if None in shardings else jax.tree.unflatten(structure, shardings)
    return jax.jit(stack, out_shardings=placed)


@functools.lru_cache(maxsize=4096)
def _chosen(sharding: Any, index: int) -> Any:
    return jax.jit(lambda stack: stack[index], out_shardings=sharding)
