"""Sampling by patch pipelining: exact steps first, then steps that overlap; approximate, and said to be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.diffusion.denoiser import CacheState, Cond
from maxdiffusion.diffusion.grid import Grid
from maxdiffusion.diffusion.prediction import Prediction, to_x0_eps
from maxdiffusion.diffusion.sample import run, start
from maxdiffusion.diffusion.solvers import Solver, Step
from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.log import say_once
from maxdiffusion.models.flux import FlaxFluxTransformer2DModel
from maxdiffusion.models.flux_patches import cut_of, empty_stores, in_front, joined, patched_steps, synchronous
from maxdiffusion.parallel.patches import bubble_fraction
from maxdiffusion.parallel.pipeline import num_stages

log = logging.getLogger(__name__)


def sample_patched(
    model: FlaxFluxTransformer2DModel,
    params: Any,
    x: Float[Array, "batch image channels"],
    grid: Grid,
    cond: Mapping[str, Any],
    *,
    solver: Solver,
    prediction: Prediction = "velocity",
) -> Float[Array, "batch image channels"]:
    """Walks `x` down `grid` as `sample` does, the steps after the warm-up by patch pipelining; jittable.

    The first `pipeline_warmup_steps` are exact. After them, a patch reads keys and values of this step for the patches
    before it and of the last step for the others, so the result is approximate, the less so the more steps are warm-up;
    it does not depend on the number of stages.

    Args:
        model: with `pipeline_patches` and `scan_layers=True`.
        params: its weights.
        x: noise times `process.prior_std`, as image tokens.
        grid: its `timestep` is what the model takes: for FLUX.1 0 to 1, `FlowMatching(timestep_scale=1)`.
        cond: keywords of the model's call other than `hidden_states` and `timestep`.
        solver: any that draws no noise.
        prediction: what the model predicts.

    Returns:
        The samples in the dtype of `x`.

    Raises:
        UsageError: the model has no patches or more than image tokens, the solver draws noise, or an input does not
            fit.
    """
    if solver.stochastic:
        raise UsageError(
            f"{type(solver).__name__} draws noise at every step, which patch pipelining does not do: use solver "
            "'euler', or leave pipeline_patches out"
        )
    layout, num_image = model.layout, x.shape[1]
    _check_names(model, cond)
    cut = cut_of(model, num_image, cond["encoder_hidden_states"].shape[1])
    warmup = min(model.runtime.pipeline.warmup_steps or 1, grid.num_steps)
    say_once(log, _told(cut.patches, warmup, grid.num_steps, num_stages(layout)))

    def exact(cache: CacheState, x: Array, timestep: Array, cond: Cond) -> tuple[CacheState, Array]:
        return synchronous(model, params, cache, x, timestep, cond)

    with layout.scope():
        tokens, cond = jax.tree.map(layout.enter, (x, dict(cond)))
        state = start(tokens, solver=solver, cache=empty_stores(model, num_image, cond))
        state, _ = run(exact, state, grid.part(0, warmup), cond, solver=solver, prediction=prediction)
        out = state.x
        if warmup < grid.num_steps:
            rest = grid.part(warmup)
            alpha, sigma = jnp.asarray(rest.alpha), jnp.asarray(rest.sigma)
            levels = Step(alpha[:-1], sigma[:-1], alpha[1:], sigma[1:], jnp.asarray(rest.h))

            def update(carried: tuple[Array, Any], velocity: Array, step: Array) -> tuple[Array, Any]:
                x, memory = carried
                now = Step(*(level[step] for level in levels))
                x0, eps = to_x0_eps(velocity, x, now.alpha, now.sigma, prediction=prediction)
                memory, x = solver.step(memory, x, x0, eps, now, None)
                return x, memory

            def of_patch(leaf: Array) -> Array:
                """What a solver carries is the like of x, or one number for all of it."""
                if leaf.shape == state.x.shape:
                    return in_front(leaf, cut.patches, cut.image)
                return jnp.broadcast_to(leaf[None], (cut.patches, *leaf.shape))

            carried = (of_patch(state.x), jax.tree.map(of_patch, state.solver))
            timesteps = jnp.broadcast_to(jnp.asarray(rest.timestep)[:, None], (rest.num_steps, x.shape[0]))
            _, (by_patch, _) = patched_steps(model, params, state.cache, carried, timesteps, cond, update)
            out = joined(by_patch, num_image)
    return layout.leave(out.astype(x.dtype), like=x)


def _check_names(model: FlaxFluxTransformer2DModel, cond: Mapping[str, Any]) -> None:
    """Refuses keywords that the model's call lacks, and asks for those that it needs.

    Raises:
        UsageError: one is missing, or unknown.
    """
    needed = model.call_shapes(1, height=2, width=2, text=1).keys() - {"hidden_states", "timestep"}
    known = sorted(needed | {"encoder_attention_mask", "guidance"})
    unknown = next((name for name in cond if name not in known), None)
    if unknown is not None:
        raise UsageError(f"cond['{unknown}'] is no keyword of the model's call: {nearest(unknown, known)}")
    missing = sorted(needed - cond.keys())
    if missing:
        raise UsageError(f"cond lacks {', '.join(missing)}: give what the model takes beside image tokens")


def _told(patches: int, warmup: int, steps: int, stages: int) -> str:
    if warmup == steps:
        return (
            f"patch pipelining: pipeline_warmup_steps covers all {steps} steps, so every one is exact and none overlap"
        )
    if patches == 1:
        return "patch pipelining: pipeline_patches=1 is the whole sequence, so every step is exact and none overlap"
    share = bubble_fraction(stages, patches, steps - warmup, lanes=2)
    speed = f"{stages} stages, bubble {share:.0%}" if stages > 1 else "one stage, so nothing runs at once"
    return (
        f"patch pipelining is approximate: after {warmup} exact of {steps} steps, each of {patches} patches reads what "
        f"the patches behind it were a step ago ({speed}); more pipeline_warmup_steps come closer, without "
        "pipeline_patches every step is exact"
    )
