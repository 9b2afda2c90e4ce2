from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.reference import dot_product_attention
from tests.kernels.attention.cases import F32_LIMIT, arrays, errors, key_mask, with_grads


def _by_definition(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The definition, one query at a time, in float64; mask (B, H, Lq, Lk)."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = mask[b, h, i]
        if seen.any():
            scores = k[b, seen, h] @ q[b, i, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ v[b, seen, h] / weights.sum()
    return out


@pytest.mark.parametrize("kind", ["none", "keys", "full"])
def test_is_the_definition(kind: str) -> None:
    q, k, v, _ = arrays((3, 7, 2, 8), 5)
    mask = key_mask(3, 5)
    full = np.broadcast_to(np.asarray(mask)[:, None, None, :], (3, 2, 7, 5))
    if kind == "full":
        full = np.tril(np.ones((7, 5), bool), -1)[None, None] & full
        mask = jnp.asarray(full)
    if kind == "none":
        mask, full = None, np.ones_like(full)
    wanted = _by_definition(*(np.asarray(x, np.float64) for x in (q, k, v)), full)
    found = dot_product_attention(q, k, v, mask=mask)
    assert errors((found,), (wanted,)) < [1e-6]  # float32 eps is 1.2e-7, sums of at most 8 terms


def test_agrees_with_jax() -> None:
    q, k, v, _ = arrays((2, 9, 3, 16), 11)
    mask = key_mask(2, 11).at[-1].set(True)
    wanted = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :])
    assert errors((dot_product_attention(q, k, v, mask=mask),), (wanted,)) < [1e-6]


def test_rows_without_keys_give_zero_and_finite_gradients() -> None:
    args = arrays((2, 6, 2, 8), 4)
    out, *grads = with_grads(dot_product_attention, key_mask(2, 4))(*args)
    assert np.all(np.asarray(out[-1]) == 0.0)
    assert np.abs(np.asarray(out[0])).max() > 0.1
    for grad in grads:
        assert np.all(np.isfinite(grad))
        assert np.all(np.asarray(grad[-1]) == 0.0)
        assert np.abs(np.asarray(grad[0])).max() > 0.01


def test_bfloat16_inputs_keep_float32_inside() -> None:
    q, k, v, _ = arrays((1, 32, 2, 16), 48, jnp.bfloat16)
    found = dot_product_attention(q, k, v)
    assert found.dtype == jnp.bfloat16
    wanted = dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert np.array_equal(np.asarray(found), np.asarray(wanted.astype(jnp.bfloat16)))


def test_precision_reaches_both_products() -> None:
    q, k, v, _ = arrays((1, 4, 1, 8), 4)
    text = jax.jit(lambda *a: dot_product_attention(*a, precision="highest")).lower(q, k, v).as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == 2


def _swap(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def test_swapped_heads_and_length_are_refused_where_sizes_reveal_it() -> None:
    q, k, v, _ = arrays((1, 300, 2, 8), 300)
    short = k[:, :5]
    cases = [
        (_swap(q), _swap(short), _swap(short), None),  # heads are equal, lengths differ
        (_swap(q), _swap(k), _swap(v), jnp.ones((1, 300), bool)),  # the mask counts keys
        (_swap(q), _swap(k), _swap(v), None),  # no model has 300 heads for 2 tokens
    ]
    for case in cases:
        with pytest.raises(UsageError, match=r"\(batch, length, heads, dim\).*look swapped.*swapaxes"):
            dot_product_attention(*case[:3], mask=case[3])


def test_few_tokens_of_many_heads_are_accepted() -> None:
    q, k, v, _ = arrays((1, 1, 24, 8), 5)
    assert dot_product_attention(q, k, v).shape == (1, 1, 24, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q[0], k, v, m), "four dimensions each"),
        (lambda q, k, v, m: (q, k[:, :3], v, m), "keys and values differ"),
        (lambda q, k, v, m: (q, k[:, :, :1], v[:, :, :1], m), "differ in heads"),
        (lambda q, k, v, m: (q[:1], k, v, m), "differ in batch"),
        (lambda q, k, v, m: (q[..., :4], k, v, m), "differ in dim"),
        (lambda q, k, v, m: (q, k.astype(jnp.bfloat16), v, m), "one floating dtype.*bfloat16"),
        (lambda q, k, v, m: (q, k, v, m.astype(jnp.int32)), "mask is int32: make it boolean"),
        (lambda q, k, v, m: (q, k, v, m[:, :3]), r"\(batch, keys\) = \(2, 5\)"),
        (lambda q, k, v, m: (q, k, v, jnp.ones((2, 3, 7, 5), bool)), r"\(2, 2, 7, 5\)"),
    ],
)
def test_misfits_are_named(change, message: str) -> None:
    q, k, v, _ = arrays((2, 7, 2, 8), 5)
    with pytest.raises(UsageError, match=message):
        q, k, v, mask = change(q, k, v, key_mask(2, 5))
        dot_product_attention(q, k, v, mask=mask)


def test_limit_can_fail() -> None:
    """The measure that every kernel test uses is above its limit when one key is dropped."""
    q, k, v, _ = arrays((1, 9, 1, 8), 300)
    whole = dot_product_attention(q, k, v)
    dropped = dot_product_attention(q, k[:, :-1], v[:, :-1])
    assert errors((dropped,), (whole,)) > [100 * F32_LIMIT]
