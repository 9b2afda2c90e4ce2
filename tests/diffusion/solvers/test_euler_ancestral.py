"""Ancestral sampling against the published step with recorded noise, and by the moments of what it samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import make_grid
from maxdiffusion.diffusion.noise import noise
from maxdiffusion.diffusion.solvers import DDIM, EulerAncestral


def published(memory, x, x0, eps, levels, fresh):
    """k-diffusion's step on x / alpha: Euler down to s_down, then noise of s_up."""
    alpha, sigma, next_alpha, next_sigma = levels
    y, s, to = x / alpha, sigma / alpha, next_sigma / next_alpha
    up = np.sqrt(to**2 * (s**2 - to**2) / s**2)
    down = np.sqrt(to**2 - up**2)
    return memory, next_alpha * (y + (y - x0) / s * (down - s) + fresh * up)


@pytest.mark.parametrize("process", ["sd", "flow"])
def test_published_update_with_recorded_noise(gaussian, processes, walk, error, even_grid, process):
    process = processes[process]
    grid = even_grid(process, 25)
    x = gaussian.start(process, grid)
    recorded = np.stack([noise(jax.random.key(2), jnp.arange(64), (1,), step=i) for i in range(25)])
    path = gaussian.sampled(
        jnp.float32(x), grid, recorded, process=process, prediction="v_prediction", solver=EulerAncestral()
    ).trace
    assert error(path, walk(published, process, gaussian, grid, x, recorded)) < 1e-5  # float32, 25 steps


def moments(gaussian, process, grid, mean, variance):
    """What exact arithmetic makes of a Gaussian: every step is x' = a x + b + c n, so two numbers tell it all."""
    alpha, sigma = process.levels(np.asarray(grid.t, np.float64))
    for i in range(grid.num_steps):
        ratio = sigma[i + 1] * alpha[i] / (alpha[i + 1] * sigma[i])

        def mean_step(x, i=i, ratio=ratio):
            x0, eps = gaussian.estimates(x, alpha[i], sigma[i])
            return alpha[i + 1] * x0 + sigma[i + 1] * ratio * eps

        slope = mean_step(1.0) - mean_step(0.0)
        mean = mean_step(mean)
        variance = slope**2 * variance + sigma[i + 1] ** 2 * (1 - ratio**2)
    return mean, variance


@pytest.mark.parametrize("solver", [EulerAncestral(), DDIM(eta=1.0)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("process", "spacing"), [("zero_snr", "trailing"), ("flow", "uniform")])
def test_moments(gaussian, processes, process, spacing, solver):
    process, count, steps = processes[process], 20_000, 50
    grid = make_grid(process, steps, spacing)
    indices = jnp.arange(count)
    x = noise(jax.random.key(5), indices, (1,))
    recorded = jnp.stack([noise(jax.random.key(5), indices, (1,), step=i + 1) for i in range(steps)])
    out = gaussian.sampled(x, grid, recorded, process=process, prediction="velocity", solver=solver).x
    mean, variance = moments(gaussian, process, grid, 0.0, 1.0)
    spread = np.sqrt(variance)
    out = np.asarray(out, np.float64)
    assert abs(out.mean() - mean) < 5 * spread / np.sqrt(count)  # five standard errors
    assert abs(out.std() - spread) < 5 * spread / np.sqrt(2 * count)
    assert abs(mean - gaussian.mean) < 1e-9  # every step keeps the mean
    finer = moments(gaussian, process, make_grid(process, 500, spacing), 0.0, 1.0)[1]
    assert abs(np.sqrt(finer) - gaussian.std) < 0.25 * abs(spread - gaussian.std)  # ten times the steps: first order
