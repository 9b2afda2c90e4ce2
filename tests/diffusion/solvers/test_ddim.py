"""DDIM against its paper, with recorded noise and by the moments of what it samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import make_grid
from maxdiffusion.diffusion.noise import noise
from maxdiffusion.diffusion.solvers import DDIM, Euler, EulerAncestral
from maxdiffusion.errors import UsageError


def published(eta):
    """Song et al. 2021, equations 12 and 16, with a = alpha^2 (variance preserving)."""

    def update(memory, x, x0, eps, levels, fresh):
        a, next_a = levels[0] ** 2, levels[2] ** 2
        std = eta * np.sqrt((1 - next_a) / (1 - a)) * np.sqrt(1 - a / next_a)
        moved = np.sqrt(next_a) * x0 + np.sqrt(np.maximum(1 - next_a - std**2, 0)) * eps
        return memory, moved if fresh is None else moved + std * fresh

    return update


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("process", ["sd", "zero_snr"])
def test_published_update_with_recorded_noise(gaussian, processes, walk, error, process, eta):
    process = processes[process]
    grid = make_grid(process, 25, "trailing")
    x = gaussian.start(process, grid)
    recorded = np.stack([noise(jax.random.key(1), jnp.arange(64), (1,), step=i) for i in range(25)]) if eta else None
    path = gaussian.sampled(
        jnp.float32(x), grid, recorded, process=process, prediction="v_prediction", solver=DDIM(eta=eta)
    ).trace
    assert error(path, walk(published(eta), process, gaussian, grid, x, recorded)) < 1e-5  # float32, 25 steps


@pytest.mark.parametrize(("process", "spacing"), [("sd", "trailing"), ("flow", "uniform")])
def test_the_ends_of_eta_are_euler_and_ancestral(gaussian, processes, error, process, spacing):
    process = processes[process]
    grid = make_grid(process, 25, spacing)
    x = jnp.float32(gaussian.start(process, grid))
    recorded = np.stack([noise(jax.random.key(1), jnp.arange(64), (1,), step=i) for i in range(25)])
    for solver, same in ((DDIM(), Euler()), (DDIM(eta=1.0), EulerAncestral())):
        paths = [
            gaussian.sampled(x, grid, recorded, process=process, prediction="v_prediction", solver=one).trace
            for one in (solver, same)
        ]
        assert error(*paths) < 1e-5


def test_eta_is_checked():
    for eta in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="from 0"):
            DDIM(eta=eta)
    assert not DDIM().stochastic and DDIM(eta=0.1).stochastic
