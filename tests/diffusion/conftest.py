"""The Gaussian oracle: for data N(mean, std^2) the ideal denoiser and the end of every deterministic path are exact."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import Grid, grid_from_times
from maxdiffusion.diffusion.prediction import from_x0_eps
from maxdiffusion.diffusion.process import FlowMatching, Process, VariancePreserving
from maxdiffusion.diffusion.sample import Sampled, sample


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@dataclass(frozen=True)
class Gaussian:
    """Data N(mean, std^2) in one dim, everything exact in float64 unless it says device."""

    mean: float = 0.7
    std: float = 0.5

    def estimates(self, x, alpha, sigma):
        """E[x_0 | x] and E[eps | x] (device or host)."""
        centred = (x - alpha * self.mean) / (alpha**2 * self.std**2 + sigma**2)
        return self.mean + alpha * self.std**2 * centred, sigma * centred

    def denoiser(self, process: Process, prediction: str):
        """The ideal denoiser on the device; it knows nothing but `timestep`."""
        scale = process.timestep_scale if isinstance(process, FlowMatching) else 1.0

        def denoise(cache, x, timestep, cond):
            alpha, sigma = (level[:, None] for level in process.alpha_sigma(timestep / scale))
            x0, eps = self.estimates(x, alpha, sigma)
            return cache, from_x0_eps(x0, eps, alpha[:, 0], sigma[:, 0], prediction=prediction)

        return denoise

    def marginal_std(self, alpha, sigma):
        return np.sqrt(np.asarray(alpha, np.float64) ** 2 * self.std**2 + np.asarray(sigma, np.float64) ** 2)

    def start(self, process: Process, grid: Grid, count: int = 64) -> np.ndarray:
        """Evenly spread points of the marginal at the grid's first time, (count, 1)."""
        alpha, sigma = process.levels(np.asarray(grid.t[0], np.float64))
        return alpha * self.mean + self.marginal_std(alpha, sigma) * np.linspace(-2, 2, count)[:, None]

    def end(self, process: Process, grid: Grid, x: np.ndarray) -> np.ndarray:
        """Where the probability-flow ODE takes x by the end of the grid: the quantile of x does not change."""
        (a, b), (s, e) = process.levels(np.asarray(grid.t, np.float64)[[0, -1]])
        return b * self.mean + self.marginal_std(b, e) / self.marginal_std(a, s) * (x - a * self.mean)

    @partial(jax.jit, static_argnames=("self", "process", "prediction", "solver"))
    def sampled(self, x, grid, noises=None, *, process, prediction, solver) -> Sampled:
        """`sample` with the ideal denoiser and noises (steps, batch, 1); the trace holds x after each step."""
        return sample(
            self.denoiser(process, prediction),
            x,
            grid,
            None,
            solver=solver,
            prediction=prediction,
            noise=None if noises is None else lambda index: noises[index],
            on_step=lambda index, x, x0: x,
        )


@pytest.fixture(scope="session")
def gaussian() -> Gaussian:
    return Gaussian()


def even_grid(process: Process, num_steps: int) -> Grid:
    """Steps of equal h between two levels that every process has; what orders of convergence are defined on."""
    return grid_from_times(process, process.time_at(np.exp(np.linspace(np.log(12.0), np.log(0.05), num_steps + 1))))


@pytest.fixture(scope="session")
def resting():
    """A grid with idle steps behind it, up to `num_steps`, so that several lengths share a program (read the trace)."""

    def rest(grid: Grid, num_steps: int) -> Grid:
        more = num_steps - grid.num_steps
        return dataclasses.replace(
            grid,
            t=np.pad(grid.t, (0, more), mode="edge"),
            alpha=np.pad(grid.alpha, (0, more), mode="edge"),
            sigma=np.pad(grid.sigma, (0, more), mode="edge"),
            timestep=np.pad(grid.timestep, (0, more), mode="edge"),
            h=np.pad(grid.h, (0, more)),
            index=np.arange(num_steps, dtype=np.int32),
        )

    return rest


@pytest.fixture(scope="session", name="even_grid")
def _even_grid():
    return even_grid


PROCESSES = {
    "sd": VariancePreserving(),
    "zero_snr": VariancePreserving(zero_terminal_snr=True),
    "flow": FlowMatching(),
    "shifted_flow": FlowMatching(shift=3.0),
}


@pytest.fixture(scope="session", name="processes")
def _processes() -> dict[str, Process]:
    return PROCESSES


@pytest.fixture(scope="session")
def walk():
    """A published update in numpy float64, folded over a grid: walk(update, process, gaussian, grid, x, noises)."""

    def fold(update, process, gaussian, grid, x, noises=None):
        alpha, sigma = process.levels(np.asarray(grid.t, np.float64))
        memory, path = None, []
        for i in range(grid.num_steps):
            x0, eps = gaussian.estimates(x, alpha[i], sigma[i])
            fresh = None if noises is None else np.asarray(noises[i], np.float64)
            memory, x = update(memory, x, x0, eps, (alpha[i], sigma[i], alpha[i + 1], sigma[i + 1]), fresh)
            path.append(x)
        return np.stack(path)

    return fold


@pytest.fixture(scope="session")
def error():
    """max|a - b| / max|b|."""

    def relative(a, b) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))

    return relative
