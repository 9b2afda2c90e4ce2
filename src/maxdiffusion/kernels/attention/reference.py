"""Dot-product attention with the scores in memory: the plain kernel, and the truth for every other one.

Arrays are (batch, length, heads, dim). Scores, softmax and the weighted sum are float32 whatever the inputs are; only
the result is cast to the queries' dtype. Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.errors import UsageError

LOWEST = -1e30
"""Floor of a row's maximum: a row with no key left has weights exp(-inf - LOWEST) = 0 and not exp(-inf + inf) = NaN."""

_MOST_HEADS = 128
"""No published model has more heads: beyond it, with a shorter length, heads and length are taken to be swapped."""


def dot_product_attention(
    q: Float[Array, "B Lq H D"],
    k: Float[Array, "B Lk H D"],
    v: Float[Array, "B Lk H D"],
    *,
    mask: Bool[Array, "B Lk"] | Bool[Array, "#B #H #Lq Lk"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B Lq H D"]:
    """softmax(q k^T / sqrt(D)) v.

    Args:
        q: queries, any floating dtype.
        k: keys, of the dtype of q.
        v: values, of the dtype of q.
        mask: True where a key may be seen: a row of keys for each batch row, or a full mask (batch, heads, queries,
            keys) whose dimensions may be 1. A query with no key to see gives 0, with gradient 0.
        precision: of the two matrix products.

    Returns:
        array of the shape and dtype of q.

    Raises:
        UsageError: shapes or dtypes do not fit, or sizes show that heads and length are swapped.
    """
    check_arguments(q, k, v, mask)
    scale = q.shape[-1] ** -0.5
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
    if mask is not None:
        seen = mask[:, None, None, :] if mask.ndim == 2 else mask
        scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    total = jnp.sum(weights, axis=-1)
    total = jnp.where(total > 0, total, 1.0)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v.astype(jnp.float32), precision=precision)
    return (mixed / jnp.swapaxes(total, 1, 2)[..., None]).astype(q.dtype)


def check_arguments(q: Array, k: Array, v: Array, mask: Array | None) -> None:
    """Refuses arrays that are not attention arguments in the layout (batch, length, heads, dim).

    Raises:
        UsageError: with the shapes, what does not fit, and the layout that is expected.
    """
    shapes = f"q{_shape(q)}, k{_shape(k)}, v{_shape(v)}" + ("" if mask is None else f", mask{_shape(mask)}")
    layout = "attention arrays are (batch, length, heads, dim)"
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise UsageError(f"{layout}, four dimensions each, but got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise UsageError(
            f"attention needs one floating dtype, but got q {q.dtype}, k {k.dtype}, v {v.dtype}: cast them"
        )
    if k.shape != v.shape:
        raise UsageError(f"keys and values differ in shape: {shapes}")
    swap = "swap them first: jnp.swapaxes(x, 1, 2)"
    if _swapped(q, k, mask):
        raise UsageError(f"{layout}, but in {shapes} heads and length look swapped: {swap}")
    for dim, name in ((0, "batch"), (2, "heads"), (3, "dim")):
        if q.shape[dim] != k.shape[dim]:
            raise UsageError(f"queries and keys differ in {name} (dimension {dim}): {shapes}; {layout}")
    if mask is not None:
        _check_mask(q, k, mask, shapes)


def _check_mask(q: Array, k: Array, mask: Array, shapes: str) -> None:
    (B, Lq, H, _), Lk = q.shape, k.shape[1]
    if mask.dtype != jnp.bool_:
        raise UsageError(f"mask is {mask.dtype}: make it boolean, True where a key may be seen (`mask > 0`)")
    full = zip(mask.shape, (B, H, Lq, Lk), strict=False)
    fits = mask.ndim == 4 and mask.shape[3] == Lk and all(size in (1, wanted) for size, wanted in full)
    if mask.shape != (B, Lk) and not fits:
        raise UsageError(
            f"mask must be (batch, keys) = {(B, Lk)} or (batch, heads, queries, keys) = {(B, H, Lq, Lk)} "
            f"(1 allowed but in keys), but got {shapes}"
        )


def _swapped(q: Array, k: Array, mask: Array | None) -> bool:
    """Whether sizes can only mean (batch, heads, length, dim)."""
    if q.shape[1] == k.shape[1] and q.shape[2] != k.shape[2]:
        return True
    if mask is not None and mask.ndim == 2 and mask.shape[1] == k.shape[2] != k.shape[1]:
        return True
    return k.shape[2] > _MOST_HEADS and k.shape[1] < k.shape[2]


def _shape(x: Array) -> str:
    return str(tuple(x.shape))
