"""Flash attention on TPUs: JAX's Pallas splash attention, padded and masked here so that any length is exact.

Splash attention wants lengths that its tiles divide and tiles of whole lanes (multiples of 128). Keys that may not be
seen, and keys that padding added, carry another segment id than the queries. Head sizes need no padding.

How `BlockSizes` maps to the tiles of splash attention:

| ours | splash | what is done to it |
|---|---|---|
| `block_q` | `block_q` | rounded up to a multiple of 128, at most the padded length; the length is padded to it |
| `block_k` | `block_kv`, `block_kv_compute` | the same; computed in equal parts of at most 512 keys |
| `block_q_dkv` | `block_q_dkv` | the largest multiple of 128 up to it that divides the padded length |
| `block_k_dkv` | `block_kv_dkv`, `block_kv_dkv_compute` | the same; computed in equal parts of at most 512 keys |
| `block_q_dq` | `block_q_dq` | as `block_q_dkv` |
| `block_k_dq` | `block_kv_dq` | as `block_q_dkv` |
| `block_b` | none | batch rows are one dimension of the kernel's grid: one at a time |
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as splash_mask
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, LocalKernel, Result, padded, seen_keys, up
from maxdiffusion.log import say_once

log = logging.getLogger(__name__)

LANES = 128
"""Width of a TPU register; every tile of splash attention is a multiple of it."""

TILE_Q = 512
TILE_K = 1024
"""Largest tiles chosen by `SplashKernel.tiles`. The backward kernels fill half of the 16 MiB of on-chip memory that a
kernel is granted on v5e at head size 128 in float32; not tuned on hardware."""

_COMPUTE_K = 512
"""Keys of one matrix product inside a tile of keys, at most: scores of 512 x 512 float32 are 1 MiB."""

_ALL_SEEN = splash_mask.MaskInfo(None, None, None, None, None)
"""No static mask: every tile is computed, and segment ids alone hide keys."""


class _Fit(NamedTuple):
    """Legal tiles, and the lengths that they divide."""

    blocks: splash.BlockSizes
    num_queries: int
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class SplashKernel:
    """The `LocalKernel` of TPUs.

    Products of bfloat16 arrays are summed in float32, whatever `precision` says; products of float32 arrays follow it,
    where TPU kernels know the default (bfloat16 passes) and full float32 only. Gradients leave the kernel in the dtype
    of the queries and are returned as float32.

    Attributes:
        interpret: run the kernel's program in jax instead of on a TPU, for tests.
    """

    interpret: bool = False

    def forward(self, inputs: Inputs, blocks: BlockSizes, precision: jax.lax.PrecisionLike) -> Result:
        """Attention of these queries to these keys."""
        (Lq, D), Lk = inputs.q.shape[1::2], inputs.k.shape[1]
        fit = _fit(blocks, Lq, Lk)
        if blocks != self.tiles(Lq, Lk, D):
            _say_changed(blocks, fit)
        kernel = splash.SplashAttentionKernel(
            _ALL_SEEN,
            None,
            None,
            block_sizes=fit.blocks,
            is_mqa=False,
            save_residuals=True,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            residual_checkpoint_name=None,
            mask_function=None,
            interpret=self.interpret,
        )
        q, k, v = _arrays(inputs, fit)
        with _precision(precision, q.dtype):
            out, (lse,) = jax.vmap(kernel)(q, k, v, _segments(inputs, fit))
        out, lse = (jnp.swapaxes(x, 1, 2)[:, :Lq] for x in (out, lse))
        if inputs.mask is None:
            return Result(out, lse)
        sees = jnp.any(inputs.mask, axis=1)[:, None, None]
        return Result(
            jnp.where(sees[..., None], out, jnp.zeros((), out.dtype)), jnp.where(sees, lse, jnp.float32(EMPTY_LSE))
        )

    def backward(
        self,
        inputs: Inputs,
        result: Result,
        d_out: Float[Array, "B Lq H D"],
        blocks: BlockSizes,
        precision: jax.lax.PrecisionLike,
    ) -> tuple[Float[Array, "B Lq H D"], Float[Array, "B Lk H D"], Float[Array, "B Lk H D"]]:
        """Gradients of q, k and v, float32; `result` is that of the whole attention."""
        (Lq, D), Lk = inputs.q.shape[1::2], inputs.k.shape[1]
        fit = _fit(blocks, Lq, Lk)
        q, k, v = _arrays(inputs, fit)
        out, d_out = (_heads_first(x.astype(q.dtype), fit.num_queries) for x in (result.out, d_out))
        lse = jnp.swapaxes(padded(result.lse, fit.num_queries), 1, 2)
        gradients = partial(_gradients, fit.blocks, self.interpret)
        with _precision(precision, q.dtype):
            dq, dk, dv = jax.vmap(gradients)((q, k, v), _segments(inputs, fit), out, lse, d_out)
        dq, dk, dv = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (dq, dk, dv))
        return dq[:, :Lq] * (D**-0.5), dk[:, :Lk], dv[:, :Lk]

    def tiles(self, num_queries: int, num_keys: int, head_dim: int) -> BlockSizes:
        """Tiles that pad nothing where they can and little elsewhere; heads beyond 128 get half as many keys."""
        largest = TILE_K if head_dim <= LANES else TILE_K // 2
        return BlockSizes(block_q=_tile(num_queries, TILE_Q), block_k=_tile(num_keys, largest))

    def runs(
        self, blocks: BlockSizes, num_queries: int, num_keys: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """Whole lanes, as the module's table says."""
        del head_dim, dtype
        legal = _fit(blocks, num_queries, num_keys).blocks
        return legal.block_q, legal.block_kv


