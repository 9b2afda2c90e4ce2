"""The registry, and what every solver owes to `sample`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.solvers import SOLVERS, Step, get_solver
from maxdiffusion.errors import UsageError


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_every_solver_keeps_shapes_and_dtypes(name):
    solver = get_solver(name)
    assert hash(solver) == hash(get_solver(name))  # a static argument of jit
    x, x0, eps, noise = jax.random.normal(jax.random.key(0), (4, 2, 3))
    state = solver.init(x)
    for levels in ((0.0, 1.0, 0.3, 0.8, np.inf), (0.3, 0.8, 1.0, 0.0, np.inf)):
        step = Step(*(jnp.float32(value) for value in levels))
        before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
        state, out = solver.step(state, x, x0, eps, step, noise if solver.stochastic else None)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == before  # a scan's carry
        assert out.shape == x.shape and out.dtype == jnp.float32
        assert np.all(np.isfinite(out))
    np.testing.assert_allclose(out, x0, rtol=1e-6)  # a step to clean data lands on the estimate


def test_unknown_solver():
    with pytest.raises(UsageError, match="did you mean 'dpmpp_2m'"):
        get_solver("dpmpp2m")
    with pytest.raises(UsageError, match="valid: ddim, dpmpp_2m, euler, euler_ancestral"):
        get_solver("zzz")
