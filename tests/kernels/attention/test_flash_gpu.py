"""The kernels' own programs run in jax (interpret mode); `test_aot.py` compiles them for GPUs."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.flash_gpu import TritonKernel, _fit
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs
from maxdiffusion.kernels.attention.reference import dot_product_attention
from tests.kernels.attention.cases import F32_LIMIT, arrays, errors, key_mask, local_with_grads, with_grads

_KERNEL = TritonKernel(interpret=True)
_PAGE = BlockSizes(
    block_q=128, block_k=128, block_b=1, block_q_dkv=128, block_k_dkv=128, block_k_dq=128, block_q_dq=128
)
_UNEQUAL = BlockSizes(block_q=64, block_k=32, block_q_dkv=128, block_k_dkv=64, block_k_dq=128, block_q_dq=32)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim", "blocks", "masked"),
    [
        (1, 77, 40, None, True),
        (192, 192, 64, _PAGE, False),  # a length that is no multiple of the tile
        (256, 128, 80, _PAGE, False),
        (300, 333, 160, _UNEQUAL, True),
    ],
)
def test_equals_the_reference(
    num_queries: int, num_keys: int, dim: int, blocks: BlockSizes | None, masked: bool
) -> None:
    """Values and gradients, with lengths that tiles divide and that they do not, and a row that sees no key."""
    args = arrays((2, num_queries, 2, dim), num_keys)
    mask = key_mask(2, num_keys) if masked else None
    found = jax.jit(local_with_grads(_KERNEL, mask, blocks))(*args)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)
    assert all(np.isfinite(x).all() for x in found)
    if masked:
        assert all(np.all(np.asarray(x[-1]) == 0.0) for x in found)


@pytest.mark.parametrize("lengths", [(1, 1), (63, 129), (257, 255)])
def test_any_length(lengths: tuple[int, int]) -> None:
    args = arrays((1, lengths[0], 1, 8), lengths[1])
    blocks = BlockSizes(block_q=64, block_k=32)
    found = jax.jit(local_with_grads(_KERNEL, blocks=blocks))(*args)
    wanted = jax.jit(with_grads(dot_product_attention))(*args)
    # One key has weight 1 whatever its score: the gradients of q and k are then 0 but for rounding.
    count = 1 if lengths[1] == 1 else 4
    assert max(errors(found[:count], wanted[:count])) <= F32_LIMIT, errors(found, wanted)


def test_keys_in_parts_give_the_whole() -> None:
    """A ring's use: gradients of each part of the keys from the merged log-sum-exp; one part sees nothing in a row."""
    args = arrays((2, 20, 1, 8), 75)
    mask = jnp.ones((2, 75), bool).at[0, 37:].set(False)
    found = jax.jit(local_with_grads(_KERNEL, mask, BlockSizes(block_q=16, block_k=32), parts=2))(*args)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)


def test_log_sum_exp_of_a_row_without_keys() -> None:
    q, k, v, _ = arrays((2, 5, 1, 8), 9)
    result = jax.jit(partial(_KERNEL.forward, blocks=_PAGE, precision=None))(Inputs(q, k, v, key_mask(2, 9)))
    assert result.lse.dtype == jnp.float32 and result.lse.shape == (2, 5, 1)
    assert np.all(np.asarray(result.lse[1]) == np.float32(EMPTY_LSE))
    assert np.abs(np.asarray(result.lse[0])).max() < 100


def test_bfloat16() -> None:
    """Weights, score gradients and results are rounded to bfloat16, each by up to 2^-9."""
    args = arrays((1, 130, 1, 40), 150, jnp.bfloat16)
    found = jax.jit(local_with_grads(_KERNEL))(*args)
    wanted = jax.jit(with_grads(dot_product_attention))(*(x.astype(jnp.float32) for x in args))
    assert found[0].dtype == jnp.bfloat16
    assert max(errors(found, wanted)) <= 4 * 2.0**-9


def _run(kernel: TritonKernel, blocks: BlockSizes, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    inputs = Inputs(q, k, v)
    result = kernel.forward(inputs, blocks, None)
    return result, kernel.backward(inputs, result, result.out, blocks, None)


@pytest.mark.parametrize("dim", [40, 64, 80, 128, 160])
@pytest.mark.parametrize("length", [1, 77, 126, 333, 4096, 4608, 4992, 16_384, 32_760])
def test_chosen_tiles(length: int, dim: int, caplog: pytest.LogCaptureFixture) -> None:
    """They run as chosen in bfloat16, and nothing is padded where they divide the length."""
    blocks = _KERNEL.tiles(length, length, dim)
    sizes = {blocks.block_q, blocks.block_k, *blocks.dkv, *blocks.dq}
    assert all(size & (size - 1) == 0 and 16 <= size <= 128 for size in sizes)
    shape = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    with caplog.at_level(logging.WARNING):
        text = str(jax.make_jaxpr(partial(_run, TritonKernel(), blocks))(shape, shape, shape))
    assert caplog.records == []
    assert (" pad[" in text) == any(length % size for size in sizes)


def test_each_size_is_one_of_a_program() -> None:
    """The table of the module and of the documentation."""
    sizes = BlockSizes(block_q=128, block_k=64, block_q_dkv=32, block_k_dkv=128, block_k_dq=16, block_q_dq=64)
    fit = _fit(sizes, (4096, 4096), 40, jnp.bfloat16)
    assert fit == ((128, 64), (32, 128), (64, 16))


def test_chosen_tiles_that_float32_halves_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    shape = jax.ShapeDtypeStruct((1, 4096, 1, 40), jnp.float32)
    with caplog.at_level(logging.WARNING):
        jax.eval_shape(partial(_run, TritonKernel(), _KERNEL.tiles(4096, 4096, 40)), shape, shape, shape)
    assert caplog.records == []


def test_sizes_that_a_gpu_cannot_run_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    shape = jax.ShapeDtypeStruct((2, 640, 1, 8), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((2, 640, 1, 256), jnp.float32)
    small = BlockSizes(block_q=100, block_k=8, block_b=2)
    large = BlockSizes(block_q=256, block_k=128)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(partial(_run, TritonKernel(), small), shape, shape, shape)
            jax.eval_shape(partial(_run, TritonKernel(), large), wide, wide, wide)
    of_small, of_large = caplog.records
    for part in ("block_q=100 runs as 128", "block_k=8 runs as 16", "block_b=2 runs as 1"):
        assert part in of_small.message
    assert "block_k=128 runs as 16" in of_large.message and "99 KiB of shared memory" in of_large.message
