"""What one device computes of attention: the face of every blockwise kernel, so that a ring can be built of any."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float

from maxdiffusion.common_types import BlockSizes

EMPTY_LSE = -1e30
"""Log-sum-exp of a query that has seen no key: finite, so that differences of two of them are 0 and not NaN."""


class Inputs(NamedTuple):
    """Queries, keys and values of one device, and which keys may be seen (None: all)."""

    q: Float[Array, "B Lq H D"]
    k: Float[Array, "B Lk H D"]
    v: Float[Array, "B Lk H D"]
    mask: Bool[Array, "B Lk"] | None = None


class Result(NamedTuple):
    """The output in the dtype of the queries, and the float32 log-sum-exp of each query's scores.

    A query that sees no key has the output 0 and the log-sum-exp `EMPTY_LSE`.
    """

    out: Float[Array, "B Lq H D"]
    lse: Float[Array, "B Lq H"]


class LocalKernel(Protocol):
    """A blockwise kernel on one device's arrays, in two halves, so that a ring can give the second half global sums.

    Lengths need not be multiples of the tiles: the kernel pads and hides what it padded. Softmax, sums and
    log-sum-exp are float32.
    """

    def forward(self, inputs: Inputs, blocks: BlockSizes, precision: jax.lax.PrecisionLike) -> Result:
        """Attention of these queries to these keys."""
        ...

    def backward(
        self,
        inputs: Inputs,
        result: Result,
        d_out: Float[Array, "B Lq H D"],
        blocks: BlockSizes,
        precision: jax.lax.PrecisionLike,
    ) -> tuple[Float[Array, "B Lq H D"], Float[Array, "B Lk H D"], Float[Array, "B Lk H D"]]:
        """Gradients of q, k and v, float32.

        `result` is that of the whole attention, of which these keys may be a part only: then the gradients are these
        keys' share, and the shares of q add up.
        """
        ...

    def tiles(self, num_queries: int, num_keys: int, head_dim: int) -> BlockSizes:
        """Tiles for one device's lengths, where the user gave none."""
        ...
