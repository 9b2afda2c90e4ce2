"""Dense layers against einsum in float64, heads and gates included; embedding tables."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.nn.linear import Dense, Embed
from maxdiffusion.runtime import Runtime

RUNTIME = Runtime(precision=jax.lax.Precision.HIGHEST)


def values(layer: nn.Module, *args: jax.Array) -> dict:
    """Random parameters, biases too."""
    leaves, tree = jax.tree.flatten(nn.unbox(layer.init(jax.random.key(0), *args)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])


@pytest.mark.parametrize(
    ("features", "names", "num_inputs", "shape", "formula"),
    [
        ((5,), ("embed", "mlp"), 1, (2, 3, 4), "bli,io->blo"),
        ((2, 3), ("embed", "heads", "kv"), 1, (2, 3, 4), "bli,ihd->blhd"),
        ((4,), ("heads", "kv", "embed"), 2, (2, 3, 2, 5), "blhd,hdo->blo"),
        ((2, 6), ("embed", None, "mlp"), 1, (3, 4), "bi,ipm->bpm"),
    ],
)
def test_dense_is_the_product_with_its_kernel(
    features: tuple[int, ...], names: tuple, num_inputs: int, shape: tuple[int, ...], formula: str
) -> None:
    layer = Dense(features=features, names=names, num_inputs=num_inputs, runtime=RUNTIME)
    x = jax.random.normal(jax.random.key(2), shape)
    params = values(layer, x)
    kernel, bias = (np.asarray(params["params"][name], np.float64) for name in ("kernel", "bias"))
    expected = np.einsum(formula, np.asarray(x, np.float64), kernel) + bias
    np.testing.assert_allclose(layer.apply(params, x), expected, rtol=1e-5, atol=1e-5)  # float32 sums of 10 terms


def test_dense_computes_in_the_models_dtype_under_strict_promotion() -> None:
    layer = Dense(features=(4,), names=("embed", "mlp"), runtime=Runtime(dtype=jnp.bfloat16))
    x = jnp.ones((2, 3))
    with jax.numpy_dtype_promotion("strict"):
        params = layer.init(jax.random.key(0), x)
        assert layer.apply(params, x).dtype == jnp.bfloat16


def test_a_dense_without_bias_has_one_parameter() -> None:
    layer = Dense(features=(4,), names=("embed", "mlp"), use_bias=False, runtime=RUNTIME)
    assert set(layer.init(jax.random.key(0), jnp.ones((2, 3)))["params"]) == {"kernel"}


def test_embed_takes_rows_and_never_a_wrong_one() -> None:
    layer = Embed(num_embeddings=6, features=3, runtime=RUNTIME)
    params = values(layer, jnp.array([0]))
    table = np.asarray(params["params"]["embedding"])
    rows = np.asarray(layer.apply(params, jnp.array([[4, 0], [5, 6]])))
    np.testing.assert_array_equal(rows[0], table[[4, 0]])
    np.testing.assert_array_equal(rows[1, 0], table[5])
    assert np.isnan(rows[1, 1]).all()
    assert np.isnan(layer.apply(params, jnp.array([-1]))).all()
