"""Blockwise attention in pure jax: tiles of keys stream past a tile of queries, and no score matrix is ever stored.

Online softmax with float32 statistics and accumulators (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al.
2022), and a backward pass that recomputes each tile of weights from the stored log-sum-exp (Dao 2023, algorithm 2).

Tiles of scores are kept as (keys, queries). XLA's CPU compiler vectorises a reduction over a major dimension but not
one over the last, and all matrix products then read the tile as it lies. Loops run over pairs of batch row and head,
so that a tile of scores is one (`block_k`, `block_q`) matrix (for each of `block_b` rows) that fits in the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, LocalKernel, Result, attend, padded, seen_keys, up
from maxdiffusion.kernels.attention.reference import check_arguments

TILE_Q = 256
TILE_K = 1024
"""Largest tiles chosen by `auto_block_sizes`: 256 x 1024 float32 scores are 1 MiB and stay in a core's second-level
cache with their weights. Measured at (2, 4096, 8, 40) on two cores; see benchmarks/attention.py."""

_ALIGN = 16
"""Chosen tiles are multiples of it: one AVX-512 register of float32."""


def flash_attention(
    q: Float[Array, "B Lq H D"],
    k: Float[Array, "B Lk H D"],
    v: Float[Array, "B Lk H D"],
    *,
    mask: Bool[Array, "B Lk"] | None = None,
    block_sizes: BlockSizes | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B Lq H D"]:
    """softmax(q k^T / sqrt(D)) v for any length, with memory linear in the lengths, forward and backward.

    Lengths need not be multiples of the tiles: the kernel pads, and padded keys are never seen. Tiles change the
    order of summation only. When the two pairs of backward tiles are equal, one pass gives all three gradients and
    computes the weights once; else there are two passes, each with its own tiles.

    Args:
        q: queries, any floating dtype; arithmetic is float32.
        k: keys, of the dtype of q.
        v: values, of the dtype of q.
        mask: True where a key may be seen, for each batch row. A row with no key to see gives 0, with gradient 0.
        block_sizes: tiles; None lets `auto_block_sizes` choose.
        precision: of the matrix products.

    Returns:
        array of the shape and dtype of q. Reverse-mode differentiable (no forward mode).

    Raises:
        UsageError: shapes or dtypes do not fit, or the mask is not one of keys.
    """
    check_arguments(q, k, v, mask)
    if mask is not None and mask.ndim != 2:
        raise UsageError(f"flash attention takes a mask of keys (batch, keys), but got {mask.shape}: use dot_product")
    if not math.prod(q.shape) or not math.prod(k.shape):
        return jnp.zeros_like(q)
    blocks = block_sizes or auto_block_sizes(q.shape[1], k.shape[1])
    return attend(FLASH_CPU, blocks, precision, Inputs(q, k, v, mask))


def auto_block_sizes(num_queries: int, num_keys: int) -> BlockSizes:
    """Tiles for these lengths, at most `TILE_Q` x `TILE_K`, that pad nothing where they can and little elsewhere."""
    return BlockSizes(block_q=_tile(num_queries, TILE_Q), block_k=_tile(num_keys, TILE_K))


def _tile(length: int, largest: int) -> int:
    """The largest tile down to half of `largest` that divides the length, else as few equal tiles as possible."""
    for tile in range(largest, largest // 2, -_ALIGN):
        if length % tile == 0:
            return tile
    even = math.ceil(length / math.ceil(length / largest))
    return math.ceil(even / _ALIGN) * _ALIGN


_Carry: TypeAlias = tuple[Array, Array, Array]
"""Of the online softmax: largest score so far, sum of weights, sum of weighted values."""

_Saved: TypeAlias = tuple[Inputs, Result]
"""What the forward pass leaves for the backward pass."""


class _KeyTiles(NamedTuple):
    """Tiles of keys: k and v (rows, keys, dim), bias (rows, keys, 1), and turned (rows, dim, keys).

    `turned` is what a pass sums over keys for each query: v in the forward pass, k for dq. Loops drop what they do
    not read.
    """

    k: Array
    v: Array
    bias: Array | None
    turned: Array


class _QueryTiles(NamedTuple):
    """Tiles of queries in the backward pass: q and d_out (rows, queries, dim), lse and dot (rows, 1, queries)."""

    q: Array
    d_out: Array
    lse: Array
    dot: Array


class _FlashCpu:
    """The kernel in two halves; see `LocalKernel`."""

    def forward(self, inputs: Inputs, blocks: BlockSizes, precision: jax.lax.PrecisionLike) -> Result:
        """Attention of these queries to these keys, in one pass over tiles of keys for each tile of queries."""
        q, k, v, _ = inputs
        (B, Lq, H, D), Lk = q.shape, k.shape[1]
        rows, tile_q, tile_k = _fit(blocks, (blocks.block_q, blocks.block_k), (B, Lq, Lk))
        queries = _tiles(_scaled(q), rows, tile_q)
        keys = _key_tiles(inputs, rows, tile_k, turned=v)

        def head(tiles: tuple[Array, _KeyTiles]) -> tuple[Array, Array]:
            q_tiles, k_tiles = tiles

            def q_tile(q_t: Array) -> tuple[Array, Array]:
                def step(carry: _Carry, of_key: _KeyTiles) -> tuple[_Carry, None]:
                    top, total, mixed = carry
                    scores = _scores(of_key, q_t, precision)
                    new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
                    weights = jnp.exp(scores - new_top)
                    shrink = jnp.exp(top - new_top)
                    total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
                    mixed = mixed * shrink + _dot(of_key.turned, weights, (2, 1), precision)
                    return (new_top, total, mixed), None

                row = (rows, 1, tile_q)
                start = (_full(q_t, row, EMPTY_LSE), _full(q_t, row, 0.0), _full(q_t, (rows, D, tile_q), 0.0))
                (top, total, mixed), _ = jax.lax.scan(step, start, k_tiles)
                total_or_one = jnp.where(total > 0, total, 1.0)
                return mixed / total_or_one, top + jnp.log(total_or_one)

            return jax.lax.map(q_tile, q_tiles)

        out, lse = jax.lax.map(head, (queries, keys))
        out = _untiled(out, (B, Lq, H), turned=True).astype(q.dtype)
        return Result(out, _untiled(lse, (B, Lq, H), turned=True)[..., 0])

    def backward(
        self, inputs: Inputs, result: Result, d_out: Array, blocks: BlockSizes, precision: jax.lax.PrecisionLike
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k, v: with P the weights and dP = dO v^T, dS = P * (dP - rowsum(dO * O))."""
        fused = blocks.dq == blocks.dkv
        dk, dv, dq = _key_pass(blocks, precision, (inputs, result), d_out, with_dq=fused)
        if dq is None:
            dq = _query_pass(blocks, precision, (inputs, result), d_out)
        return dq * (inputs.q.shape[-1] ** -0.5), dk, dv

    def tiles(self, num_queries: int, num_keys: int, head_dim: int) -> BlockSizes:
        """Tiles for one device's lengths; the size of a head does not matter here."""
        del head_dim
        return auto_block_sizes(num_queries, num_keys)

    def runs(
        self, blocks: BlockSizes, num_queries: int, num_keys: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """As written, none larger than the array."""
        del head_dim, dtype
        return _fit(blocks, (blocks.block_q, blocks.block_k), (1, num_queries, num_keys))[1:]


FLASH_CPU: LocalKernel = _FlashCpu()
"""Blockwise attention in pure jax as the kernel of one device: it runs on every platform."""


def _key_pass(
    blocks: BlockSizes, precision: jax.lax.PrecisionLike, saved: _Saved, d_out: Array, *, with_dq: bool
) -> tuple[Array, Array, Array | None]:
    """dk and dv, a tile of keys at a time; with `with_dq` each tile's share of dq is added up on the way."""
    inputs, _ = saved
    (B, Lq, H, D), Lk = inputs.q.shape, inputs.k.shape[1]
    rows, tile_q, tile_k = _fit(blocks, blocks.dkv, (B, Lq, Lk))
    queries = _query_tiles(saved, d_out, rows, tile_q)
    keys = _key_tiles(inputs, rows, tile_k, turned=inputs.k)

    def head(tiles: tuple[_QueryTiles, _KeyTiles]) -> tuple[Array, Array, Array | None]:
        q_tiles, k_tiles = tiles

        def k_tile(dq: Array | None, of_key: _KeyTiles) -> tuple[Array | None, tuple[Array, Array]]:
            def step(carry: tuple[Array, Array], of_query: _QueryTiles) -> tuple[tuple[Array, Array], Array | None]:
                dk, dv = carry
                weights, d_scores = _weights(of_key, of_query, precision)
                dk = dk + _dot(d_scores, of_query.q, (2, 1), precision)
                dv = dv + _dot(weights, of_query.d_out, (2, 1), precision)
                return (dk, dv), None if dq is None else _dot(of_key.turned, d_scores, (2, 1), precision)

            start = _full(of_key.k, (rows, tile_k, D), 0.0)
            (dk, dv), share = jax.lax.scan(step, (start, start), q_tiles)
            return None if dq is None or share is None else dq + share, (dk, dv)

        num_tiles = q_tiles.q.shape[0]
        dq = _full(q_tiles.q, (num_tiles, rows, D, tile_q), 0.0) if with_dq else None
        dq, (dk, dv) = jax.lax.scan(k_tile, dq, k_tiles)
        return dk, dv, dq

    dk, dv, dq = jax.lax.map(head, (queries, keys))
    dq = None if dq is None else _untiled(dq, (B, Lq, H), turned=True)
    return _untiled(dk, (B, Lk, H)), _untiled(dv, (B, Lk, H)), dq


def _query_pass(blocks: BlockSizes, precision: jax.lax.PrecisionLike, saved: _Saved, d_out: Array) -> Array:
    """dq before the scale, a tile of queries at a time."""
    inputs, _ = saved
    (B, Lq, H, D), Lk = inputs.q.shape, inputs.k.shape[1]
    rows, tile_q, tile_k = _fit(blocks, blocks.dq, (B, Lq, Lk))
    queries = _query_tiles(saved, d_out, rows, tile_q)
    keys = _key_tiles(inputs, rows, tile_k, turned=inputs.k)

    def head(tiles: tuple[_QueryTiles, _KeyTiles]) -> Array:
        q_tiles, k_tiles = tiles

        def q_tile(of_query: _QueryTiles) -> Array:
            def step(dq: Array, of_key: _KeyTiles) -> tuple[Array, None]:
                _, d_scores = _weights(of_key, of_query, precision)
                return dq + _dot(of_key.turned, d_scores, (2, 1), precision), None

            return jax.lax.scan(step, _full(of_query.q, (rows, D, tile_q), 0.0), k_tiles)[0]

        return jax.lax.map(q_tile, q_tiles)

    return _untiled(jax.lax.map(head, (queries, keys)), (B, Lq, H), turned=True)


def _query_tiles(saved: _Saved, d_out: Array, rows: int, tile: int) -> _QueryTiles:
    d_out = d_out.astype(jnp.float32)
    inputs, result = saved
    dot = jnp.sum(d_out * result.out.astype(jnp.float32), axis=-1, keepdims=True)
    return _QueryTiles(
        _tiles(_scaled(inputs.q), rows, tile),
        _tiles(d_out, rows, tile),
        _tiles(result.lse[..., None], rows, tile, turned=True),
        _tiles(dot, rows, tile, turned=True),
    )


def _key_tiles(inputs: Inputs, rows: int, tile: int, *, turned: Array) -> _KeyTiles:
    return _KeyTiles(
        _tiles(inputs.k, rows, tile),
        _tiles(inputs.v, rows, tile),
        _bias(inputs, rows, tile),
        _tiles(turned, rows, tile, turned=True),
    )


def _weights(of_key: _KeyTiles, of_query: _QueryTiles, precision: jax.lax.PrecisionLike) -> tuple[Array, Array]:
    """The weights of a tile and the gradient of its scores, (rows, keys, queries) each."""
    weights = jnp.exp(_scores(of_key, of_query.q, precision) - of_query.lse)
    return weights, weights * (_dot(of_key.v, of_query.d_out, (2, 2), precision) - of_query.dot)


def _scores(of_key: _KeyTiles, q_t: Array, precision: jax.lax.PrecisionLike) -> Array:
    scores = _dot(of_key.k, q_t, (2, 2), precision)
    return scores if of_key.bias is None else scores + of_key.bias


def _dot(a: Array, b: Array, contract: tuple[int, int], precision: jax.lax.PrecisionLike) -> Array:
    """Product of two tiles over one dimension of each, batch row by batch row."""
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _full(like: Array, shape: tuple[int, ...], value: float) -> Array:
    """A loop's first value: constant, yet of the type of `like` (inside `shard_map` it varies over the same axes)."""
    zero = jnp.where(like.ravel()[0] > 0, jnp.float32(0.0), jnp.float32(0.0))
    return jnp.full(shape, value, jnp.float32) + jnp.broadcast_to(zero, shape)


def _scaled(q: Array) -> Array:
    return q.astype(jnp.float32) * (q.shape[-1] ** -0.5)


def _fit(blocks: BlockSizes, tiles: tuple[int, int], sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """(batch rows, queries, keys) of a tile, none larger than the array."""
    return min(blocks.block_b, sizes[0]), min(tiles[0], sizes[1]), min(tiles[1], sizes[2])


def _tiles(x: Array, rows: int, tile: int, *, turned: bool = False) -> Array:
    """float32 tiles (batch rows and heads, tiles, rows, tile, dim), padded with zeros; `turned` swaps the last two."""
    x = padded(x, up(x.shape[1], tile))
    x = jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0), (0, 0), (0, 0))).astype(jnp.float32)
    last = "d t" if turned else "t d"
    return rearrange(x, f"(b r) (n t) h d -> (b h) n r {last}", r=rows, t=tile)


def _untiled(x: Array, sizes: tuple[int, int, int], *, turned: bool = False) -> Array:
    """The array (batch, length, heads, dim) of these tiles, padding cut off; `sizes` are its first three."""
    last = "d t" if turned else "t d"
    x = rearrange(x, f"(b h) n r {last} -> (b r) (n t) h d", h=sizes[2])
    return x[: sizes[0], : sizes[1]]


def _bias(inputs: Inputs, rows: int, tile: int) -> Array | None:
    """0 for a key that may be seen, -inf for one that may not or is padding; None when all keys may be seen."""
    B, Lk, H, _ = inputs.k.shape
    seen = seen_keys(inputs, up(Lk, tile))
    if seen is None:
        return None
    seen = jnp.pad(seen, ((0, -B % rows), (0, 0)))
    bias = jnp.where(seen, jnp.float32(0.0), jnp.float32(-jnp.inf))
    bias = rearrange(bias, "(b r) (n t) -> b n r t 1", r=rows, t=tile)
    return jnp.repeat(bias, H, axis=0)
