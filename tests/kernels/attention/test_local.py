"""What a ring needs of a kernel: its log-sum-exp, and gradients of a part of the keys that add up to the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.flash_cpu import FLASH_CPU
from maxdiffusion.kernels.attention.local import EMPTY_LSE, Inputs, LocalKernel, attend
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT, dot_product_attention
from tests.kernels.attention.cases import F32_LIMIT, arrays, errors, key_mask, with_grads

_BLOCKS = BlockSizes(block_q=32, block_k=32)


@pytest.fixture(params=[DOT_PRODUCT, FLASH_CPU], ids=["dot_product", "flash_cpu"])
def kernel(request: pytest.FixtureRequest) -> LocalKernel:
    return request.param


def test_log_sum_exp_is_its_formula(kernel: LocalKernel) -> None:
    q, k, v, _ = arrays((2, 40, 2, 8), 50, jnp.bfloat16)
    mask = key_mask(2, 50)
    lse = kernel.forward(Inputs(q, k, v, mask), _BLOCKS, None).lse
    assert lse.dtype == jnp.float32 and lse.shape == (2, 40, 2)
    scores = np.einsum("bqhd,bkhd->bqhk", *(np.asarray(x, np.float64) for x in (q, k))) * 8**-0.5
    wanted = np.log(np.sum(np.exp(scores) * np.asarray(mask)[:, None, None, :], axis=-1)[:1])
    assert errors((lse[:1],), (wanted,)) < [1e-6]  # bfloat16 would be off by 2^-9
    assert np.all(np.asarray(lse[1]) == np.float32(EMPTY_LSE))


def test_shares_of_the_keys_add_up_to_the_gradients(kernel: LocalKernel) -> None:
    """Each half of the keys by itself, given the result of the whole."""
    q, k, v, d_out = arrays((2, 40, 2, 8), 50)
    mask = key_mask(2, 50)
    whole = kernel.forward(Inputs(q, k, v, mask), _BLOCKS, None)
    halves = [Inputs(q, k[:, part], v[:, part], mask[:, part]) for part in (slice(0, 20), slice(20, 50))]
    (dq_1, dk_1, dv_1), (dq_2, dk_2, dv_2) = (kernel.backward(half, whole, d_out, _BLOCKS, None) for half in halves)
    joined = (dq_1 + dq_2, jnp.concatenate([dk_1, dk_2], axis=1), jnp.concatenate([dv_1, dv_2], axis=1))
    wanted = with_grads(dot_product_attention, mask)(q, k, v, d_out)
    assert max(errors((whole.out, *joined), wanted)) <= F32_LIMIT


def test_attend_is_differentiable_in_the_dtype_of_its_inputs(kernel: LocalKernel) -> None:
    """bfloat16 gradients of a bfloat16 output: each is rounded by up to 2^-8."""
    *args, d_out = arrays((2, 20, 1, 8), 30, jnp.bfloat16)
    mask = key_mask(2, 30)
    out, pull = jax.vjp(lambda q, k, v: attend(kernel, _BLOCKS, None, Inputs(q, k, v, mask)), *args)
    found = (out, *pull(d_out))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert max(errors(found, with_grads(dot_product_attention, mask)(*args, d_out))) <= 2 * 2.0**-8


def test_tiles_are_given_for_any_lengths(kernel: LocalKernel) -> None:
    assert kernel.tiles(77, 4096, 40).block_q >= 77
