"""Ring attention: queries stay, keys and values go once round the devices, and partial results merge by log-sum-exp.

Liu, Zaharia and Abbeel 2023. Each device holds an equal part of the queries, the keys and the values, and never more
than one part of the keys. A mask of keys travels with its keys. Nothing depends on the order of the parts, so that any
permutation of the tokens gives the same result for each token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.local import Inputs, LocalKernel, Result, gradients_of
from maxdiffusion.parallel.collectives import permute

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Which devices hand their keys to which.

    Attributes:
        axes: mesh axes of the sequence, outermost first; they are manual where the ring runs.
        size: devices in a ring, 2 or more.
        stride: distance of neighbours among the devices of `axes`, counted row by row: as many rings run side by side.
            Negative, the other way round.
    """

    axes: tuple[str, ...]
    size: int
    stride: int = 1

    def pass_on(self, parts: T) -> T:
        """The parts that the device before has; one permute for each array of the tree."""
        devices = self.size * abs(self.stride)
        hops = [(device, (device + self.stride) % devices) for device in range(devices)]
        return jax.tree.map(lambda part: permute(part, self.axes, hops), parts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def ring_attention(
    ring: Ring, kernel: LocalKernel, blocks: BlockSizes, precision: jax.lax.PrecisionLike, inputs: Inputs
) -> Float[Array, "B Lq H D"]:
    """Attention of this device's queries to the keys of all devices of its ring; differentiable in reverse mode.

    Forward, `ring.size - 1` permutes each of keys and of values. Backward, the same again, and `ring.size` permutes
    each of the gradients of keys and of values, which travel with what they are gradients of until they are home.

    Args:
        ring: who hands on to whom; runs inside `shard_map` over its axes.
        kernel: what a device computes; hashable.
        blocks: tiles of the kernel.
        precision: of the matrix products.
        inputs: this device's equal part.

    Returns:
        array of the shape and dtype of the queries; sums over the ring are float32.
    """
    return _forward(ring, kernel, blocks, precision, inputs).out


def merge(a: Result, b: Result) -> Result:
    """The result for the keys of both: outputs weighted by their share of the sum of exponentials.

    Args:
        a: output and float32 log-sum-exp for some of the keys.
        b: the same for other keys.

    Returns:
        float32 output and log-sum-exp; 0 and `EMPTY_LSE` for a query that saw no key in either.
    """
    lse = jnp.logaddexp(a.lse, b.lse)
    of_a, of_b = (part.out.astype(jnp.float32) * jnp.exp(part.lse - lse)[..., None] for part in (a, b))
    return Result(of_a + of_b, lse)


def _forward(
    ring: Ring, kernel: LocalKernel, blocks: BlockSizes, precision: jax.lax.PrecisionLike, inputs: Inputs
) -> Result:
    held = inputs[1:]
    total = kernel.forward(inputs, blocks, precision)
    for _ in range(ring.size - 1):
        held = ring.pass_on(held)
        total = merge(total, kernel.forward(Inputs(inputs.q, *held), blocks, precision))
    return Result(total.out.astype(inputs.q.dtype), total.lse)


def _ring_fwd(
    ring: Ring, kernel: LocalKernel, blocks: BlockSizes, precision: jax.lax.PrecisionLike, inputs: Inputs
) -> tuple[Array, tuple[Inputs, Result]]:
    result = checkpoint_name(_forward(ring, kernel, blocks, precision, inputs), "attention")
    return result.out, (inputs, result)


def _ring_bwd(
    ring: Ring,
    kernel: LocalKernel,
    blocks: BlockSizes,
    precision: jax.lax.PrecisionLike,
    saved: tuple[Inputs, Result],
    d_out: Array,
) -> tuple[Inputs]:
    inputs, result = saved
    # The other way round, and behind a barrier (which counts where there are two devices, but not on CPUs): XLA would
    # find that the forward pass made the same permutes, and keep every part of the keys until here.
    ring = dataclasses.replace(ring, stride=-ring.stride)
    held, d_out = jax.lax.optimization_barrier((inputs[1:], d_out))
    dq, dk, dv = kernel.backward(inputs, result, d_out, blocks, precision)
    for _ in range(ring.size - 1):
        held, (dk, dv) = ring.pass_on(held), ring.pass_on((dk, dv))
        share = kernel.backward(Inputs(inputs.q, *held), result, d_out, blocks, precision)
        dq, dk, dv = dq + share[0], dk + share[1], dv + share[2]
    return (gradients_of(inputs, (dq, *ring.pass_on((dk, dv)))),)


ring_attention.defvjp(_ring_fwd, _ring_bwd)