FLASH_TPU: LocalKernel = SplashKernel()
"""Splash attention as the kernel of one TPU."""


def _gradients(
    blocks: splash.BlockSizes,
    interpret: bool,
    arrays: tuple[Array, Array, Array],
    segments: splash.SegmentIds | None,
    out: Array,
    lse: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of one batch row, from a log-sum-exp and an output that may be those of more keys than these.

    The library's own backward rule is called with them, since its public face differentiates its own forward pass only.
    """
    residuals = (*arrays, segments, None, out, lse, _ALL_SEEN, _ALL_SEEN)
    rule = splash._splash_attention_bwd  # pyright: ignore[reportPrivateUsage]
    found = rule(False, splash.DEFAULT_MASK_VALUE, False, blocks, None, None, None, interpret, residuals, d_out)
    return found[3], found[4], found[5]


def _arrays(inputs: Inputs, fit: _Fit) -> tuple[Array, Array, Array]:
    """Scaled queries, keys and values as (batch, heads, length, dim), padded with zeros."""
    q = inputs.q.astype(jnp.float32) * (inputs.q.shape[-1] ** -0.5)
    return (
        _heads_first(q.astype(inputs.q.dtype), fit.num_queries),
        _heads_first(inputs.k, fit.num_keys),
        _heads_first(inputs.v, fit.num_keys),
    )


def _heads_first(x: Array, length: int) -> Array:
    return jnp.swapaxes(padded(x, length), 1, 2)


def _segments(inputs: Inputs, fit: _Fit) -> splash.SegmentIds | None:
    """Queries and keys that may be seen are in segment 1, others in 0; None where every key may be seen."""
    seen = seen_keys(inputs, fit.num_keys)
    if seen is None:
        return None
    return splash.SegmentIds(q=jnp.ones((seen.shape[0], fit.num_queries), jnp.int32), kv=seen.astype(jnp.int32))


def _precision(precision: jax.lax.PrecisionLike, dtype: jnp.dtype) -> contextlib.AbstractContextManager[None]:
    """The precision of products inside the kernel, which takes it from the context.

    A TPU kernel multiplies bfloat16 in one way only, and float32 at the default precision or in full.
    """
    ambient = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    wanted = ambient if precision is None else precision
    default = wanted in (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)
    return jax.default_matmul_precision("default" if dtype != jnp.float32 or default else "highest")


def _fit(blocks: BlockSizes, num_queries: int, num_keys: int) -> _Fit:
    """The tiles as splash attention can run them, chosen after padding (the module's table)."""
    (block_q, num_q), (block_k, num_k) = (
        _forward_tile(size, length) for size, length in ((blocks.block_q, num_queries), (blocks.block_k, num_keys))
    )
    (q_dkv, k_dkv), (q_dq, k_dq) = (
        (_dividing(tile_q, num_q), _dividing(tile_k, num_k)) for tile_q, tile_k in (blocks.dkv, blocks.dq)
    )
    legal = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=_dividing(_COMPUTE_K, block_k),
        block_q_dkv=q_dkv,
        block_kv_dkv=k_dkv,
        block_kv_dkv_compute=_dividing(_COMPUTE_K, k_dkv),
        block_q_dq=q_dq,
        block_kv_dq=k_dq,
    )
    return _Fit(legal, num_q, num_k)


def _forward_tile(size: int, length: int) -> tuple[int, int]:
    """A legal tile for a length, and the length padded to it."""
    tile = min(up(size, LANES), up(length, LANES))
    return tile, up(length, tile)


def _dividing(size: int, length: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most `size`, at least 128."""
    return next(tile for tile in range(min(up(size, LANES), length), 0, -LANES) if length % tile == 0)


def _tile(length: int, largest: int) -> int:
    """The largest tile down to a quarter of `largest` that divides the length, else as few equal tiles as possible."""
    for tile in range(largest, largest // 4 - 1, -LANES):
        if length % tile == 0:
            return tile
    return up(math.ceil(length / math.ceil(length / largest)), LANES)


def _say_changed(blocks: BlockSizes, fit: _Fit) -> None:
    """Says once which of the user's block sizes run otherwise than written; shorter for a short length is no news."""
    legal, num_queries, num_keys = fit
    wished = {
        "block_q": (blocks.block_q, legal.block_q, num_queries),
        "block_k": (blocks.block_k, legal.block_kv, num_keys),
        "block_q_dkv": (blocks.dkv[0], legal.block_q_dkv, num_queries),
        "block_k_dkv": (blocks.dkv[1], legal.block_kv_dkv, num_keys),
        "block_q_dq": (blocks.dq[0], legal.block_q_dq, num_queries),
        "block_k_dq": (blocks.dq[1], legal.block_kv_dq, num_keys),
    }
    changed = [
        f"{name}={wish} runs as {tile}"
        for name, (wish, tile, length) in wished.items()
        if tile is not None and tile != min(wish, length)
    ]
    if blocks.block_b > 1:
        changed.append(f"block_b={blocks.block_b} runs as 1")
    if changed:
        say_once(
            log, f"attention: {', '.join(changed)} (TPU tiles are multiples of {LANES} that divide the padded length)"
        )
