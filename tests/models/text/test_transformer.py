"""The text transformer ignores padding, knows the order of words, and is the same on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.errors import UsageError
from maxdiffusion.models.text.transformer import TextTransformer

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "max_length": 8,
    "width": 16,
    "num_layers": 2,
    "num_heads": 2,
    "precision": "highest",
}
IDS = jnp.array([[2, 5, 6, 0, 0], [2, 6, 5, 0, 0], [2, 5, 6, 9, 9], [2, 0, 0, 0, 0]])
MASK = jnp.array([[1, 1, 1, 0, 0]] * 3 + [[1, 0, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def params() -> Any:
    return TextTransformer(**SIZES).init_weights(jax.random.key(0))


def test_padding_changes_nothing(params: Any) -> None:
    output = TextTransformer(**SIZES).apply({"params": params}, IDS, MASK)
    np.testing.assert_allclose(output.states[0, :3], output.states[2, :3], rtol=1e-6)
    np.testing.assert_allclose(output.pooled[0], output.pooled[2], rtol=1e-6)
    short = TextTransformer(**SIZES).apply({"params": params}, IDS[:1, :3], MASK[:1, :3])
    np.testing.assert_allclose(short.pooled, output.pooled[:1], rtol=1e-5, atol=1e-6)


def test_order_and_words_change_the_text(params: Any) -> None:
    pooled = np.asarray(TextTransformer(**SIZES).apply({"params": params}, IDS, MASK).pooled)
    assert np.abs(pooled[0] - pooled[1]).max() > 1e-3
    assert np.abs(pooled[0] - pooled[3]).max() > 1e-2


@pytest.mark.parametrize("rules", [None, "fsdp_tp"])
def test_values_and_gradients_are_the_same_on_a_mesh(params: Any, rules: str | None, fsdp_tensor: Mesh) -> None:
    """The embedding's gradient is a scatter, which partitioners have got wrong before."""

    def loss(model: TextTransformer, params: Any) -> jax.Array:
        output = model.apply({"params": params}, IDS, MASK)
        return jnp.sum(jnp.square(output.pooled)) + jnp.sum(jnp.sin(output.states) * MASK[:, :, None])

    alone = TextTransformer(**SIZES)
    spread = TextTransformer(**SIZES, mesh=fsdp_tensor, logical_axis_rules=rules)
    wanted = jax.jit(jax.value_and_grad(lambda p: loss(alone, p)))(params)
    found = jax.jit(jax.value_and_grad(lambda p: loss(spread, p)))(spread.init_weights(jax.random.key(0)))
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        # float32 sums in another order, relative to the largest value.
        np.testing.assert_allclose(a, b, atol=1e-5 * size)


def test_long_texts_and_other_masks_are_refused(params: Any) -> None:
    model = TextTransformer(**SIZES)
    for ids, mask in ((jnp.ones((1, 9), int), jnp.ones((1, 9), bool)), (IDS, MASK[:, :2])):
        with pytest.raises(UsageError, match=r"takes two arrays of shape \(batch, at most 8\)"):
            model.apply({"params": params}, ids, mask)


@pytest.mark.parametrize(("name", "value"), [("num_heads", 3), ("width", 0)])
def test_sizes_that_do_not_fit_are_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=name):
        TextTransformer(**{**SIZES, name: value})
