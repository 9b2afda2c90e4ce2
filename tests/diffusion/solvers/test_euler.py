"""Euler's step against the published one, in the coordinates where it is published."""

import jax.numpy as jnp
import pytest

from maxdiffusion.diffusion.grid import make_grid
from maxdiffusion.diffusion.solvers import Euler


def karras(memory, x, x0, eps, levels, noise):
    """Karras et al. 2022, algorithm 1 without churn: Euler on x / alpha over sigma / alpha."""
    alpha, sigma, next_alpha, next_sigma = levels
    y, s, next_s = x / alpha, sigma / alpha, next_sigma / next_alpha
    return memory, next_alpha * (y + (next_s - s) * (y - x0) / s)


def straight(memory, x, x0, eps, levels, noise):
    """Rectified flow: x + (t' - t) v."""
    return memory, x + (levels[3] - levels[1]) * (eps - x0)


@pytest.mark.parametrize(
    ("process", "spacing", "prediction", "update"),
    [("sd", "trailing", "epsilon", karras), ("shifted_flow", "uniform", "velocity", straight)],
)
def test_published_update(gaussian, processes, walk, error, process, spacing, prediction, update):
    process = processes[process]
    grid = make_grid(process, 25, spacing)
    x = gaussian.start(process, grid)
    path = gaussian.sampled(jnp.float32(x), grid, process=process, prediction=prediction, solver=Euler()).trace
    assert error(path, walk(update, process, gaussian, grid, x)) < 1e-5  # float32, 25 steps


def test_it_is_deterministic_and_carries_nothing():
    assert not Euler().stochastic
    assert Euler().init(jnp.zeros((2, 1))) == ()
    assert hash(Euler()) == hash(Euler())
