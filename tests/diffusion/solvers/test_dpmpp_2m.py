"""DPM-Solver++(2M) against its paper, at both infinite ends of log SNR too."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import make_grid
from maxdiffusion.diffusion.solvers import DPMpp2M, Euler


def published(memory, x, x0, eps, levels, noise):
    """Lu et al. 2022 (DPM-Solver++), algorithm 2; first order where h or the previous h is infinite."""
    alpha, sigma, next_alpha, next_sigma = levels
    with np.errstate(divide="ignore"):
        h = np.log(next_alpha / next_sigma) - np.log(alpha / sigma)
    data = x0
    if memory is not None and np.isfinite(h) and np.isfinite(memory[1]):
        r = memory[1] / h
        data = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * memory[0]
    return (x0, h), next_sigma / sigma * x - next_alpha * (np.exp(-h) - 1) * data


@pytest.mark.parametrize(
    ("process", "spacing", "prediction"),
    [
        ("sd", "karras", "epsilon"),
        ("sd", "leading", "v_prediction"),
        ("zero_snr", "trailing", "v_prediction"),
        ("shifted_flow", "uniform", "velocity"),
    ],
)
def test_published_update(gaussian, processes, walk, error, process, spacing, prediction):
    process = processes[process]
    grid = make_grid(process, 25, spacing)
    x = gaussian.start(process, grid)
    path = gaussian.sampled(jnp.float32(x), grid, process=process, prediction=prediction, solver=DPMpp2M()).trace
    assert error(path, walk(published, process, gaussian, grid, x)) < 1e-5  # float32, 25 steps


def test_one_and_two_steps_are_eulers(gaussian, processes, error):
    process = processes["flow"]
    for steps in (1, 2):  # the first step has no past, the last has no finite h
        grid = make_grid(process, steps, "uniform")
        x = jnp.linspace(-1, 1, 8)[:, None]
        outs = [
            gaussian.sampled(x, grid, process=process, prediction="velocity", solver=solver).x
            for solver in (DPMpp2M(), Euler())
        ]
        assert error(*outs) < 1e-6
