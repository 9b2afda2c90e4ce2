"""BlockSizes has exactly the seven names of the parallelism page, and refuses tiles that cannot work."""

from __future__ import annotations

from dataclasses import fields

import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError


def test_exactly_the_seven_names():
    names = [field.name for field in fields(BlockSizes)]
    assert names == ["block_q", "block_k", "block_b", "block_q_dkv", "block_k_dkv", "block_k_dq", "block_q_dq"]


def test_backward_sizes_default_to_the_forward_ones():
    sizes = BlockSizes(block_q=128, block_k=64)
    assert (sizes.block_b, sizes.dkv, sizes.dq) == (1, (128, 64), (128, 64))
    given = BlockSizes(block_q=128, block_k=64, block_q_dkv=64, block_k_dkv=32, block_k_dq=128, block_q_dq=256)
    assert (given.dkv, given.dq) == ((64, 32), (256, 128))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "128"])
@pytest.mark.parametrize("name", [field.name for field in fields(BlockSizes)])
def test_sizes_are_positive_whole_numbers(name, size):
    with pytest.raises(UsageError, match=f"{name}=.*whole number"):
        BlockSizes(**{"block_q": 128, "block_k": 128, name: size})


@pytest.mark.parametrize("name", ["block_q_dkv", "block_k_dkv", "block_k_dq", "block_q_dq"])
def test_backward_sizes_fit_the_forward_ones(name):
    with pytest.raises(UsageError, match=f"{name}=96 does not fit block_[qk]=128"):
        BlockSizes(**{"block_q": 128, "block_k": 128, name: 96})
