"""Every prediction type becomes every other, at the ends of the noise levels too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.prediction import PREDICTIONS, check_prediction, from_x0_eps, to_x0_eps
from maxdiffusion.errors import UsageError

LEVELS = {"sd": (0.6, 0.8), "flow": (0.3, 0.7), "nearly data": (0.999, 0.04), "nearly noise": (0.04, 0.999)}


def _data(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    return (jax.random.normal(key, (4, 3), jnp.float32).astype(dtype) for key in keys)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_round_trip(prediction, level, error):
    x0, eps = _data()
    alpha, sigma = (jnp.float32(value) for value in LEVELS[level])
    x = alpha * x0 + sigma * eps
    output = from_x0_eps(x0, eps, alpha, sigma, prediction=prediction)
    again = to_x0_eps(output, x, alpha, sigma, prediction=prediction)
    bound = 1e-6 / min(LEVELS[level])  # rounding of x, divided by the smaller factor where a type must
    assert error(again[0], x0) < bound and error(again[1], eps) < bound


def test_definitions():
    x0, eps = (np.asarray(value) for value in _data())
    expected = {"epsilon": eps, "sample": x0, "v_prediction": 0.6 * eps - 0.8 * x0, "velocity": eps - x0}
    for prediction in PREDICTIONS:
        found = from_x0_eps(jnp.array(x0), jnp.array(eps), jnp.float32(0.6), jnp.float32(0.8), prediction=prediction)
        np.testing.assert_allclose(found, expected[prediction], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ends_are_finite_and_rebuild_x(prediction):
    x0, eps = _data()
    for alpha, sigma in ((1.0, 0.0), (0.0, 1.0)):
        alpha, sigma = jnp.float32(alpha), jnp.float32(sigma)
        x = alpha * x0 + sigma * eps
        output = from_x0_eps(x0, eps, alpha, sigma, prediction=prediction)
        data, noise = to_x0_eps(output, x, alpha, sigma, prediction=prediction)
        np.testing.assert_allclose(alpha * data + sigma * noise, x, rtol=1e-6)
        determined = {"epsilon": alpha > 0, "sample": sigma > 0}.get(prediction, True)
        if determined:
            np.testing.assert_allclose(data, x0, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(noise, eps, rtol=1e-5, atol=1e-6)
        else:
            open_one = data if prediction == "epsilon" else noise
            np.testing.assert_array_equal(open_one, np.zeros((4, 3)))


def test_gradients_are_finite_where_a_divisor_is_zero():
    x0, eps = _data()
    zero, one = jnp.float32(0), jnp.float32(1)
    slope = jax.grad(lambda out: to_x0_eps(out, x0, zero, one, prediction="epsilon")[0].sum())(eps)
    np.testing.assert_array_equal(slope, np.zeros((4, 3)))


def test_levels_per_sample_and_dtypes():
    x0, eps = _data(jnp.bfloat16)
    alpha, sigma = jnp.array([1.0, 0.8, 0.6, 0.1]), jnp.array([0.1, 0.6, 0.8, 1.0])
    target = from_x0_eps(x0, eps, alpha, sigma, prediction="v_prediction")
    assert target.dtype == jnp.float32
    for i in range(4):
        alone = from_x0_eps(x0[i : i + 1], eps[i : i + 1], alpha[i], sigma[i], prediction="v_prediction")
        np.testing.assert_allclose(target[i], alone[0], rtol=1e-6)
    back = to_x0_eps(target.astype(jnp.bfloat16), x0, alpha, sigma, prediction="v_prediction")
    assert back[0].dtype == back[1].dtype == jnp.float32


def test_unknown_names():
    with pytest.raises(UsageError, match="did you mean 'epsilon'"):
        check_prediction("epsilom")
    x0, eps = _data()
    with pytest.raises(UsageError):
        to_x0_eps(x0, eps, jnp.float32(1), jnp.float32(1), prediction="noise")
    with pytest.raises(UsageError):
        from_x0_eps(x0, eps, jnp.float32(1), jnp.float32(1), prediction="noise")
