"""The kernel's own program runs in jax (interpret mode); `test_aot.py` compiles it for TPUs."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.flash_tpu import LANES, TILE_K, TILE_Q, SplashKernel, _fit
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs
from maxdiffusion.kernels.attention.reference import dot_product_attention
from tests.kernels.attention.cases import F32_LIMIT, arrays, errors, key_mask, local_with_grads, with_grads

_KERNEL = SplashKernel(interpret=True)
_PAGE = BlockSizes(
    block_q=128, block_k=128, block_b=1, block_q_dkv=128, block_k_dkv=128, block_k_dq=128, block_q_dq=128
)
_UNEQUAL = BlockSizes(block_q=256, block_k=128, block_q_dkv=128, block_k_dkv=384, block_k_dq=384, block_q_dq=512)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim", "blocks", "masked"),
    [
        (1, 77, 40, None, True),
        (256, 256, 64, _PAGE, False),
        (300, 333, 160, _UNEQUAL, True),
    ],
)
def test_equals_the_reference(
    num_queries: int, num_keys: int, dim: int, blocks: BlockSizes | None, masked: bool
) -> None:
    """Values and gradients, with lengths that tiles divide and that they do not, and a row that sees no key."""
    args = arrays((2, num_queries, 1, dim), num_keys)
    mask = key_mask(2, num_keys) if masked else None
    found = jax.jit(local_with_grads(_KERNEL, mask, blocks))(*args)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)
    assert all(np.isfinite(x).all() for x in found)
    if masked:
        assert all(np.all(np.asarray(x[-1]) == 0.0) for x in found)


def test_keys_in_parts_give_the_whole() -> None:
    """A ring's use: gradients of each part of the keys from the merged log-sum-exp; one part sees nothing in a row."""
    args = arrays((2, 20, 1, 8), 150)
    mask = jnp.ones((2, 150), bool).at[0, 75:].set(False)
    found = jax.jit(local_with_grads(_KERNEL, mask, _PAGE, parts=2))(*args)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT, errors(found, wanted)


def test_log_sum_exp_of_a_row_without_keys() -> None:
    q, k, v, _ = arrays((2, 5, 1, 8), 9)
    result = jax.jit(partial(_KERNEL.forward, blocks=_PAGE, precision=None))(Inputs(q, k, v, key_mask(2, 9)))
    assert result.lse.dtype == jnp.float32 and result.lse.shape == (2, 5, 1)
    assert np.all(np.asarray(result.lse[1]) == np.float32(EMPTY_LSE))
    assert np.abs(np.asarray(result.lse[0])).max() < 100


def test_bfloat16() -> None:
    """Scaled queries, weights, score gradients and results are rounded to bfloat16, each by up to 2^-9."""
    args = arrays((1, 130, 1, 40), 150, jnp.bfloat16)
    found = jax.jit(local_with_grads(_KERNEL))(*args)
    wanted = jax.jit(with_grads(dot_product_attention))(*(x.astype(jnp.float32) for x in args))
    assert found[0].dtype == jnp.bfloat16
    assert max(errors(found, wanted)) <= 4 * 2.0**-9


@pytest.mark.parametrize(
    ("length", "tile_q", "tile_k", "padded"),
    [
        (1, 128, 128, 128),
        (77, 128, 128, 128),
        (126, 128, 128, 128),
        (333, 384, 384, 384),
        (4096, 512, 1024, 4096),
        (4608, 512, 768, 4608),
        (4992, 384, 384, 4992),
        (16_384, 512, 1024, 16_384),
        (32_760, 512, 1024, 32_768),
    ],
)
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_chosen_tiles(length: int, tile_q: int, tile_k: int, padded: int, dim: int) -> None:
    """Whole lanes, and the kernel's program holds no longer array than the padded length."""
    blocks = _KERNEL.tiles(length, length, dim)
    assert blocks == BlockSizes(block_q=tile_q, block_k=tile_k)
    if dim == 64:
        shape = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
        kernel = SplashKernel()
        text = str(jax.make_jaxpr(partial(_run, kernel, blocks))(shape, shape, shape))
        assert f"bf16[1,1,{padded},{dim}]" in text
        assert (" pad[" in text) == (length != padded)


def _run(kernel: SplashKernel, blocks: BlockSizes, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    inputs = Inputs(q, k, v)
    result = kernel.forward(inputs, blocks, None)
    return result, kernel.backward(inputs, result, result.out, blocks, None)


def test_tiles_are_legal_for_every_length() -> None:
    for length in [*range(1, 1100, 7), *range(4000, 40_000, 997)]:
        for dim in (64, 160):
            blocks = _KERNEL.tiles(length, length, dim)
            assert blocks.block_q % LANES == 0 and blocks.block_k % LANES == 0
            assert blocks.block_q <= TILE_Q and blocks.block_k <= TILE_K
            for tile in (blocks.block_q, blocks.block_k):
                tiles = -(-length // tile)
                assert tiles * tile - length < LANES * tiles  # no more padding than whole lanes ask for


def test_sizes_that_a_tpu_cannot_run_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    shape = jax.ShapeDtypeStruct((2, 640, 1, 8), jnp.float32)
    blocks = BlockSizes(block_q=100, block_k=320, block_b=2, block_q_dkv=200)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(partial(_run, SplashKernel(), blocks), shape, shape, shape)
    (record,) = caplog.records
    for part in ("block_q=100 runs as 128", "block_k=320 runs as 384", "block_q_dkv=200 runs as 128", "block_b=2"):
        assert part in record.message


def test_each_size_is_one_of_splash_attention_s() -> None:
    """The table of the module and of the documentation."""
    sizes = BlockSizes(block_q=256, block_k=1024, block_q_dkv=128, block_k_dkv=2048, block_k_dq=512, block_q_dq=4096)
    legal = _fit(sizes, 4096, 4096).blocks
    assert (legal.block_q, legal.block_kv, legal.block_kv_compute) == (256, 1024, 512)
    assert (legal.block_q_dkv, legal.block_kv_dkv, legal.block_kv_dkv_compute) == (128, 2048, 512)
    assert (legal.block_q_dq, legal.block_kv_dq) == (4096, 512)


def test_sizes_are_chosen_after_padding() -> None:
    """333 keys become 384, which 128 divides and 256 does not; a forward tile pads the length to itself."""
    fit = _fit(BlockSizes(block_q=128, block_k=384, block_q_dkv=256, block_k_dkv=768), 333, 1000)
    assert (fit.num_queries, fit.num_keys) == (384, 1152)
    assert (fit.blocks.block_q_dkv, fit.blocks.block_kv_dkv) == (128, 384)


def test_the_page_s_sizes_run_as_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for length in (77, 4608):
            shape = jax.ShapeDtypeStruct((2, length, 1, 8), jnp.float32)
            jax.eval_shape(partial(_run, SplashKernel(), _PAGE), shape, shape, shape)
    assert caplog.records == []
