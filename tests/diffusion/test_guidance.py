"""Both modes of guidance give the formula's numbers; scale 1 does half of the work; batches stay on their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.guidance import CondPair, classifier_free
from maxdiffusion.errors import UsageError

DIM = 16


def model(weight, calls=None):
    """tanh of a matrix of the input, plus the condition's mean, plus the time."""

    def denoise(cache, x, timestep, cond):
        if calls is not None:
            calls.append(x.shape[0])
        told = jnp.mean(cond["text"], axis=1)
        return cache, jnp.tanh(x @ weight + told) + timestep[:, None] / 1000

    return denoise


@pytest.fixture(scope="module")
def given():
    keys = jax.random.split(jax.random.key(0), 4)
    weight = jax.random.normal(keys[0], (DIM, DIM)) / 4
    x = jax.random.normal(keys[1], (8, DIM))
    positive, negative = ({"text": jax.random.normal(key, (8, 5, DIM))} for key in keys[2:])
    return weight, x, jnp.linspace(0, 900, 8), CondPair(positive, negative)


@pytest.mark.parametrize("rescale", [0.0, 0.7])
@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_modes_equal_the_formula(given, error, mode, rescale):
    weight, x, timestep, cond = given
    positive, negative = (np.asarray(model(weight)((), x, timestep, half)[1], np.float64) for half in cond)
    expected = negative + 5.0 * (positive - negative)
    shrink = positive.std(axis=1, keepdims=True) / expected.std(axis=1, keepdims=True)
    expected = expected * (rescale * shrink + 1 - rescale)  # Lin et al. 2023, equations 15 and 16
    calls = []
    _, out = classifier_free(model(weight, calls), scale=5.0, mode=mode, rescale=rescale)((), x, timestep, cond)
    assert calls == ([16] if mode == "batched" else [8, 8])
    assert error(out, expected) < 1e-5


def test_scale_one_skips_the_half(given, error):
    weight, x, timestep, cond = given
    calls = []
    _, out = classifier_free(model(weight, calls), scale=1.0)((), x, timestep, CondPair(cond.positive, None))
    assert calls == [8]
    np.testing.assert_array_equal(out, model(weight)((), x, timestep, cond.positive)[1])

    def flops(scale):
        guided = classifier_free(model(weight), scale=scale)
        cost = jax.jit(lambda x: guided((), x, timestep, cond)[1]).lower(x).compile().cost_analysis()
        return cost["flops"]

    assert flops(1) < 0.55 * flops(7.5)


def test_scales_may_be_arrays_and_differ_by_sample(given, error):
    weight, x, timestep, cond = given
    scales = jnp.linspace(0, 7, 8)
    together = jax.jit(lambda scale: classifier_free(model(weight), scale=scale)((), x, timestep, cond)[1])(scales)
    for i in (0, 3, 7):
        alone = classifier_free(model(weight), scale=float(scales[i]))((), x, timestep, cond)[1]
        assert error(together[i], alone[i]) < 1e-6


def test_sequential_takes_prompts_of_other_lengths_and_two_caches(given):
    weight, x, timestep, cond = given
    short = CondPair(cond.positive, {"text": cond.negative["text"][:, :2]})
    with pytest.raises(UsageError, match="mode='sequential'"):
        classifier_free(model(weight), scale=3.0)((), x, timestep, short)

    def counting(cache, x, timestep, cond):
        return cache + cond["text"].shape[1], model(weight)((), x, timestep, cond)[1]

    guided = classifier_free(counting, scale=3.0, mode="sequential")
    cache, out = guided((jnp.int32(0), jnp.int32(100)), x, timestep, short)
    assert (int(cache[0]), int(cache[1])) == (5, 102)
    assert np.all(np.isfinite(out))
    assert classifier_free(model(weight), scale=3.0, mode="sequential")((), x, timestep, short)[0] == ()


def test_a_sharded_batch_needs_no_communication(given, devices, error):
    weight, x, timestep, cond = given
    mesh = Mesh(devices, ("data",))
    guided = classifier_free(model(weight), scale=5.0)
    put = jax.device_put((x, timestep, cond), NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(lambda x, timestep, cond: guided((), x, timestep, cond)[1])
    text = program.lower(*put).compile().as_text()
    assert not [op for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if op in text]
    assert error(program(*put), guided((), x, timestep, cond)[1]) < 1e-6


def test_rescale_of_a_flat_prediction_is_finite():
    flat = classifier_free(lambda cache, x, timestep, cond: (cache, jnp.zeros_like(x)), scale=2.0, rescale=1.0)
    cond = CondPair(jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    np.testing.assert_array_equal(flat((), jnp.ones((2, 3)), jnp.zeros(2), cond)[1], np.zeros((2, 3)))


def test_what_is_refused(given):
    weight, x, timestep, cond = given
    with pytest.raises(UsageError, match="did you mean 'batched'"):
        classifier_free(model(weight), scale=2.0, mode="batch")
    with pytest.raises(UsageError, match="finite"):
        classifier_free(model(weight), scale=float("inf"))
    with pytest.raises(UsageError, match="rescale"):
        classifier_free(model(weight), scale=2.0, rescale=1.5)
    with pytest.raises(UsageError, match="CondPair"):
        classifier_free(model(weight), scale=2.0)((), x, timestep, cond.positive)
    for mode in ("batched", "sequential"):
        with pytest.raises(UsageError, match="needs a negative condition"):
            classifier_free(model(weight), scale=2.0, mode=mode)((), x, timestep, CondPair(cond.positive, None))
    with pytest.raises(UsageError, match=r"guidance scale has shape \(3,\): give one number, or one for each of"):
        classifier_free(model(weight), scale=np.ones(3))((), x, timestep, cond)
    shared = CondPair(*({**half, "ids": jnp.zeros((len(x) + 1, 3))} for half in cond))
    with pytest.raises(UsageError, match=r"an array of shape .* is not one entry for each of"):
        classifier_free(model(weight), scale=2.0)((), x, timestep, shared)


def test_scalars_of_a_condition_are_those_of_every_sample(given):
    weight, x, _, cond = given
    seen = []

    def denoiser(cache, x, timestep, cond):
        seen.append((timestep.shape, cond["strength"].shape))
        return model(weight)(cache, x, timestep, {"text": cond["text"]})

    pair = CondPair(*({**half, "strength": 3.5} for half in cond))
    one = jnp.float32(0.25)
    got = classifier_free(denoiser, scale=2.0)((), x, one, pair)[1]
    np.testing.assert_array_equal(got, classifier_free(model(weight), scale=2.0)((), x, jnp.full(len(x), one), cond)[1])
    assert seen == [((2 * len(x),), (2 * len(x),))]
