"""Flash attention on GPUs: a Pallas-Triton kernel for any length and mask of keys, and cuDNN's where it can serve.

The Triton kernel gives the log-sum-exp and takes a global one in the backward pass, so that rings can be built of it.
Online softmax in float32; weights are rounded to the dtype of the values before they meet them (Dao 2023, algorithms 1
and 2). Lengths are padded here to whole tiles, and keys that padding added are hidden like those that a mask hides:
a kernel that runs over the end of an array is silently wrong.

How `BlockSizes` maps to the tiles of the Triton kernel; each is rounded up to a power of two, at least 16, is at most
the padded length, and is halved until the program fits shared memory:

| ours | what it tiles |
|---|---|
| `block_q`, `block_k` | the forward kernel: a program holds `block_q` queries and walks over tiles of `block_k` keys |
| `block_q_dkv`, `block_k_dkv` | gradients of keys and values: holds `block_k_dkv` keys, walks over queries |
| `block_q_dq`, `block_k_dq` | gradient of queries: holds `block_q_dq` queries, walks over keys |
| `block_b` | nothing: each program has one batch row and one head |

cuDNN chooses its own tiles and ignores all seven.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, LocalKernel, Result, padded, seen_keys, up
from maxdiffusion.log import say_once

log = logging.getLogger(__name__)

WIDEST = 256
"""Heads beyond it do not fit shared memory in float32."""

_LEAST = 16
"""Smallest side of a matrix product on tensor cores."""

_SHARED = 99 * 1024
"""Bytes of shared memory that one program may take: what every GPU since compute capability 8.0 has."""

_STAGES = 2
"""Tiles that a program walks over are loaded this many at a time."""

_TILES = (
    (64, (128, 64), (64, 64), (64, 64)),
    (128, (128, 64), (32, 64), (64, 32)),
    (WIDEST, (64, 32), (32, 32), (32, 32)),
)
"""Head sizes up to the first number: tiles (queries, keys) of the forward kernel, of dk and dv, of dq."""


@dataclass(frozen=True, kw_only=True)
class TritonKernel:
    """The `LocalKernel` of GPUs.

    Attributes:
        interpret: run the kernel's program in jax instead of on a GPU, for tests.
    """

    interpret: bool = False

    def forward(self, inputs: Inputs, blocks: BlockSizes, precision: jax.lax.PrecisionLike) -> Result:
        """Attention of these queries to these keys."""
        B, Lq, H, D = inputs.q.shape
        fit = _fit_inputs(blocks, inputs)
        if blocks != self.tiles(Lq, inputs.k.shape[1], D):
            _say_changed(blocks, fit, (Lq, inputs.k.shape[1]))
        tile_q, tile_k = fit.forward
        q = padded(inputs.q, up(Lq, tile_q))
        k, v, hidden = _keys(inputs, tile_k)
        length = q.shape[1]
        row = pl.BlockSpec((None, tile_q, None), lambda i, b, h: (b, i, h))
        tile = pl.BlockSpec((None, tile_q, None, _width(D)), lambda i, b, h: (b, i, h, 0))
        out, lse = pl.pallas_call(
            partial(_forward_kernel, tile_k=tile_k, dim=D, precision=precision),
            grid=(length // tile_q, B, H),
            in_specs=[tile, *_whole(k, v), _whole_rows(hidden, heads=False)],
            out_specs=[tile, row],
            out_shape=[
                jax.ShapeDtypeStruct((B, length, H, D), q.dtype),
                jax.ShapeDtypeStruct((B, length, H), jnp.float32),
            ],
            compiler_params=_params(D),
            interpret=self.interpret,
            name="flash_forward",
        )(q, k, v, hidden)
        return Result(out[:, :Lq], lse[:, :Lq])

    def backward(
        self,
        inputs: Inputs,
        result: Result,
        d_out: Float[Array, "B Lq H D"],
        blocks: BlockSizes,
        precision: jax.lax.PrecisionLike,
    ) -> tuple[Float[Array, "B Lq H D"], Float[Array, "B Lk H D"], Float[Array, "B Lk H D"]]:
        """Gradients of q, k and v, float32; `result` is that of the whole attention."""
        d_out = d_out.astype(inputs.q.dtype)
        dot = jnp.sum(d_out.astype(jnp.float32) * result.out.astype(jnp.float32), axis=-1)
        dk, dv = self._of_keys(inputs, (d_out, result.lse, dot), blocks, precision)
        return self._of_queries(inputs, (d_out, result.lse, dot), blocks, precision), dk, dv

    def tiles(self, num_queries: int, num_keys: int, head_dim: int) -> BlockSizes:
        """Tiles that fit shared memory in 16-bit dtypes (float32 takes smaller ones); not tuned on hardware."""
        forward, dkv, dq = next(tiles for widest, *tiles in _TILES if head_dim <= widest or widest == WIDEST)
        sizes = {}
        for (name_q, name_k), (tile_q, tile_k) in (
            (("block_q", "block_k"), forward),
            (("block_q_dkv", "block_k_dkv"), dkv),
            (("block_q_dq", "block_k_dq"), dq),
        ):
            sizes[name_q], sizes[name_k] = min(tile_q, _power(num_queries)), min(tile_k, _power(num_keys))
        return BlockSizes(**sizes)

    def runs(
        self, blocks: BlockSizes, num_queries: int, num_keys: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """Powers of two within shared memory, as the module says."""
        return _fit(blocks, (num_queries, num_keys), head_dim, dtype).forward

    def _of_keys(
        self,
        inputs: Inputs,
        saved: tuple[Array, Array, Array],
        blocks: BlockSizes,
        precision: jax.lax.PrecisionLike,
    ) -> tuple[Array, Array]:
        """dk and dv; each program holds a tile of keys."""
        (B, Lk, H, D) = inputs.k.shape
        tile_q, tile_k = _fit_inputs(blocks, inputs).dkv
        q, d_out, lse, dot = (padded(x, up(x.shape[1], tile_q)) for x in (inputs.q, *saved))
        k, v, hidden = _keys(inputs, tile_k)
        tile = pl.BlockSpec((None, tile_k, None, _width(D)), lambda i, b, h: (b, i, h, 0))
        hidden_tile = None if hidden is None else pl.BlockSpec((None, tile_k), lambda i, b, h: (b, i))
        shape = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        dk, dv = pl.pallas_call(
            partial(_keys_kernel, tile_q=tile_q, dim=D, precision=precision),
            grid=(k.shape[1] // tile_k, B, H),
            in_specs=[*_whole(q), tile, tile, hidden_tile, *_whole(d_out), _whole_rows(lse), _whole_rows(dot)],
            out_specs=[tile, tile],
            out_shape=[shape, shape],
            compiler_params=_params(D),
            interpret=self.interpret,
            name="flash_backward_keys",
        )(q, k, v, hidden, d_out, lse, dot)
        return dk[:, :Lk], dv[:, :Lk]

    def _of_queries(
        self,
        inputs: Inputs,
        saved: tuple[Array, Array, Array],
        blocks: BlockSizes,
        precision: jax.lax.PrecisionLike,
    ) -> Array:
        """dq; each program holds a tile of queries."""
        (B, Lq, H, D) = inputs.q.shape
        tile_q, tile_k = _fit_inputs(blocks, inputs).dq
        q, d_out, lse, dot = (padded(x, up(x.shape[1], tile_q)) for x in (inputs.q, *saved))
        k, v, hidden = _keys(inputs, tile_k)
        tile = pl.BlockSpec((None, tile_q, None, _width(D)), lambda i, b, h: (b, i, h, 0))
        row = pl.BlockSpec((None, tile_q, None), lambda i, b, h: (b, i, h))
        dq = pl.pallas_call(
            partial(_queries_kernel, tile_k=tile_k, dim=D, precision=precision),
            grid=(q.shape[1] // tile_q, B, H),
            in_specs=[tile, *_whole(k, v), _whole_rows(hidden, heads=False), tile, row, row],
            out_specs=tile,
            out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
            compiler_params=_params(D),
            interpret=self.interpret,
            name="flash_backward_queries",
        )(q, k, v, hidden, d_out, lse, dot)
        return dq[:, :Lq]


FLASH_GPU: LocalKernel = TritonKernel()
"""The Triton kernel as the kernel of one GPU."""


def cudnn_attention(
    q: Float[Array, "B Lq H D"], k: Float[Array, "B Lk H D"], v: Float[Array, "B Lk H D"]
) -> Float[Array, "B Lq H D"]:
    """softmax(q k^T / sqrt(D)) v by cuDNN, differentiable: a whole attention, not a `LocalKernel`.

    It rounds the log-sum-exp to the dtype of the queries and takes no global one, so that rings cannot use it.
    """
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


CUDNN_ABSENT = "cuDNN is not detected"
"""What jax says where this process has no cuDNN that could be asked."""


def cudnn_refusal(
    q_shape: Sequence[int], k_shape: Sequence[int], dtype: DTypeLike, *, masked: bool, ring: bool
) -> str | None:
    """Why cuDNN cannot compute this attention here, or None where it can.

    jax decides, from the cuDNN that this process has; on a machine without one nothing can be compiled for it either.
    A mask of keys would have to become a bias of batch x queries x keys.
    """
    if ring:
        return "a ring needs its log-sum-exp in float32"
    if masked:
        return "it takes no mask of keys"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {jnp.dtype(dtype)}"
    return _cudnn_refusal(tuple(q_shape), tuple(k_shape), jnp.dtype(dtype))


@functools.lru_cache(maxsize=1024)
def _cudnn_refusal(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: jnp.dtype) -> str | None:
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in (q_shape, k_shape))
    try:
        jax.eval_shape(cudnn_attention, q, k, k)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


def _forward_kernel(*refs: Any, tile_k: int, dim: int, precision: jax.lax.PrecisionLike) -> None:
    """One tile of queries, over all tiles of keys."""
    q_ref, k_ref, v_ref, hidden_ref, out_ref, lse_ref = refs
    load, dot = partial(_load, dim=dim), partial(_dot, precision=precision)
    q = load(q_ref)
    tile_q, width = q.shape

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        at = pl.ds(i * tile_k, tile_k)
        k, v = load(k_ref.at[at]), load(v_ref.at[at])
        scores = _scores(dot(q, k.T), dim, None if hidden_ref is None else hidden_ref[at][None, :])
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        mixed = mixed * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return new_top, total * shrink + jnp.sum(weights, axis=1), mixed

    start = (
        jnp.full((tile_q,), EMPTY_LSE, jnp.float32),
        jnp.zeros((tile_q,), jnp.float32),
        jnp.zeros((tile_q, width), jnp.float32),
    )
    top, total, mixed = jax.lax.fori_loop(0, k_ref.shape[0] // tile_k, step, start)
    total = jnp.where(total > 0, total, 1.0)
    _store(out_ref, mixed / total[:, None], dim)
    lse_ref[...] = top + jnp.log(total)


def _keys_kernel(*refs: Any, tile_q: int, dim: int, precision: jax.lax.PrecisionLike) -> None:
    """dk and dv of one tile of keys, over all tiles of queries."""
    q_ref, k_ref, v_ref, hidden_ref, d_out_ref, lse_ref, dot_ref, dk_ref, dv_ref = refs
    load, dot = partial(_load, dim=dim), partial(_dot, precision=precision)
    k, v = load(k_ref), load(v_ref)
    hidden = None if hidden_ref is None else hidden_ref[...][None, :]

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        at = pl.ds(i * tile_q, tile_q)
        q, d_out = load(q_ref.at[at]), load(d_out_ref.at[at])
        weights = jnp.exp(_scores(dot(q, k.T), dim, hidden) - lse_ref[at][:, None])
        d_scores = weights * (dot(d_out, v.T) - dot_ref[at][:, None])
        return dk + dot(d_scores.astype(q.dtype).T, q), dv + dot(weights.astype(v.dtype).T, d_out)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[0] // tile_q, step, (zeros, zeros))
    _store(dk_ref, dk * (dim**-0.5), dim)
    _store(dv_ref, dv, dim)


def _queries_kernel(*refs: Any, tile_k: int, dim: int, precision: jax.lax.PrecisionLike) -> None:
    """dq of one tile of queries, over all tiles of keys."""
    q_ref, k_ref, v_ref, hidden_ref, d_out_ref, lse_ref, dot_ref, dq_ref = refs
    load, dot = partial(_load, dim=dim), partial(_dot, precision=precision)
    q, d_out = load(q_ref), load(d_out_ref)
    lse, d_dot = lse_ref[...][:, None], dot_ref[...][:, None]

    def step(i: Array, dq: Array) -> Array:
        at = pl.ds(i * tile_k, tile_k)
        k, v = load(k_ref.at[at]), load(v_ref.at[at])
        scores = _scores(dot(q, k.T), dim, None if hidden_ref is None else hidden_ref[at][None, :])
        d_scores = jnp.exp(scores - lse) * (dot(d_out, v.T) - d_dot)
        return dq + dot(d_scores.astype(k.dtype), k)

    dq = jax.lax.fori_loop(0, k_ref.shape[0] // tile_k, step, jnp.zeros(q.shape, jnp.float32))
    _store(dq_ref, dq * (dim**-0.5), dim)


class _Fit(NamedTuple):
    """Tiles (queries, keys) of the three kernels as they run."""

    forward: tuple[int, int]
    dkv: tuple[int, int]
    dq: tuple[int, int]


def _load(ref: Any, *, dim: int) -> Array:
    """A tile (tokens, width) whose columns beyond the head are 0."""
    return triton.load(ref, mask=_columns(ref, dim), other=0.0)


def _store(ref: Any, x: Array, dim: int) -> None:
    triton.store(ref, x.astype(ref.dtype), mask=_columns(ref, dim))


def _columns(ref: Any, dim: int) -> Array:
    return jnp.broadcast_to((jnp.arange(ref.shape[-1]) < dim)[None, :], ref.shape)


def _dot(a: Array, b: Array, *, precision: jax.lax.PrecisionLike) -> Array:
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(products: Array, dim: int, hidden: Array | None) -> Array:
    scores = products * (dim**-0.5)
    return scores if hidden is None else jnp.where(hidden > 0, -jnp.inf, scores)


def _whole(*arrays: Array) -> list[pl.BlockSpec]:
    """All tokens of one batch row and head."""
    return [pl.BlockSpec((None, x.shape[1], None, _width(x.shape[3])), lambda i, b, h: (b, 0, h, 0)) for x in arrays]


def _whole_rows(x: Array | None, *, heads: bool = True) -> pl.BlockSpec | None:
    """One number for each token of a batch row, and of a head."""
    if x is None:
        return None
    if heads:
        return pl.BlockSpec((None, x.shape[1], None), lambda i, b, h: (b, 0, h))
    return pl.BlockSpec((None, x.shape[1]), lambda i, b, h: (b, 0))


def _keys(inputs: Inputs, tile: int) -> tuple[Array, Array, Array | None]:
    """Padded keys and values, and 1 for each key that may not be seen; None where all may."""
    length = up(inputs.k.shape[1], tile)
    seen = seen_keys(inputs, length)
    k, v = padded(inputs.k, length), padded(inputs.v, length)
    return k, v, None if seen is None else 1 - seen.astype(jnp.int32)


def _fit_inputs(blocks: BlockSizes, inputs: Inputs) -> _Fit:
    """Tiles as they run for these arrays."""
    q, k = inputs.q, inputs.k
    return _fit(blocks, (q.shape[1], k.shape[1]), q.shape[3], q.dtype)


def _fit(blocks: BlockSizes, lengths: tuple[int, int], head_dim: int, dtype: DTypeLike) -> _Fit:
    """Tiles as they run: powers of two, none larger than it takes to hold the array, all within shared memory."""
    width, item = _width(head_dim), jnp.dtype(dtype).itemsize

    def legal(tiles: tuple[int, int], *, held: int, of_queries: bool) -> tuple[int, int]:
        """`held` tiles of one side stay in shared memory; of the other, two arrays pass through it."""
        tile_q, tile_k = (min(_power(tile), _power(length)) for tile, length in zip(tiles, lengths, strict=True))
        while True:
            stays, passes = (tile_q, tile_k) if of_queries else (tile_k, tile_q)
            weights = 0 if of_queries else stays * passes * item
            taken = width * item * (held * stays + 2 * _STAGES * passes) + weights
            if taken <= _SHARED or tile_q == tile_k == _LEAST:
                return tile_q, tile_k
            smaller_q = tile_q > tile_k or (tile_q == tile_k and not of_queries)
            tile_q, tile_k = (tile_q // 2, tile_k) if smaller_q else (tile_q, tile_k // 2)

    return _Fit(
        legal((blocks.block_q, blocks.block_k), held=1, of_queries=True),
        legal(blocks.dkv, held=2, of_queries=False),
        legal(blocks.dq, held=2, of_queries=True),
    )


def _power(size: int) -> int:
    """The next power of two, at least `_LEAST`."""
    return max(1 << (size - 1).bit_length(), _LEAST)


def _width(dim: int) -> int:
    """Columns of a tile that holds heads of this size."""
    return _power(dim)


def _params(dim: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=4 if dim <= 64 else 8, num_stages=_STAGES)


def _say_changed(blocks: BlockSizes, fit: _Fit, lengths: tuple[int, int]) -> None:
    """Says once which block sizes run otherwise than written; shorter for a short length is no news."""
    wished = {
        "block_q": (blocks.block_q, fit.forward[0]),
        "block_k": (blocks.block_k, fit.forward[1]),
        "block_q_dkv": (blocks.dkv[0], fit.dkv[0]),
        "block_k_dkv": (blocks.dkv[1], fit.dkv[1]),
        "block_q_dq": (blocks.dq[0], fit.dq[0]),
        "block_k_dq": (blocks.dq[1], fit.dq[1]),
    }
    longest = {"q": _power(lengths[0]), "k": _power(lengths[1])}
    changed = [
        f"{name}={wish} runs as {tile}"
        for name, (wish, tile) in wished.items()
        if tile != wish and tile != longest[name[len("block_")]]
    ]
    if blocks.block_b > 1:
        changed.append(f"block_b={blocks.block_b} runs as 1")
    if changed:
        say_once(
            log,
            f"attention: {', '.join(changed)} (GPU tiles are powers of two, at least {_LEAST}, and fit "
            f"{_SHARED // 1024} KiB of shared memory)",
        )
