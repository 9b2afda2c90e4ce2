"""The names that users import to write rules and block sizes; of ours, it imports the errors alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TypeAlias

from maxdiffusion.errors import UsageError

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""What one array dimension is sharded over: a mesh axis, several (the first is the outermost), or none."""

LogicalAxisRules: TypeAlias = Sequence[tuple[str, MeshAxes]]
"""Ordered pairs (logical axis, mesh axes); the first rule whose mesh axes are still free wins."""


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of flash attention, in tokens (`block_b` in batch rows).

    Forward: a tile of `block_q` queries meets tiles of `block_k` keys, `block_b` batch rows at a time.
    Backward: `block_q_dkv` x `block_k_dkv` for the gradients of keys and values, `block_q_dq` x `block_k_dq` for the
    gradient of the queries. A backward size left out equals the forward one.

    Raises:
        UsageError: a size is not a positive whole number, or a backward size neither divides its forward size
            nor is a multiple of it (a tile would straddle two tiles of the forward pass).
    """

    block_q: int
    block_k: int
    block_b: int = 1
    block_q_dkv: int | None = None
    block_k_dkv: int | None = None
    block_k_dq: int | None = None
    block_q_dq: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is None and field.name not in ("block_q", "block_k", "block_b"):
                continue
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise UsageError(f"BlockSizes.{field.name}={size!r}: write a whole number of tokens, 1 or more")
        for name, forward in (
            ("block_q_dkv", "block_q"),
            ("block_k_dkv", "block_k"),
            ("block_k_dq", "block_k"),
            ("block_q_dq", "block_q"),
        ):
            backward, size = getattr(self, name), getattr(self, forward)
            if backward is not None and backward % size and size % backward:
                raise UsageError(
                    f"BlockSizes.{name}={backward} does not fit {forward}={size}: "
                    f"write a divisor or a multiple of {size}, or leave it out to use {size}"
                )

    @property
    def dkv(self) -> tuple[int, int]:
        """(query, key) tile of the gradients of keys and values."""
        return self.block_q_dkv or self.block_q, self.block_k_dkv or self.block_k

    @property
    def dq(self) -> tuple[int, int]:
        """(query, key) tile of the gradient of the queries."""
        return self.block_q_dq or self.block_q, self.block_k_dq or self.block_k
