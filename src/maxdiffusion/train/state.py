"""`TrainState`: everything that training changes, each leaf laid out explicitly; a step donates it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int, Key

from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.pipelines.run_folder import weight_shapes


@struct.dataclass
class TrainState:
    """What a training step maps to the next.

    Attributes:
        step: optimizer steps done, int32.
        params: master weights, float32.
        opt_state: of the optimizer, laid out as the weights.
        ema: averaged weights, float32, laid out as the weights; None where none are kept.
        key: of the run; never changes: noise and times are functions of (key, step, sample).
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    ema: Any
    key: Key[Array, ""]


def state_shapes(model: DiffusionModel, optimizer: optax.GradientTransformation, *, keeps_ema: bool) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s with their shardings; nothing is allocated.

    Args:
        model: made with float32 weights; its layout says where they live.
        optimizer: its state is laid out as the weights that it belongs to.
        keeps_ema: whether averaged weights are kept.

    Raises:
        RuleError: under `strict`, a weight is not sharded as the rules wish.
    """
    replicated = model.layout.replicated
    assert replicated is not None, "training always has a mesh, of one device or more"
    params = weight_shapes(model)

    def scalar(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    opt_state = optax.tree.map_params(
        optimizer,
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=scalar,
    )
    return TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),  # type: ignore[arg-type]
        params=params,
        opt_state=opt_state,
        ema=params if keeps_ema else None,
        key=scalar(jax.eval_shape(lambda: jax.random.key(0))),  # type: ignore[arg-type]
    )


def initial_state(
    model: DiffusionModel, optimizer: optax.GradientTransformation, shapes: TrainState, *, seed: int
) -> TrainState:
    """The state before the first step; every leaf has its own buffers, so that the first step can donate them all.

    Args:
        model: draws its weights from the seed, the same on every mesh.
        optimizer: makes its state.
        shapes: from `state_shapes`.
        seed: of the run.
    """
    key = jax.device_put(jax.random.key(seed), shapes.key.sharding)  # type: ignore[attr-defined]
    params = model.init_weights(jax.random.key(seed))

    def rest(params: Any) -> tuple[Any, Any, Array]:
        # jnp.copy inside jit makes new buffers; an output that is an input would be the same buffer.
        average = None if shapes.ema is None else jax.tree.map(jnp.copy, params)
        return optimizer.init(params), average, jnp.zeros((), jnp.int32)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (shapes.opt_state, shapes.ema, shapes.step))
    opt_state, average, step = jax.jit(rest, out_shardings=shardings)(params)
    return TrainState(step=step, params=params, opt_state=opt_state, ema=average, key=key)


def sampling_weights(state: TrainState) -> Any:
    """The weights to make pictures with: the averaged ones where there are any."""
    return state.params if state.ema is None else state.ema
