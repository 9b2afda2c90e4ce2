"""Sampling folds a denoiser over a grid: one scan, one program, no host inside.

`sample` is the verb. `start` and `run` are its two halves, for a denoiser that carries a cache, or for running a grid
piece by piece (`Grid.part`) with the host in between, for instance for a progress bar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxdiffusion.diffusion.denoiser import CacheState, Cond, Denoiser
from maxdiffusion.diffusion.grid import Grid
from maxdiffusion.diffusion.prediction import Prediction, check_prediction, to_x0_eps
from maxdiffusion.diffusion.solvers import Solver, SolverState, Step
from maxdiffusion.errors import UsageError

StepNoise: TypeAlias = Callable[[Int[Array, ""]], Float[Array, "batch ..."]]
"""Number of the step -> standard normal noise; `maxdiffusion.diffusion.noise.step_noise` makes one."""

OnStep: TypeAlias = Callable[[Int[Array, ""], Float[Array, "batch ..."], Float[Array, "batch ..."]], Any]
"""(number of the step, x after it, estimate of x_0 in it) -> a pytree to keep; traced, so no Python side effects."""


class SampleState(NamedTuple):
    """What a step hands to the next."""

    x: Float[Array, "batch ..."]
    solver: SolverState
    cache: CacheState


class Sampled(NamedTuple):
    """`x`: the samples. `trace`: what `on_step` returned, stacked over the steps in front (None without one)."""

    x: Float[Array, "batch ..."]
    trace: Any


def start(x: Float[Array, "batch ..."], *, solver: Solver, cache: CacheState = ()) -> SampleState:
    """The state before the first step.

    Args:
        x: noise times `process.prior_std`, or a noised image; carried in float32 whatever its dtype.
        solver: as for `run`.
        cache: what the denoiser carries at first.
    """
    x = jnp.asarray(x, jnp.float32)
    return SampleState(x=x, solver=solver.init(x), cache=cache)


def run(
    denoiser: Denoiser,
    state: SampleState,
    grid: Grid,
    cond: Cond,
    *,
    solver: Solver,
    prediction: Prediction,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> tuple[SampleState, Any]:
    """Every step of `grid` from `state`.

    Args:
        denoiser: (cache, x, timestep, cond) -> (cache, prediction); called once a step, traced once.
        state: from `start` or an earlier `run`.
        grid: the steps; as an argument of a jitted function, grids of one length share the program.
        cond: handed to the denoiser.
        solver: the rule of a step (static).
        prediction: what the denoiser predicts (static).
        noise: needed by stochastic solvers.
        on_step: see `OnStep`.

    Returns:
        The state after the last step, and the stacked results of `on_step` (None without one).

    Raises:
        UsageError: a stochastic solver without noise, an unknown prediction type, or `epsilon` from a grid whose first
            level has no data in it.
    """
    check_prediction(prediction)
    if prediction == "epsilon" and grid.no_signal:
        raise UsageError(
            "prediction 'epsilon' does not determine the data at the grid's first time, where alpha = 0: "
            "use 'v_prediction', 'velocity' or 'sample', or start the grid later"
        )
    if solver.stochastic and noise is None:
        raise UsageError(f"{type(solver).__name__} is stochastic: pass noise=step_noise(key, indices, shape)")
    batch = state.x.shape[0]

    def body(state: SampleState, xs: tuple[Step, Array, Array]) -> tuple[SampleState, Any]:
        step, timestep, index = xs
        cache, output = denoiser(state.cache, state.x, jnp.full((batch,), timestep, jnp.float32), cond)
        x0, eps = to_x0_eps(output, state.x, step.alpha, step.sigma, prediction=prediction)
        fresh = noise(index).astype(jnp.float32) if noise is not None and solver.stochastic else None
        memory, x = solver.step(state.solver, state.x, x0, eps, step, fresh)
        kept = on_step(index, x, x0) if on_step is not None else None
        return SampleState(x=x, solver=memory, cache=cache), kept

    alpha, sigma = jnp.asarray(grid.alpha), jnp.asarray(grid.sigma)
    steps = Step(alpha[:-1], sigma[:-1], alpha[1:], sigma[1:], jnp.asarray(grid.h))
    return jax.lax.scan(body, state, (steps, jnp.asarray(grid.timestep), jnp.asarray(grid.index)))


def sample(
    denoiser: Denoiser,
    x: Float[Array, "batch ..."],
    grid: Grid,
    cond: Cond,
    *,
    solver: Solver,
    prediction: Prediction,
    noise: StepNoise | None = None,
    on_step: OnStep | None = None,
) -> Sampled:
    """Walk `x` down `grid`; jittable, and sharded as `x` is.

    Args:
        denoiser: (cache, x, timestep, cond) -> (cache, prediction), with cache `()`; it sees `x` in float32.
        x: shape (batch, ...): noise times `process.prior_std`, or a noised image at the grid's first level.
        grid: from `make_grid` or `grid_from_times`.
        cond: handed to the denoiser.
        solver: from `get_solver`, or made (static).
        prediction: what the denoiser predicts (static).
        noise: needed by stochastic solvers, `step_noise(key, indices, x.shape[1:])`.
        on_step: see `OnStep`.

    Returns:
        The samples in the dtype of `x` (carried in float32 throughout), and the trace.

    Raises:
        UsageError: as `run`.
    """
    state, trace = run(
        denoiser,
        start(x, solver=solver),
        grid,
        cond,
        solver=solver,
        prediction=prediction,
        noise=noise,
        on_step=on_step,
    )
    return Sampled(x=state.x.astype(x.dtype), trace=trace)
