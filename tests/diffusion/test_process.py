"""Schedules against their definitions, device against host, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.errors import UsageError

DISCRETE = [
    VariancePreserving(),
    VariancePreserving(schedule="linear", beta_start=1e-4, beta_end=0.02),
    VariancePreserving(schedule="squaredcos_cap_v2"),
    VariancePreserving(zero_terminal_snr=True),
    VariancePreserving(num_steps=50),
]
PROCESSES = [*DISCRETE, FlowMatching(), FlowMatching(shift=3.0)]


def test_betas_are_the_published_ones():
    steps = np.arange(1000.0)
    scaled = np.cumprod(1 - (0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * steps / 999) ** 2)
    np.testing.assert_allclose(VariancePreserving().levels(steps)[0] ** 2, scaled, rtol=1e-12)
    linear = np.cumprod(1 - (1e-4 + (0.02 - 1e-4) * steps / 999))
    np.testing.assert_allclose(DISCRETE[1].levels(steps)[0] ** 2, linear, rtol=1e-12)
    cosine = np.cos((steps + 1) / 1000 / 1.008 * np.pi / 2 + 0.008 / 1.008 * np.pi / 2) ** 2
    cosine /= np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(DISCRETE[2].levels(steps)[0][:990] ** 2, cosine[:990], rtol=1e-9)  # before the cap
    beta = 1 - DISCRETE[2].levels(steps)[0][999] ** 2 / DISCRETE[2].levels(steps)[0][998] ** 2
    assert abs(beta - 0.999) < 1e-9


def test_the_last_level_of_stable_diffusion():
    _, sigma = VariancePreserving().levels(np.array([0.0, 999.0]))
    ratio = sigma / VariancePreserving().levels(np.array([0.0, 999.0]))[0]
    np.testing.assert_allclose(ratio, [0.0292, 14.6146], rtol=2e-3)  # the sigmas quoted for Stable Diffusion


def test_zero_terminal_snr():
    alpha, sigma = DISCRETE[3].levels(np.array([0.0, 998.0, 999.0]))
    plain = VariancePreserving().levels(np.array([0.0]))[0]
    assert alpha[2] == 0 and sigma[2] == 1
    assert 0 < alpha[1] < 0.01
    np.testing.assert_allclose(alpha[0], plain[0], rtol=1e-12)  # the first step stays
    on_device = DISCRETE[3].alpha_sigma(jnp.array([999.0]))
    assert on_device[0] == 0 and on_device[1] == 1


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_levels_fall_and_invert(process):
    t = np.linspace(process.t_data, process.t_prior, 777)
    alpha, sigma = process.levels(t)
    assert alpha[0] == 1 and sigma[0] == 0
    assert np.all(np.diff(alpha) < 0) and np.all(np.diff(sigma) > 0)
    inner = slice(1, -1)  # the ratio at the noisy end may be infinite
    np.testing.assert_allclose(process.time_at(sigma[inner] / alpha[inner]), t[inner], rtol=1e-8, atol=1e-9)
    if isinstance(process, VariancePreserving):
        np.testing.assert_allclose(alpha**2 + sigma**2, 1, rtol=1e-12)


@pytest.mark.parametrize("process", [DISCRETE[0], DISCRETE[3], FlowMatching()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_device_equals_host_in_float32(process, dtype):
    t = jnp.linspace(process.t_data, process.t_prior, 501).astype(dtype)
    alpha, sigma = process.alpha_sigma(t)
    exact = process.levels(np.asarray(t, np.float64))
    assert alpha.dtype == sigma.dtype == process.alpha(t).dtype == process.sigma(t).dtype == jnp.float32
    np.testing.assert_allclose(alpha, exact[0], rtol=3e-7, atol=1e-7)  # a few roundings of float32
    np.testing.assert_allclose(sigma, exact[1], rtol=3e-7, atol=1e-7)


def test_times_in_half_precision_are_refused():
    assert jnp.float32(999).astype(jnp.bfloat16) == 1000  # why
    for process in (VariancePreserving(), FlowMatching()):
        with pytest.raises(UsageError, match="keep times in float32"):
            process.alpha_sigma(jnp.zeros(3, jnp.bfloat16))
        with pytest.raises(UsageError, match="keep times in float32"):
            process.add_noise(jnp.zeros((3, 1)), jnp.zeros((3, 1)), jnp.zeros(3, jnp.float16))


def test_every_trained_step_has_its_own_level_on_the_device():
    alpha, sigma = VariancePreserving().alpha_sigma(jnp.arange(1000.0))
    assert np.unique(alpha).size == 1000
    assert np.all(sigma > 0)
    exact = VariancePreserving().levels(np.arange(1000.0))
    np.testing.assert_array_equal(alpha, exact[0].astype(np.float32))


def test_between_steps_as_in_log_sigma_to_second_order():
    process = VariancePreserving()
    whole = np.array([1.0, 100.0, 500.0, 998.0])
    ratio = [np.divide(*process.levels(t)[::-1]) for t in (whole, whole + 0.5, whole + 1)]
    np.testing.assert_allclose(np.log(ratio[1]), (np.log(ratio[0]) + np.log(ratio[2])) / 2, atol=2e-2)
    np.testing.assert_allclose(np.log(ratio[1][1:]), (np.log(ratio[0]) + np.log(ratio[2]))[1:] / 2, atol=2e-5)


@pytest.mark.parametrize("process", [DISCRETE[0], FlowMatching()], ids=str)
def test_add_noise_at_the_ends_and_between(process):
    x0, noise = jnp.full((3, 2, 1), 2.0), jnp.full((3, 2, 1), 5.0)
    middle = (process.t_data + process.t_prior) / 2
    t = jnp.array([process.t_data, middle, process.t_prior])
    mixed = process.add_noise(x0, noise, t)
    alpha, sigma = process.levels(np.asarray(t, np.float64))
    np.testing.assert_allclose(mixed[:, 0, 0], alpha * 2 + sigma * 5, rtol=1e-6)
    assert mixed[0, 0, 0] == 2
    np.testing.assert_array_equal(process.add_noise(x0, noise, t[1])[0], mixed[1])  # one time for all
    low = process.add_noise(x0.astype(jnp.bfloat16), noise.astype(jnp.bfloat16), t)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, mixed.astype(jnp.bfloat16))  # float32 inside, rounded once


def test_timestep_and_training_time():
    u = jnp.array([0.0, 0.25, 0.5, 1 - 2.0**-24])
    np.testing.assert_array_equal(VariancePreserving().training_time(u), [0, 250, 500, 999])
    np.testing.assert_array_equal(VariancePreserving().timestep(jnp.array([7.0])), [7])
    shifted = FlowMatching(shift=3.0)
    np.testing.assert_allclose(shifted.training_time(u), [0, 0.5, 0.75, 1], rtol=1e-6)
    np.testing.assert_allclose(shifted.timestep(jnp.array([0.25])), [250])
    np.testing.assert_allclose(shifted.alpha(jnp.array([0.25])), [0.75])  # alpha and sigma do not shift


def test_what_is_refused():
    with pytest.raises(UsageError, match="did you mean 'scaled_linear'"):
        VariancePreserving(schedule="scaled_liner")
    with pytest.raises(UsageError, match="0 < beta_start <= beta_end < 1"):
        VariancePreserving(beta_start=0.1, beta_end=0.01)
    with pytest.raises(UsageError, match="num_steps=1"):
        VariancePreserving(num_steps=1)
    with pytest.raises(UsageError, match="positive"):
        FlowMatching(shift=0)
    with pytest.raises(UsageError, match="positive"):
        FlowMatching(timestep_scale=float("nan"))
    for t in (-1.5, 1000.0, np.nan):
        with pytest.raises(UsageError, match="range of VariancePreserving, -1"):
            VariancePreserving().levels(np.array([3.0, t]))
    VariancePreserving().check("epsilon")
    for process in (VariancePreserving(zero_terminal_snr=True), FlowMatching()):
        with pytest.raises(UsageError, match="use 'v_prediction'"):
            process.check("epsilon")
        for other in ("v_prediction", "velocity", "sample"):
            process.check(other)
    with pytest.raises(UsageError, match="did you mean 'velocity'"):
        FlowMatching().check("velocty")
