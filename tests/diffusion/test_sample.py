"""Every deterministic solver against the closed form, with its order; the scan, its dtypes and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.diffusion.grid import grid_from_times, make_grid
from maxdiffusion.diffusion.noise import noise, step_noise
from maxdiffusion.diffusion.prediction import PREDICTIONS
from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.diffusion.sample import run, sample, start
from maxdiffusion.diffusion.solvers import DDIM, DPMpp2M, Euler, EulerAncestral
from maxdiffusion.errors import UsageError

ORDERS = [(Euler(), 1), (DDIM(), 1), (DPMpp2M(), 2)]


@pytest.fixture(scope="module")
def errors(gaussian, resting):
    """The largest distance to the closed form at the end of a grid, and of one with twice the steps."""

    def measure(process, make, steps, prediction, solver):
        found = []
        for grid in (make(steps), make(2 * steps)):
            x = gaussian.start(process, grid)
            walked = gaussian.sampled(
                jnp.float32(x), resting(grid, 2 * steps), process=process, prediction=prediction, solver=solver
            )
            after = np.asarray(walked.trace[grid.num_steps - 1], np.float64)
            found.append(np.max(np.abs(after - gaussian.end(process, grid, x))))
        return found

    return measure


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", ["sd", "flow"])
@pytest.mark.parametrize(("solver", "order"), ORDERS, ids=lambda value: type(value).__name__)
def test_order_of_convergence(errors, processes, even_grid, solver, order, process, prediction):
    process = processes[process]
    found = errors(process, lambda steps: even_grid(process, steps), 20, prediction, solver)
    # A step of size h leaves the error C h^(order + 1) and there are 1 / h of them; 0.2 is the next term's share at 20.
    assert abs(np.log2(found[0] / found[1]) - order) < 0.2, found
    # h = log(12 / 0.05) / 40 = 0.137; the ideal denoiser's derivatives in lambda are of size 1.
    assert found[1] < 0.137**order, found


@pytest.mark.parametrize(
    ("process", "spacing", "prediction"),
    [
        ("sd", "trailing", "epsilon"),
        ("zero_snr", "trailing", "v_prediction"),
        ("zero_snr", "trailing", "velocity"),
        ("zero_snr", "trailing", "sample"),
        ("flow", "uniform", "velocity"),
    ],
)
@pytest.mark.parametrize(("solver", "order"), ORDERS, ids=lambda value: type(value).__name__)
def test_whole_grids_with_both_ends_converge(errors, processes, solver, order, process, spacing, prediction):
    process = processes[process]
    found = errors(process, lambda steps: make_grid(process, steps, spacing), 125, prediction, solver)
    # The step to sigma = 0 is of first order and leaves sigma_last^2: 1 / N^2 in flow matching, but 1 / N where sigma
    # grows as sqrt(t). In flow matching the last steps k / N -> (k - 1) / N have h = 1 / k however large N is, which
    # leaves log(N) / N^2: a slope of 2 - 1 / log(125) = 1.8. 0.15 is the share of the next term.
    expected = 1.8 if (order, process) == (2, FlowMatching()) else 1.0
    assert np.log2(found[0] / found[1]) > expected - 0.15, found
    assert found[1] < 0.5 * 0.05, found  # a twentieth of the data's spread, 0.5


def test_predictions_agree_on_the_path(gaussian, processes, even_grid, error):
    process = processes["flow"]
    grid = even_grid(process, 20)
    x = jnp.float32(gaussian.start(process, grid))
    paths = [
        gaussian.sampled(x, grid, process=process, prediction=prediction, solver=DPMpp2M()).trace
        for prediction in PREDICTIONS
    ]
    assert paths[0].shape == (20, 64, 1)
    for path in paths[1:]:
        assert error(path, paths[0]) < 1e-5  # float32 rounding, times 1 / alpha = 13 at the first times


def test_one_step_jumps_to_the_estimate(gaussian, processes):
    process = processes["flow"]
    grid = make_grid(process, 1, "uniform")
    x = jnp.linspace(-1, 1, 8)[:, None]
    for solver in (Euler(), DDIM(), DPMpp2M()):
        out = gaussian.sampled(x, grid, process=process, prediction="velocity", solver=solver).x
        np.testing.assert_allclose(out, np.full((8, 1), gaussian.mean), rtol=1e-6)


def test_bfloat16_input_keeps_a_float32_state(gaussian, processes):
    process = processes["flow"]
    grid = make_grid(process, 50, "uniform")
    x = jnp.linspace(-2, 2, 64)[:, None].astype(jnp.bfloat16)
    seen = []

    def denoise(cache, x, timestep, cond):
        seen.append((x.dtype, timestep.dtype))
        cache, out = gaussian.denoiser(process, "velocity")(cache, x, timestep, cond)
        return cache, out.astype(jnp.float32)

    rough = sample(denoise, x, grid, None, solver=Euler(), prediction="velocity")
    exact = sample(denoise, x.astype(jnp.float32), grid, None, solver=Euler(), prediction="velocity")
    assert seen == [(jnp.float32, jnp.float32)] * len(seen)
    assert rough.x.dtype == jnp.bfloat16 and exact.x.dtype == jnp.float32
    np.testing.assert_array_equal(rough.x, exact.x.astype(jnp.bfloat16))  # rounded once, at the end


def test_the_model_is_given_its_own_timesteps(processes):
    def denoise(cache, x, timestep, cond):
        return cache, jnp.zeros_like(x) + timestep[:, None]

    grid = make_grid(processes["sd"], 10, "trailing")
    out = sample(
        denoise,
        jnp.zeros((2, 1)),
        grid,
        None,
        solver=Euler(),
        prediction="sample",
        on_step=lambda index, x, x0: (index, x0),
    )
    index, x0 = out.trace
    np.testing.assert_array_equal(index, np.arange(10))
    np.testing.assert_array_equal(x0[:, 1, 0], np.arange(999, 0, -100))


def test_parts_of_a_grid_make_the_whole_and_the_cache_goes_along(gaussian, processes, even_grid):
    process, solver = processes["sd"], EulerAncestral()
    ideal = gaussian.denoiser(process, "epsilon")

    def counting(cache, x, timestep, cond):
        return cache + 1, ideal((), x, timestep, cond)[1]

    grid = even_grid(process, 6)
    x = jnp.float32(gaussian.start(process, grid))
    fresh = step_noise(jax.random.key(3), jnp.arange(64), (1,))
    arguments = {"solver": solver, "prediction": "epsilon", "noise": fresh}
    whole = sample(ideal, x, grid, None, **arguments).x
    state = start(x, solver=solver, cache=jnp.int32(0))
    for piece in (grid.part(0, 4), grid.part(4)):
        state, _ = run(counting, state, piece, None, **arguments)
    np.testing.assert_array_equal(state.x, whole)
    assert state.cache == 6


def test_one_scan_without_host_calls(gaussian, processes):
    process = processes["flow"]
    calls = []
    ideal = gaussian.denoiser(process, "velocity")

    def denoise(cache, x, timestep, cond):
        calls.append(x.shape)
        return ideal(cache, x, timestep, cond)

    def whole(x, grid, key):
        fresh = step_noise(key, jnp.arange(x.shape[0]), x.shape[1:])
        return sample(denoise, x, grid, None, solver=EulerAncestral(), prediction="velocity", noise=fresh).x

    text = jax.jit(whole).lower(jnp.zeros((4, 1)), make_grid(process, 30, "uniform"), jax.random.key(0)).as_text()
    assert calls == [(4, 1)]  # traced once for 30 steps
    assert text.count("stablehlo.while") >= 1 and "callback" not in text


def test_samples_do_not_depend_on_batch_or_mesh(gaussian, processes, devices, error):
    process = processes["sd"]
    grid = make_grid(process, 12, "trailing")
    key = jax.random.key(11)

    @jax.jit
    def pictures(indices):
        x = noise(key, indices, (3,))
        fresh = step_noise(key, indices, (3,))
        denoise = gaussian.denoiser(process, "epsilon")
        return sample(denoise, x, grid, None, solver=EulerAncestral(), prediction="epsilon", noise=fresh).x

    everyone = np.asarray(pictures(jnp.arange(8)))
    assert np.std(everyone) > 0.1  # not constant
    assert error(pictures(jnp.arange(3)), everyone[:3]) < 1e-5
    assert error(pictures(jnp.array([5])), everyone[5:6]) < 1e-5
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"))
    sharded = pictures(jax.device_put(jnp.arange(8), NamedSharding(mesh, PartitionSpec("data"))))
    assert len(sharded.sharding.device_set) == 8
    assert error(sharded, everyone) < 1e-5


def test_errors_name_the_cure(gaussian):
    process = VariancePreserving(zero_terminal_snr=True)
    denoise, x = gaussian.denoiser(process, "epsilon"), jnp.zeros((2, 1))
    grid = make_grid(process, 5, "trailing")
    with pytest.raises(UsageError, match="alpha = 0: use 'v_prediction'"):
        sample(denoise, x, grid, None, solver=Euler(), prediction="epsilon")
    with pytest.raises(UsageError, match="alpha = 0"):  # also where the grid is traced
        jax.jit(lambda grid: sample(denoise, x, grid, None, solver=Euler(), prediction="epsilon").x)(grid)
    later = sample(denoise, x, grid.part(1), None, solver=Euler(), prediction="epsilon").x
    assert np.all(np.isfinite(later))
    with pytest.raises(UsageError, match="EulerAncestral is stochastic: pass noise=step_noise"):
        sample(denoise, x, grid, None, solver=EulerAncestral(), prediction="sample")
    with pytest.raises(UsageError, match="did you mean 'v_prediction'"):
        sample(denoise, x, grid, None, solver=Euler(), prediction="v_predicton")
    with pytest.raises(UsageError, match="alpha = 0"):
        sample(denoise, x, grid_from_times(FlowMatching(), [1.0, 0.5]), None, solver=Euler(), prediction="epsilon")
