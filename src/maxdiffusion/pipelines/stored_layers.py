"""Checkpoints of scanned and of unrolled models are read into each other: the same numbers, stacked or not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxdiffusion.parallel.moments import layer_sharding, stack_sharding

Names = tuple[str, ...]

_PLACEHOLDER = (1,)
"""Shape of what Adafactor keeps in place of an array that it does not need; stacks of layers have one, too."""


def leaf_names(path: Any) -> Names:
    """A path of a tree by what Orbax calls its steps: a list has no other names than its numbers."""
    return tuple(map(_name, path))


def stored_form(like: Any, stored: Any) -> Any:
    """What a checkpoint must hold to be read into `like`: the same tree, with each stack of layers as it is there.

    Args:
        like: tree of `jax.ShapeDtypeStruct` with shardings: weights, their average, or the state of an optimizer.
        stored: tree of what the checkpoint holds, with its shapes.

    Returns:
        `like` itself where nothing is stacked in one and not in the other.
    """
    there = {leaf_names(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(stored)}
    begins = {names[:end] for names in there for end in range(len(names) + 1)}

    def form(tree: Any, at: Names) -> Any:
        def node(path: Any, value: Any) -> Any:
            return of_mapping(value, at + leaf_names(path)) if isinstance(value, Mapping) else value

        return jax.tree_util.tree_map_with_path(node, tree, is_leaf=_is_mapping)

    def of_mapping(tree: Mapping[str, Any], at: Names) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            base, _, number = key.rpartition("_")
            if (*at, key) in begins:
                found[key] = form(value, (*at, key))
            elif (*at, f"{key}_0") in begins:
                layers = {leaf.shape[0] for leaf in jax.tree.leaves(value) if leaf.shape != _PLACEHOLDER}
                for index in range(max(layers, default=1)):
                    found[f"{key}_{index}"] = jax.tree.map(_layer, value)
            elif number.isdigit() and (*at, base) in begins:
                stack = functools.partial(_stack, _count(tree, base), there, (*at, base))
                found[base] = jax.tree_util.tree_map_with_path(stack, value)
            else:
                found[key] = value
        return found

    wanted = form(like, ())
    return like if jax.tree.structure(wanted) == jax.tree.structure(like) else wanted


def from_stored(like: Any, tree: Any) -> Any:
    """The arrays of `like` from those of its `stored_form`, laid out as `like` says.

    Args:
        like: as given to `stored_form`.
        tree: what was read.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(functools.partial(_convert, like), out_shardings=shardings)(tree)


def _convert(like: Any, tree: Any) -> Any:
    def node(like: Any, tree: Any) -> Any:
        return {key: one(like[key], key, tree) for key in like} if isinstance(like, Mapping) else tree

    def one(like: Any, key: str, tree: Mapping[str, Any]) -> Any:
        if key in tree:
            return _convert(like, tree[key])
        if f"{key}_0" in tree:
            return jax.tree.map(_join, like, *(tree[f"{key}_{index}"] for index in range(_count(tree, key))))
        base, _, number = key.rpartition("_")
        return jax.tree.map(functools.partial(_pick, int(number)), like, tree[base])

    return jax.tree.map(node, like, tree, is_leaf=_is_mapping)


def _count(tree: Mapping[str, Any], stack: str) -> int:
    """Number of layers of a stack that a tree holds one by one."""
    parts = (key.rpartition("_") for key in tree)
    return sum(base == stack and number.isdigit() for base, _, number in parts)


def _join(like: Any, *layers: Any) -> Any:
    return layers[0] if layers[0].shape == _PLACEHOLDER == like.shape else jnp.stack(layers)


def _pick(index: int, like: Any, stack: Any) -> Any:
    return stack if stack.shape == _PLACEHOLDER == like.shape else stack[index]


def _layer(leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.shape == _PLACEHOLDER:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=layer_sharding(leaf.sharding, len(leaf.shape)))


def _stack(layers: int, there: Mapping[Names, tuple[int, ...]], at: Names, path: Any, leaf: Any) -> Any:
    if leaf.shape == _PLACEHOLDER == there.get(at + leaf_names(path)):
        return leaf
    return jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype, sharding=stack_sharding(leaf.sharding))


def _is_mapping(node: Any) -> bool:
    return isinstance(node, Mapping)


def _name(entry: Any) -> str:
    if isinstance(entry, jax.tree_util.SequenceKey):
        return str(entry.idx)
    return str(entry.name if isinstance(entry, jax.tree_util.GetAttrKey) else entry.key)
