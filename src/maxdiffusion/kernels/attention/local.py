"""What one device computes of attention: the face of every blockwise kernel, so that a ring can be built of any."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

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

    def runs(
        self, blocks: BlockSizes, num_queries: int, num_keys: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[int, int]:
        """Queries and keys of a forward tile as it runs for one device's lengths, whatever was written."""
        ...


def padded(x: Shaped[Array, "B L *rest"], length: int) -> Shaped[Array, "B {length} *rest"]:
    """`x` with as many tokens as `length`, those that are added being 0 or False."""
    if x.shape[1] == length:
        return x
    return jnp.pad(x, [(0, length - x.shape[1]) if dim == 1 else (0, 0) for dim in range(x.ndim)])


def seen_keys(inputs: Inputs, length: int) -> Bool[Array, "B {length}"] | None:
    """Which keys may be seen once they are padded to `length`; None where all may, and none is padding."""
    B, Lk = inputs.k.shape[:2]
    if inputs.mask is None and length == Lk:
        return None
    return padded(jnp.ones((B, Lk), bool) if inputs.mask is None else inputs.mask, length)


def up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(
    kernel: LocalKernel, blocks: BlockSizes, precision: jax.lax.PrecisionLike, inputs: Inputs
) -> Float[Array, "B Lq H D"]:
    """The output of a kernel as a differentiable function of q, k and v (reverse mode only).

    Args:
        kernel: hashable; the kernels are module constants.
        blocks: tiles of the kernel.
        precision: of the matrix products.
        inputs: one device's arrays, at least one query and one key.

    Returns:
        array of the shape and dtype of the queries.
    """
    return kernel.forward(inputs, blocks, precision).out


def _attend_fwd(
    kernel: LocalKernel, blocks: BlockSizes, precision: jax.lax.PrecisionLike, inputs: Inputs
) -> tuple[Array, tuple[Inputs, Result]]:
    result = checkpoint_name(kernel.forward(inputs, blocks, precision), "attention")
    return result.out, (inputs, result)


def _attend_bwd(
    kernel: LocalKernel,
    blocks: BlockSizes,
    precision: jax.lax.PrecisionLike,
    saved: tuple[Inputs, Result],
    d_out: Array,
) -> tuple[Inputs]:
    inputs, result = saved
    return (gradients_of(inputs, kernel.backward(inputs, result, d_out, blocks, precision)),)


def gradients_of(inputs: Inputs, grads: tuple[Array, Array, Array]) -> Inputs:
    """float32 gradients as the cotangent of the inputs: in their dtypes, and nothing for the mask."""
    dq, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, inputs[:3], strict=True))
    return Inputs(dq, dk, dv, None)


attend.defvjp(_attend_fwd, _attend_bwd)
