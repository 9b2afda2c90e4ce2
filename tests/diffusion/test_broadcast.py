"""Scalars stay, values per sample get the rank of the data."""

import jax.numpy as jnp
import pytest

from maxdiffusion.diffusion.broadcast import over_batch


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3, 5)])
def test_shapes(shape):
    like = jnp.zeros(shape, jnp.bfloat16)
    assert over_batch(jnp.float32(2), like).shape == ()
    column = over_batch(jnp.arange(4).astype(jnp.bfloat16), like)
    assert column.shape == (4,) + (1,) * (len(shape) - 1)
    assert column.dtype == jnp.float32
