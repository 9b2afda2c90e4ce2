"""What lives where: a row for each parameter of a tree, and the totals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where one parameter lives.

    Attributes:
        parameter: path in the tree, joined by `/`.
        shape: global shape.
        dtype: name of the dtype.
        names: logical axis of each dimension.
        spec: mesh axes of each dimension.
        bytes: bytes of the whole array.
        bytes_per_device: bytes on each device.
        why: why it is not sharded as the rules wish; empty when it is.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str | None, ...]
    spec: tuple[tuple[str, ...], ...]
    bytes: int
    bytes_per_device: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where the parameters of a tree live.

    Attributes:
        rows: a row for each parameter.
    """

    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters (elements)."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device stores."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def share_per_device(self) -> float:
        """Part of all bytes that each device stores, from 1 / devices (ideal) to 1 (replicated)."""
        return self.bytes_per_device / self.bytes if self.bytes else 0.0


def path_name(path: Any) -> str:
    """`down_blocks_0/conv1/kernel` from the path of a tree's leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
