"""`TrainState`: everything that training changes, each leaf laid out explicitly; a step donates it."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int, Key

from maxdiffusion.log import say_once
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel.moments import moment_sharding
from maxdiffusion.parallel.multihost import everywhere
from maxdiffusion.pipelines.run_folder import weight_shapes

log = logging.getLogger(__name__)


@struct.dataclass
class TrainState:
    """What a training step maps to the next.

    Attributes:
        step: optimizer steps done, int32.
        params: master weights, float32, or bfloat16 where the recipe says so.
        opt_state: of the optimizer, float32, laid out as the weights.
        ema: averaged weights, float32, laid out as the weights; None where none are kept.
        key: of the run; never changes: noise and times are functions of (key, step, sample).
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    ema: Any
    key: Key[Array, ""]


def state_shapes(
    model: DiffusionModel, optimizer: optax.GradientTransformation, *, keeps_ema: bool, master_dtype: Any = jnp.float32
) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s with their shardings; nothing is allocated.

    What of the optimizer's state is whole on every device is said once in the log.

    Args:
        model: made with float32 weights; its layout says where they live.
        optimizer: its state is laid out as the weights that it belongs to.
        keeps_ema: whether averaged weights are kept.
        master_dtype: dtype that the weights are kept in; moments and average are float32.

    Raises:
        RuleError: under `strict`, a weight is not sharded as the rules wish.
    """
    replicated = model.layout.replicated
    assert replicated is not None, "training always has a mesh, of one device or more"
    params = weight_shapes(model)

    def scalar(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),  # type: ignore[arg-type]
        params=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, master_dtype, sharding=leaf.sharding), params
        ),
        opt_state=_laid_out(jax.eval_shape(optimizer.init, params), params, scalar),
        ema=params if keeps_ema else None,
        key=scalar(jax.eval_shape(lambda: jax.random.key(0))),  # type: ignore[arg-type]
    )


def _laid_out(opt_state: Any, params: Any, scalar: Any) -> Any:
    """The optimizer's state with shardings: an array belongs to the weight whose path ends its own."""
    weights = {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    whole: list[Any] = []

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        names = _names(path)
        weight = weights.get(names)
        field = path[-len(names) - 1] if weight is not None else None
        found = weight and moment_sharding(
            getattr(field, "name", ""), leaf.shape, weight=weight.shape, sharding=weight.sharding
        )
        if found is None:
            found = scalar(leaf).sharding
        if found.is_fully_replicated and leaf.size > _SMALL and not (weight and weight.sharding.is_fully_replicated):
            whole.append(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found)

    placed = jax.tree_util.tree_map_with_path(one, opt_state)
    size, total = (sum(_bytes(leaf) for leaf in leaves) for leaves in (whole, jax.tree.leaves(opt_state)))
    if whole and jax.tree.leaves(params)[0].sharding.mesh.size > 1:
        say_once(
            log,
            f"optimizer state: {len(whole)} arrays of sharded weights, {size} of {total} bytes, are "
            "whole on every device: averages along the dimension that is sharded",
        )
    return placed


_SMALL = 4
"""Numbers of an optimizer's counters, coefficients and placeholders, about which nothing is said."""


def _names(path: Any) -> tuple[str, ...]:
    """The names that end a path: those of a weight, behind what the optimizer's own structure adds."""
    names: list[str] = []
    for entry in reversed(path):
        if not isinstance(entry, jax.tree_util.DictKey):
            break
        names.append(entry.key)
    return tuple(reversed(names))


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def initial_state(
    model: DiffusionModel, optimizer: optax.GradientTransformation, shapes: TrainState, *, seed: int, params: Any = None
) -> TrainState:
    """The state before the first step; every leaf has its own buffers, so that the first step can donate them all.

    Args:
        model: draws its weights from the seed, the same on every mesh.
        optimizer: makes its state.
        shapes: from `state_shapes`.
        seed: of the run.
        params: weights to begin with, laid out as the model's, which the state owns from here on; None draws them.
    """
    key = everywhere(jax.random.key(seed), shapes.key.sharding)  # type: ignore[attr-defined]
    params = model.init_weights(jax.random.key(seed)) if params is None else _as_float32(params)

    def rest(params: Any) -> tuple[Any, Any, Array]:
        # jnp.copy inside jit makes new buffers; an output that is an input would be the same buffer.
        average = None if shapes.ema is None else jax.tree.map(jnp.copy, params)
        return optimizer.init(params), average, jnp.zeros((), jnp.int32)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (shapes.opt_state, shapes.ema, shapes.step))
    opt_state, average, step = jax.jit(rest, out_shardings=shardings)(params)
    kept = jax.tree.map(lambda leaf: leaf.dtype, shapes.params)
    if jax.tree.map(lambda leaf: leaf.dtype, params) != kept:
        where = jax.tree.map(lambda leaf: leaf.sharding, shapes.params)
        params = jax.jit(
            lambda tree: jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), tree, kept), out_shardings=where
        )(params)
    return TrainState(step=step, params=params, opt_state=opt_state, ema=average, key=key)


def _as_float32(params: Any) -> Any:
    if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
        return params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree), out_shardings=shardings)(
        params
    )


def sampling_weights(state: TrainState) -> Any:
    """The weights to make pictures with: the averaged ones where there are any."""
    return state.params if state.ema is None else state.ema
