"""Grids fall strictly, meet their definitions, and refuse what would repeat a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.grid import grid_from_times, make_grid
from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.errors import UsageError

SD = VariancePreserving()
SPACINGS = [(SD, spacing) for spacing in ("leading", "linspace", "trailing", "karras", "exponential")]
SPACINGS += [(FlowMatching(), "uniform"), (FlowMatching(shift=3.0), "uniform")]


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 333, 1000])
@pytest.mark.parametrize(("process", "spacing"), SPACINGS, ids=str)
def test_every_grid_falls_strictly_in_float32(process, spacing, steps):
    grid = make_grid(process, steps, spacing)
    assert grid.num_steps == steps
    assert {a.dtype for a in (grid.t, grid.alpha, grid.sigma, grid.timestep, grid.h)} == {np.dtype("float32")}
    assert grid.t.shape == grid.alpha.shape == grid.sigma.shape == (steps + 1,)
    assert grid.timestep.shape == grid.h.shape == grid.index.shape == (steps,)
    assert np.all(np.diff(grid.t) < 0) and np.all(np.diff(grid.timestep) < 0) and np.all(grid.h > 0)
    assert np.unique(np.stack([grid.alpha, grid.sigma]), axis=1).shape[1] == steps + 1
    assert grid.t[-1] == process.t_data and grid.alpha[-1] == 1 and grid.sigma[-1] == 0


def test_discrete_times():
    assert make_grid(SD, 4, "leading").t.tolist() == [750, 500, 250, 0, -1]
    assert make_grid(SD, 4, "leading", offset=1, final="sigma_min").t.tolist() == [751, 501, 251, 1, 0]
    assert make_grid(SD, 4, "linspace").t.tolist() == [999, 666, 333, 0, -1]
    assert make_grid(SD, 4, "trailing").t.tolist() == [999, 749, 499, 249, -1]
    assert make_grid(SD, 3, "trailing").t.tolist() == [999, 666, 332, -1]
    assert make_grid(SD, 20, "leading").timestep.tolist() == list(range(950, -1, -50))


def test_levels_of_karras_and_exponential():
    for spacing, power in (("karras", 1 / 7), ("exponential", None)):
        grid = make_grid(SD, 10, spacing)
        ratio = grid.sigma[:-1].astype(np.float64) / grid.alpha[:-1]
        steps = np.diff(np.log(ratio) if power is None else ratio**power)
        np.testing.assert_allclose(steps, steps[0], rtol=1e-5)
        assert grid.t[0] == 999 and abs(grid.t[-2]) < 1e-6


def test_flow_times():
    plain = make_grid(FlowMatching(), 4, "uniform")
    assert plain.t.tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert plain.timestep.tolist() == [1000, 750, 500, 250]
    shifted = make_grid(FlowMatching(shift=3.0), 4, "uniform")
    np.testing.assert_allclose(shifted.t, [1, 0.9, 0.75, 0.5, 0], rtol=1e-7)
    assert shifted.no_signal


def test_a_shifted_grid_keeps_all_its_times():
    # Rounded to bfloat16, 50 shifted times collapse to fewer; in float32 they must not.
    grid = make_grid(FlowMatching(shift=12.0), 50, "uniform")
    assert np.unique(np.asarray(jnp.asarray(grid.t).astype(jnp.bfloat16)).astype(np.float32)).size < 51
    assert np.unique(grid.t).size == 51


def test_h_is_rounded_once():
    grid = make_grid(SD, 1000, "trailing")
    alpha, sigma = SD.levels(np.arange(999.0, -1, -1))
    exact = np.diff(np.log(alpha) - np.log(sigma))
    np.testing.assert_allclose(grid.h[:-1], exact, rtol=1e-7)
    rough = np.diff(np.log(grid.alpha[:-1]) - np.log(grid.sigma[:-1]))
    assert np.max(np.abs(rough / exact - 1)) > 1e-6  # what a difference in float32 would have cost
    assert grid.h[-1] == np.inf


def test_zero_terminal_snr_starts_without_signal():
    process = VariancePreserving(zero_terminal_snr=True)
    grid = make_grid(process, 5, "trailing")
    assert grid.alpha[0] == 0 and grid.h[0] == np.inf and grid.no_signal
    assert not make_grid(process, 5, "leading").no_signal
    for spacing in ("karras", "exponential"):
        with pytest.raises(UsageError, match="use 'trailing'"):
            make_grid(process, 5, spacing)


def test_parts_keep_their_step_numbers():
    grid = make_grid(FlowMatching(), 10, "uniform")
    part = grid.part(4, 7)
    assert part.num_steps == 3
    assert part.index.tolist() == [4, 5, 6]
    np.testing.assert_array_equal(part.t, grid.t[4:8])
    assert grid.no_signal and grid.part(0, 3).no_signal and not part.no_signal
    for start, stop in ((10, None), (3, 3), (-1, 4), (0, 11)):
        with pytest.raises(UsageError, match="at least one step"):
            grid.part(start, stop)


def test_a_grid_is_a_pytree_so_that_one_program_serves_many():
    traces = []

    @jax.jit
    def total(grid):
        traces.append(grid.num_steps)
        return grid.t.sum()

    for spacing in ("leading", "trailing", "karras"):
        total(make_grid(SD, 10, spacing))
    assert traces == [10]


def test_what_is_refused():
    for steps in (0, -3, 2.5, True):
        with pytest.raises(UsageError, match="1 or more"):
            make_grid(SD, steps, "trailing")
    with pytest.raises(UsageError, match="at most that many"):
        make_grid(SD, 1001, "trailing")
    with pytest.raises(UsageError, match="did you mean 'trailing'"):
        make_grid(SD, 5, "trailling")
    with pytest.raises(UsageError, match="did you mean 'zero'"):
        make_grid(SD, 5, "trailing", final="zeros")
    with pytest.raises(UsageError, match="belongs to spacing 'leading'"):
        make_grid(SD, 5, "trailing", offset=1)
    with pytest.raises(UsageError, match="use 'uniform'"):
        make_grid(FlowMatching(), 5, "trailing")
    with pytest.raises(UsageError, match="belongs to FlowMatching"):
        make_grid(SD, 5, "uniform")
    with pytest.raises(UsageError, match="fall strictly"):
        make_grid(SD, 5, "leading", final="sigma_min")  # the last leading time is already 0
    with pytest.raises(UsageError, match="range"):
        make_grid(SD, 1000, "leading", offset=1)
    with pytest.raises(UsageError, match="fall strictly"):
        grid_from_times(FlowMatching(), np.array([0.9, 0.9, 0.1]))
    with pytest.raises(UsageError, match="fall strictly"):
        grid_from_times(FlowMatching(), np.array([0.5, 0.5 - 1e-12, 0.1]))  # equal in float32
    with pytest.raises(UsageError, match="two times or more"):
        grid_from_times(FlowMatching(), np.array([0.5]))
