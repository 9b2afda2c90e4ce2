"""The objective against its closed form, per sample, whatever the batch, mesh and dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.loss import Draw, denoising_loss, draw, weighted_sum
from maxdiffusion.diffusion.prediction import PREDICTIONS
from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.diffusion.timesteps import Uniform
from maxdiffusion.errors import UsageError

SD = VariancePreserving()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ideal_denoiser_reaches_the_bayes_error(gaussian, prediction):
    count, t = 20_000, 400.0
    drawn = draw(jax.random.key(0), jnp.arange(count), (1,), process=SD, times=Uniform())
    drawn = Draw(noise=drawn.noise, t=jnp.full(count, t))
    x0 = (
        gaussian.mean
        + gaussian.std * draw(jax.random.key(1), jnp.arange(count), (1,), process=SD, times=Uniform()).noise
    )
    losses = denoising_loss(gaussian.denoiser(SD, prediction), x0, None, drawn, process=SD, prediction=prediction)
    alpha, sigma = (float(level) for level in SD.levels(np.array(t)))
    posterior = 1 / (1 / gaussian.std**2 + alpha**2 / sigma**2)  # variance of x_0 given x
    # eps = (x - alpha x_0) / sigma, so each target is x_0 times a factor, given x.
    factor = {
        "epsilon": alpha / sigma,
        "sample": 1.0,
        "v_prediction": alpha**2 / sigma + sigma,
        "velocity": alpha / sigma + 1,
    }[prediction]
    expected = factor**2 * posterior
    assert losses.shape == (count,) and losses.dtype == jnp.float32
    mean = np.asarray(losses, np.float64).mean()
    assert abs(mean - expected) < 5 * expected * np.sqrt(2 / count)  # chi-squared, five standard errors


def test_targets_and_inputs():
    drawn = draw(jax.random.key(0), jnp.arange(4), (3, 2), process=FlowMatching(), times=Uniform())
    x0 = jax.random.normal(jax.random.key(9), (4, 3, 2))
    seen = {}

    def perfect(cache, x, timestep, cond):
        seen.update(x=x, timestep=timestep, cond=cond, cache=cache)
        return cache, drawn.noise - x0 + cond

    losses = denoising_loss(perfect, x0, jnp.float32(0.5), drawn, process=FlowMatching(), prediction="velocity")
    np.testing.assert_allclose(losses, np.full(4, 0.25), rtol=1e-5)
    t = np.asarray(drawn.t)[:, None, None]
    np.testing.assert_allclose(seen["x"], (1 - t) * x0 + t * drawn.noise, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen["timestep"], 1000 * np.asarray(drawn.t), rtol=1e-6)
    assert seen["cache"] == ()


def test_draws_do_not_depend_on_batch_or_mesh(devices):
    def make(indices):
        return draw(jax.random.key(3), indices, (5,), process=SD, times=Uniform(), step=7)

    whole = jax.jit(make)(jnp.arange(8))
    assert np.unique(whole.t).size > 4  # no rank repeats another's times
    np.testing.assert_array_equal(make(jnp.array([6])).noise, whole.noise[6:7])
    np.testing.assert_array_equal(make(jnp.array([6])).t, whole.t[6:7])
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    sharded = jax.jit(make)(jax.device_put(jnp.arange(8), NamedSharding(mesh, PartitionSpec("data"))))
    np.testing.assert_array_equal(sharded.noise, whole.noise)
    np.testing.assert_array_equal(sharded.t, whole.t)


def test_noise_and_times_are_independent():
    drawn = draw(jax.random.key(0), jnp.arange(4000), (1,), process=FlowMatching(), times=Uniform())
    assert abs(np.corrcoef(np.asarray(drawn.noise)[:, 0], np.asarray(drawn.t))[0, 1]) < 5 / np.sqrt(4000)


def test_bfloat16_data_gives_float32_losses(gaussian):
    drawn = draw(jax.random.key(0), jnp.arange(16), (4,), process=SD, times=Uniform())
    x0 = jnp.ones((16, 4), jnp.bfloat16)

    def denoise(cache, x, timestep, cond):
        assert x.dtype == jnp.bfloat16 and timestep.dtype == jnp.float32
        return cache, jnp.zeros_like(x)

    losses = denoising_loss(denoise, x0, None, drawn, process=SD, prediction="epsilon")
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, np.mean(np.square(drawn.noise), axis=1), rtol=1e-6)


def test_padding_counts_for_nothing_and_parts_add_up():
    losses, weights = jnp.array([1.0, 2.0, 3.0, jnp.nan]), jnp.array([1.0, 0.5, 1.0, 0.0])
    total, count = weighted_sum(losses, weights)
    assert (float(total), float(count)) == (5.0, 2.5)
    parts = [weighted_sum(losses[i : i + 2], weights[i : i + 2]) for i in (0, 2)]
    assert (float(parts[0][0] + parts[1][0]), float(parts[0][1] + parts[1][1])) == (5.0, 2.5)
    slope = jax.grad(lambda value: weighted_sum(value, weights)[0])(losses)
    np.testing.assert_array_equal(slope, [1, 0.5, 1, 0])


def test_what_is_refused():
    x0 = jnp.zeros((2, 3))
    flow = FlowMatching()
    drawn = draw(jax.random.key(0), jnp.arange(2), (3,), process=flow, times=Uniform())

    def same(cache, x, timestep, cond):
        return cache, x

    with pytest.raises(UsageError, match="use 'v_prediction'"):
        denoising_loss(same, x0, None, drawn, process=flow, prediction="epsilon")
    with pytest.raises(UsageError, match=r"\(2, 1\) for data of shape \(2, 3\)"):
        denoising_loss(
            lambda cache, x, timestep, cond: (cache, x[:, :1]), x0, None, drawn, process=flow, prediction="velocity"
        )
