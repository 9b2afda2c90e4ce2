"""Whole trajectories of PyTorch diffusers' schedulers, recorded by scripts/goldens/schedulers.py, and their grids."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import grid_from_times, make_grid
from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.diffusion.sample import sample
from maxdiffusion.diffusion.solvers import DDIM, DPMpp2M, Euler, EulerAncestral

SD, STEPS = VariancePreserving(), 10
ZERO_SNR = VariancePreserving(zero_terminal_snr=True)
COSINE = VariancePreserving(schedule="squaredcos_cap_v2")
FLOW = FlowMatching(shift=3.0)

# name -> process, spacing, solver, prediction, whether the recorded model looked at the timestep
CASES = {
    "euler_trailing": (SD, "trailing", Euler(), "epsilon", True),
    "euler_leading": (SD, "leading", Euler(), "v_prediction", True),
    "euler_linspace": (SD, "linspace", Euler(), "epsilon", True),
    "euler_karras": (SD, "karras", Euler(), "epsilon", True),
    "euler_exponential": (SD, "exponential", Euler(), "epsilon", True),
    "euler_cosine": (COSINE, "leading", Euler(), "v_prediction", True),
    "ancestral": (SD, "trailing", EulerAncestral(), "epsilon", True),
    "ddim": (SD, "leading", DDIM(), "epsilon", True),
    "ddim_eta": (SD, "trailing", DDIM(eta=0.5), "sample", True),
    "ddim_zero_snr": (ZERO_SNR, "trailing", DDIM(), "v_prediction", True),
    "dpm_trailing": (SD, "trailing", DPMpp2M(), "epsilon", True),
    "dpm_karras": (SD, "karras", DPMpp2M(), "v_prediction", False),
    "dpm_flow": (FLOW, None, DPMpp2M(), "velocity", False),  # a grid of its own, from the recorded times
    "flow_euler": (FLOW, "uniform", Euler(), "velocity", True),
}


@pytest.fixture(scope="module")
def recorded():
    with np.load(Path(__file__).parent / "goldens" / "schedulers.npz") as arrays:
        return dict(arrays)


def grid_of(name, recorded):
    process, spacing = CASES[name][:2]
    if spacing is None:
        return grid_from_times(process, recorded[f"{name}.sigmas"])
    offset = 1 if name in ("euler_leading", "ddim") else 0
    return make_grid(process, STEPS, spacing, offset=offset, final="sigma_min" if name == "ddim" else "zero")


def model(timed):
    def denoise(cache, x, timestep, cond):
        out = jnp.tanh(0.8 * x + 0.3) + 0.2 * x
        return cache, out + 0.5 * jnp.sin(timestep / 300)[:, None] if timed else out

    return denoise


def test_the_record_holds_exactly_these_cases(recorded):
    assert {key.split(".")[0] for key in recorded if "." in key} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_grids_agree(recorded, name):
    grid, sigmas = grid_of(name, recorded), recorded[f"{name}.sigmas"]
    if CASES[name][4]:
        np.testing.assert_allclose(grid.timestep, recorded[f"{name}.timesteps"], rtol=1e-5, atol=1e-2)
    if sigmas.size:
        ratio = grid.sigma if CASES[name][0] is FLOW else grid.sigma / grid.alpha
        # Theirs is made in float32, where 1 - (a product near 1) is off by two roundings of 1; karras and exponential
        # levels inherit the relative error of the smallest one, 1.3e-5.
        np.testing.assert_allclose(ratio**2, sigmas**2, rtol=3e-5, atol=2**-23)


@pytest.mark.parametrize("name", CASES)
def test_trajectories_agree(recorded, error, name):
    _, _, solver, prediction, timed = CASES[name]
    noise = jnp.asarray(recorded["noise"])
    path = sample(
        model(timed),
        jnp.asarray(recorded["x"]),
        grid_of(name, recorded),
        None,
        solver=solver,
        prediction=prediction,
        noise=lambda index: noise[index],
        on_step=lambda index, x, x0: x,
    ).trace
    assert error(path, recorded[f"{name}.path"]) < 1e-5
