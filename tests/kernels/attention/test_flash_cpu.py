from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.flash_cpu import TILE_K, TILE_Q, auto_block_sizes, flash_attention
from maxdiffusion.kernels.attention.reference import dot_product_attention
from tests.kernels.attention.cases import F32_LIMIT, arrays, errors, key_mask, largest_array, with_grads

_UNEQUAL = BlockSizes(
    block_q=128, block_k=64, block_b=2, block_q_dkv=64, block_k_dkv=128, block_k_dq=64, block_q_dq=128
)


def _check(args: list[jax.Array], mask: jax.Array | None, blocks: BlockSizes | None, limit: float) -> None:
    flash = with_grads(partial(flash_attention, block_sizes=blocks), mask)
    found = jax.jit(flash)(*args)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert [x.dtype for x in found] == [x.dtype for x in args]
    assert max(errors(found, wanted)) <= limit, errors(found, wanted)


@pytest.mark.parametrize("masked", [False, True], ids=["all-keys", "masked"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim", "blocks"),
    [
        (1, 77, 8, BlockSizes(block_q=64, block_k=64)),
        (5, 77, 40, BlockSizes(block_q=64, block_k=64)),
        (333, 5, 16, BlockSizes(block_q=128, block_k=128)),
        (126, 192, 160, BlockSizes(block_q=64, block_k=128)),
        (192, 192, 64, BlockSizes(block_q=128, block_k=128)),
        (300, 333, 80, _UNEQUAL),
        (77, 300, 128, None),
    ],
)
def test_equals_the_reference(
    num_queries: int, num_keys: int, dim: int, blocks: BlockSizes | None, masked: bool
) -> None:
    """Values and gradients, lengths that no tile divides, three batch rows two at a time, a row that sees nothing."""
    args = arrays((3, num_queries, 2, dim), num_keys)
    _check(args, key_mask(3, num_keys) if masked else None, blocks, F32_LIMIT)


def test_a_single_key_is_the_answer() -> None:
    """Weights are 1 whatever the scores: the gradients of q and k are 0 but for the rounding of dP - sum(dO O)."""
    args = arrays((3, 1, 2, 8), 1)
    out, dq, dk, dv = with_grads(flash_attention)(*args)
    assert np.array_equal(out, args[2]) and np.array_equal(dv, args[3])
    assert max(np.abs(dq).max(), np.abs(dk).max()) < 16 * 2.0**-24 * float(np.abs(args[3]).max()) * 8


def test_rows_without_keys_give_zero_and_finite_gradients() -> None:
    args = arrays((2, 70, 1, 8), 90)
    blocks = BlockSizes(block_q=64, block_k=64)
    out, *grads = with_grads(partial(flash_attention, block_sizes=blocks), key_mask(2, 90))(*args)
    for array in (out, *grads):
        assert np.all(np.isfinite(array))
        assert np.all(np.asarray(array[-1]) == 0.0)
        assert np.abs(np.asarray(array[0])).max() > 0.01


def test_large_scores_of_either_sign_do_not_overflow() -> None:
    """A score of thousands is rounded by max|score| x 2^-24, the relative error of its weight, on each side.

    The gradients of q and k are differences of nearly equal numbers here: they only have to be finite.
    """
    q, k, v, cotangent = arrays((1, 80, 1, 8), 96)
    q = q * 1000
    largest = float(jnp.abs(jnp.einsum("bqhd,bkhd->bhqk", q, k)).max()) * 8**-0.5
    assert largest > 1000
    flash = with_grads(partial(flash_attention, block_sizes=BlockSizes(block_q=64, block_k=64)))
    found = jax.jit(flash)(q, k, v, cotangent)
    wanted = jax.jit(with_grads(dot_product_attention))(q, k, v, cotangent)
    assert max(errors(found[::3], wanted[::3])) <= 4 * largest * 2.0**-24
    assert np.isfinite(found[1]).all() and np.isfinite(found[2]).all()


def test_bfloat16() -> None:
    """Inside all is float32; the backward pass reads a rounded output and rounds its result, each by up to 2^-8."""
    args = arrays((1, 100, 2, 40), 150, jnp.bfloat16)
    _check(args, key_mask(2, 150)[:1], BlockSizes(block_q=64, block_k=64), 2 * 2.0**-8)


def test_a_nan_stays_in_its_batch_row() -> None:
    q, k, v, _ = arrays((2, 20, 1, 8), 20)
    out = flash_attention(q.at[0, 0, 0, 0].set(jnp.nan), k, v)
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1:]).all() and np.isfinite(out[1]).all()


