"""The attention layer against its formula in float64: heads, text, masks, names."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.attention.select import Call
from maxdiffusion.nn.attention import Attention, attention_calls
from maxdiffusion.runtime import Runtime

RUNTIME = Runtime(precision=jax.lax.Precision.HIGHEST)


def by_definition(p: dict, x: np.ndarray, text: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    q, k, v = (
        np.einsum("bli,ihd->bhld", source, p[name]["kernel"])
        for name, source in (("to_q", x), ("to_k", text), ("to_v", text))
    )
    scores = np.einsum("bhld,bhmd->bhlm", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhlm,bhmd->blhd", weights, v)
    return np.einsum("blhd,hdo->blo", mixed, p["to_out_0"]["kernel"]) + p["to_out_0"]["bias"]


@pytest.mark.parametrize("case", ["self", "text", "masked"])
def test_attention_is_its_formula(case: str) -> None:
    layer = Attention(num_heads=3, runtime=RUNTIME)
    x = jax.random.normal(jax.random.key(1), (2, 5, 12))
    text = None if case == "self" else jax.random.normal(jax.random.key(2), (2, 4, 7))
    mask = jnp.array([[True, False, True, False], [False, True, True, True]]) if case == "masked" else None
    params = nn.unbox(layer.init(jax.random.key(0), x, text, mask))
    source = np.asarray(x if text is None else text, np.float64)
    expected = by_definition(
        params["params"], np.asarray(x, np.float64), source, None if mask is None else np.asarray(mask)
    )
    np.testing.assert_allclose(layer.apply(params, x, text, mask), expected, rtol=1e-5, atol=1e-5)


def test_heads_are_a_dimension_of_the_kernels() -> None:
    layer = Attention(num_heads=3, runtime=RUNTIME)
    params = layer.init(jax.random.key(0), jnp.ones((1, 2, 12)), jnp.ones((1, 4, 7)))["params"]
    assert params["to_q"]["kernel"].names == ("embed", "heads", "kv")
    assert params["to_k"]["kernel"].names == params["to_v"]["kernel"].names == ("cross_embed", "heads", "kv")
    assert params["to_out_0"]["kernel"].names == ("heads", "kv", "embed")
    assert params["to_k"]["kernel"].value.shape == (7, 3, 4)


def test_calls_are_recorded_with_their_module_and_nothing_afterwards() -> None:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
            return Attention(num_heads=3, runtime=RUNTIME, name="second")(
                Attention(num_heads=3, runtime=RUNTIME, name="first")(x), text
            )

    model, x, text = Two(), jnp.ones((1, 2, 12)), jnp.ones((1, 4, 7))
    params = jax.eval_shape(model.init, jax.random.key(0), x, text)
    calls = attention_calls(model.apply, params, x, text)
    itself, of_text = (Call(q_shape=(1, 2, 3, 4), k_shape=(1, length, 3, 4), dtype=x.dtype) for length in (2, 4))
    assert calls == (("first", itself), ("second", of_text))
