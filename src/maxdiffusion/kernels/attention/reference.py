"""Dot-product attention with the scores in memory: the plain kernel, and the truth for every other one.

Arrays are (batch, length, heads, dim). Scores, softmax and the weighted sum are float32 whatever the inputs are; only
the result is cast to the queries' dtype. Source: Vaswani et al. 2017, equation 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, LocalKernel, Result

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
    scores = _scores(q, k, mask, precision)
    # A row with no key left has weights exp(-inf - EMPTY_LSE) = 0 and not exp(-inf + inf) = NaN.
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), EMPTY_LSE)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    total = jnp.sum(weights, axis=-1)
    total = jnp.where(total > 0, total, 1.0)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v.astype(jnp.float32), precision=precision)
    # Named before the division, whose gradient reads it: a saved quotient would spare no product.
    mixed = checkpoint_name(mixed, "attention")
    return (mixed / jnp.swapaxes(total, 1, 2)[..., None]).astype(q.dtype)


class _DotProduct:
    """The kernel in two halves; see `LocalKernel`. Tiles are of no use to it: all scores are one."""

    def forward(self, inputs: Inputs, blocks: BlockSizes, precision: jax.lax.PrecisionLike) -> Result:
        """Attention of these queries to these keys, with the scores in memory."""
        q, k, v, mask = inputs
        scores = _scores(q, k, mask, precision)
        top = jnp.maximum(jnp.max(scores, axis=-1), EMPTY_LSE)
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=-1)
        total = jnp.where(total > 0, total, 1.0)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v.astype(jnp.float32), precision=precision)
        out = mixed / jnp.swapaxes(total, 1, 2)[..., None]
        return Result(out.astype(q.dtype), jnp.swapaxes(top + jnp.log(total), 1, 2))

    def backward(
        self, inputs: Inputs, result: Result, d_out: Array, blocks: BlockSizes, precision: jax.lax.PrecisionLike
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k, v: with P the weights and dP = dO v^T, dS = P * (dP - rowsum(dO * O))."""
        q, k, v, d_out, out = (x.astype(jnp.float32) for x in (*inputs[:3], d_out, result.out))
        scale = q.shape[-1] ** -0.5
        scores = _scores(inputs.q, inputs.k, inputs.mask, precision)
        weights = jnp.exp(scores - jnp.swapaxes(result.lse, 1, 2)[..., None])
        dot = jnp.swapaxes(jnp.sum(d_out * out, axis=-1), 1, 2)[..., None]
        d_scores = weights * (jnp.einsum("bqhd,bkhd->bhqk", d_out, v, precision=precision) - dot)
        dq = scale * jnp.einsum("bhqk,bkhd->bqhd", d_scores, k, precision=precision)
        dk = scale * jnp.einsum("bhqk,bqhd->bkhd", d_scores, q, precision=precision)
        dv = jnp.einsum("bhqk,bqhd->bkhd", weights, d_out, precision=precision)
        return dq, dk, dv

    def tiles(self, num_queries: int, num_keys: int, head_dim: int) -> BlockSizes:
        """One tile of all scores."""
        del head_dim
        return BlockSizes(block_q=num_queries, block_k=num_keys)

    def runs(
        self, blocks: BlockSizes, num_queries: int, num_keys: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """One tile of all scores."""
        del blocks, head_dim, dtype
        return num_queries, num_keys


DOT_PRODUCT: LocalKernel = _DotProduct()
"""Dot-product attention as the kernel of one device, for short sequences that are cut all the same."""


def _scores(q: Array, k: Array, mask: Array | None, precision: jax.lax.PrecisionLike) -> Array:
    """float32 scores (batch, heads, queries, keys), -inf where the mask hides the key."""
    scale = q.shape[-1] ** -0.5
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
    if mask is None:
        return scores
    return jnp.where(mask[:, None, None, :] if mask.ndim == 2 else mask, scores, -jnp.inf)


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