def test_inside_a_shard_map_that_tracks_varying_axes(devices: np.ndarray) -> None:
    args = arrays((2, 70, 1, 8), 70)
    run = with_grads(partial(flash_attention, block_sizes=BlockSizes(block_q=64, block_k=64)))
    mesh = Mesh(devices[:2], ("data",))
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True))(*args)
    assert max(errors(found, with_grads(dot_product_attention)(*args))) <= F32_LIMIT


@pytest.mark.parametrize("blocks", [BlockSizes(block_q=128, block_k=128), _UNEQUAL], ids=["one-pass", "two-passes"])
def test_no_score_matrix_in_the_program(blocks: BlockSizes) -> None:
    args = arrays((1, 1024, 1, 8), 1024)
    flash = with_grads(partial(flash_attention, block_sizes=blocks))
    lowered = jax.jit(flash).lower(*args)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert largest_array(text) < 1024 * 1024 // 16  # a tile has 128 x 128 elements


def test_the_dot_product_kernel_has_a_score_matrix_in_the_program() -> None:
    lowered = jax.jit(with_grads(dot_product_attention)).lower(*arrays((1, 1024, 1, 8), 1024))
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert largest_array(text) >= 1024 * 1024


def test_memory_at_4096_tokens() -> None:
    """Temporary memory, forward and with gradients, is at most a quarter of dot-product's, and of the scores alone."""
    shape = jax.ShapeDtypeStruct((2, 4096, 8, 40), jnp.float32)
    scores = 4 * 2 * 8 * 4096 * 4096

    def taken(fn: Callable, count: int) -> int:
        return jax.jit(fn).lower(*[shape] * count).compile().memory_analysis().temp_size_in_bytes

    for change, count in ((lambda fn: fn, 3), (with_grads, 4)):
        of_dot_product = taken(change(dot_product_attention), count)
        assert scores <= of_dot_product
        assert 0 < taken(change(flash_attention), count) <= min(scores, of_dot_product) / 4


@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_chosen_tiles_pad_little(num_queries: int, num_keys: int) -> None:
    blocks = auto_block_sizes(num_queries, num_keys)
    for length, tile, largest in ((num_queries, blocks.block_q, TILE_Q), (num_keys, blocks.block_k, TILE_K)):
        assert tile % 16 == 0 and tile <= largest
        tiles = -(-length // tile)
        assert tiles * tile - length < 16 * tiles


@pytest.mark.parametrize("length", [4096, 4608, 4992, 16_384])
def test_chosen_tiles_divide_the_usual_lengths(length: int) -> None:
    blocks = auto_block_sizes(length, length)
    assert length % blocks.block_q == 0 and length % blocks.block_k == 0


def test_no_queries_or_no_rows() -> None:
    q, k, v, _ = arrays((2, 4, 1, 8), 4)
    assert flash_attention(q[:, :0], k, v).shape == (2, 0, 1, 8)
    assert flash_attention(q[:0], k[:0], v[:0]).shape == (0, 4, 1, 8)


def test_a_full_mask_is_refused() -> None:
    q, k, v, _ = arrays((1, 4, 1, 8), 4)
    with pytest.raises(UsageError, match=r"mask of keys.*dot_product"):
        flash_attention(q, k, v, mask=jnp.ones((1, 1, 4, 4), bool))
