"""One objective: the squared error of what the model predicts, per sample, in float32.

Losses come per sample, so that callers bin them by time and give the padding of a ragged batch the weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from maxdiffusion.diffusion.denoiser import Cond, Denoiser
from maxdiffusion.diffusion.noise import noise as draw_noise
from maxdiffusion.diffusion.noise import stream
from maxdiffusion.diffusion.prediction import Prediction, from_x0_eps
from maxdiffusion.diffusion.process import Process
from maxdiffusion.diffusion.timesteps import TimeSampler
from maxdiffusion.errors import UsageError


class Draw(NamedTuple):
    """The random part of a loss: `noise`, the shape of the data, float32; `t`, process times (batch,), float32."""

    noise: Float[Array, "batch ..."]
    t: Float[Array, " batch"]


def draw(
    key: Key[Array, ""],
    indices: Int[Array, " batch"],
    shape: tuple[int, ...],
    *,
    process: Process,
    times: TimeSampler,
    step: int | Int[Array, ""] = 0,
) -> Draw:
    """Noise and times for each sample, independent of each other, of batch size and of mesh.

    Args:
        key: the run's key.
        indices: global index of each sample.
        shape: shape of one sample.
        process: turns the sampler's numbers into times (static).
        times: the time sampler (static).
        step: of training, unless `indices` count on from step to step.
    """
    return Draw(
        noise=draw_noise(stream(key, "noise"), indices, shape, step=step),
        t=process.training_time(times(key, indices, step=step)),
    )


def denoising_loss(
    denoiser: Denoiser,
    x0: Float[Array, "batch ..."],
    cond: Cond,
    drawn: Draw,
    *,
    process: Process,
    prediction: Prediction,
) -> Float[Array, " batch"]:
    """Mean squared error between the model's prediction and its target, per sample.

    Args:
        denoiser: called once, with cache `()`.
        x0: clean data.
        cond: handed to the denoiser.
        drawn: noise and times.
        process: (static).
        prediction: what the denoiser predicts (static).

    Returns:
        float32 (batch,): mean over all dims but the batch.

    Raises:
        UsageError: an unknown prediction type or one that the process refuses, or an output of another shape than `x0`.
    """
    process.check(prediction)
    alpha, sigma = process.alpha_sigma(drawn.t)
    x = process.add_noise(x0, drawn.noise, drawn.t)
    _, output = denoiser((), x, process.timestep(drawn.t), cond)
    if output.shape != x0.shape:
        raise UsageError(f"the denoiser returned {output.shape} for data of shape {x0.shape}: they must be equal")
    target = from_x0_eps(x0, drawn.noise, alpha, sigma, prediction=prediction)
    return jnp.mean(jnp.square(output.astype(jnp.float32) - target), axis=tuple(range(1, x0.ndim)))


def weighted_sum(
    losses: Float[Array, " batch"], weights: Float[Array, " batch"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of weight x loss, sum of weights): add both over micro-batches, then divide once.

    A sample of weight 0 counts for nothing, in value and gradient, even if its loss is not finite.
    """
    weights = weights.astype(jnp.float32)
    return jnp.sum(weights * jnp.where(weights > 0, losses, 0.0)), jnp.sum(weights)
