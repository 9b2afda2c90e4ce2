"""The one entry to attention: picks a kernel for each call, says why, and runs it on each device's own part."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.flash_cpu import FLASH_CPU
from maxdiffusion.kernels.attention.flash_gpu import FLASH_GPU, WIDEST
from maxdiffusion.kernels.attention.flash_tpu import FLASH_TPU
from maxdiffusion.kernels.attention.local import Inputs, LocalKernel, attend
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT, check_arguments, dot_product_attention
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

log = logging.getLogger(__name__)

_Q = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
_KV = ("activation_batch", "activation_kv_length", "activation_heads", "activation_kv")
# A device that runs the blockwise kernel needs whole keys and whole heads, whatever the rules say of those dimensions.
_Q_LOCAL = ("activation_batch", "activation_length", "activation_heads", None)
_KV_LOCAL = ("activation_batch", None, "activation_heads", None)
_MASK_LOCAL = ("activation_batch", None)


KernelName = Literal["dot_product", "flash_cpu", "flash_gpu", "flash_tpu"]

KERNELS: Mapping[KernelName, LocalKernel] = MappingProxyType(
    {"dot_product": DOT_PRODUCT, "flash_cpu": FLASH_CPU, "flash_gpu": FLASH_GPU, "flash_tpu": FLASH_TPU}
)
"""What one device runs, by the name that a `Choice` has."""


def local_kernel(platform: str, head_dim: int) -> tuple[KernelName, str]:
    """The blockwise kernel of a platform.

    Args:
        platform: `cpu`, `gpu` or `tpu`, of the mesh's devices.
        head_dim: width of a head.

    Returns:
        The kernel's name, and a few words that say what it is.
    """
    if platform == "tpu":
        return "flash_tpu", "splash attention (Pallas, tpu)"
    if platform == "gpu" and head_dim <= WIDEST:
        return "flash_gpu", "Triton kernel (Pallas, gpu)"
    wide = f": heads of {head_dim} are too wide for its Triton kernel, at most {WIDEST}" if platform == "gpu" else ""
    return "flash_cpu", f"blockwise kernel in pure jax ({platform}{wide})"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which kernel one attention call runs.

    Attributes:
        kernel: one of `KERNELS`.
        block_sizes: tiles of the blockwise kernel on one device; None for the dot-product kernel.
        reason: one line that says why, with the sizes that decided.
    """

    kernel: KernelName
    block_sizes: BlockSizes | None
    reason: str


def choose(
    q_shape: Sequence[int], k_shape: Sequence[int], *, spec: AttentionSpec, layout: Layout, full_mask: bool = False
) -> Choice:
    """The kernel for queries and keys of these global shapes (batch, length, heads, dim).

    With `spec.kernel == "flash"` a call runs blockwise when both its queries and its keys are at least
    `spec.flash_min_seq_length` long. When either is shorter (77 text tokens seen by 4096 image tokens), the scores are
    only as large as the longer side, and padding the shorter to a tile would waste most of the work: such a call runs
    the dot-product kernel, whose result is the same up to the order of float32 sums. The decision reads global
    lengths, so that it is the same on every mesh.

    Args:
        q_shape: global shape of the queries.
        k_shape: global shape of the keys.
        spec: what the user asked for.
        layout: mesh and rules.
        full_mask: the mask is (batch, heads, queries, keys), which only the dot-product kernel takes.

    Raises:
        UsageError: flash attention without a mesh.
    """
    if spec.kernel == "dot_product":
        return Choice(kernel="dot_product", block_sizes=None, reason="attention_kernel='dot_product'")
    if layout.mesh is None:
        raise UsageError(
            "attention_kernel='flash' needs a mesh, on whose devices the kernel runs: give mesh=..., for one device "
            "jax.sharding.Mesh(jax.devices()[:1], ('data',)), or write attention_kernel='dot_product'"
        )
    num_queries, num_keys = q_shape[1], k_shape[1]
    if full_mask:
        reason = f"a full mask of {num_queries} x {num_keys} is as large as the scores, and flash takes masks of keys"
        return Choice(kernel="dot_product", block_sizes=None, reason=reason)
    least, side = min((num_queries, "queries"), (num_keys, "keys"))
    if least < spec.flash_min_seq_length:
        reason = (
            f"{least} {side} are below flash_min_seq_length={spec.flash_min_seq_length}: "
            f"scores of {num_queries} x {num_keys} are computed whole"
        )
        return Choice(kernel="dot_product", block_sizes=None, reason=reason)
    batch, queries, heads = _per_device(q_shape, layout)
    kernel, what = local_kernel(layout.platform, q_shape[3])
    blocks = spec.block_sizes or KERNELS[kernel].tiles(queries, num_keys, q_shape[3])
    parts = [
        f"{num_queries} queries x {num_keys} keys reach flash_min_seq_length={spec.flash_min_seq_length}",
        what,
        f"tiles of {blocks.block_q} x {blocks.block_k}{'' if spec.block_sizes else ' chosen for these lengths'}",
    ]
    if layout.num_devices > 1:
        parts.append(f"each device: batch {batch}, {heads} heads, {queries} queries")
    parts += [note.text for note in layout.resolve(*_Q, shape=q_shape).notes]
    parts += _gathered(q_shape, k_shape, layout)
    return Choice(kernel=kernel, block_sizes=blocks, reason="; ".join(parts))


def attention(
    q: Float[Array, "B Lq H D"],
    k: Float[Array, "B Lk H D"],
    v: Float[Array, "B Lk H D"],
    *,
    mask: Bool[Array, "B Lk"] | Bool[Array, "#B #H #Lq Lk"] | None = None,
    spec: AttentionSpec,
    layout: Layout,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B Lq H D"]:
    """softmax(q k^T / sqrt(D)) v by the kernel that `choose` picks, laid out by the rules.

    The dot-product kernel is left to the partitioner; the blockwise one runs inside `shard_map`, so that each device
    computes its own batch rows, queries and heads against all keys of those rows, and nothing is exchanged where the
    rules shard only batch and heads.

    Args:
        q: queries, any floating dtype; logical axes activation_batch, activation_length, activation_heads,
            activation_kv.
        k: keys, of the dtype of q; activation_kv_length in place of activation_length.
        v: values, as k.
        mask: True where a key may be seen: (batch, keys), or a full mask (batch, heads, queries, keys) whose
            dimensions may be 1. A query with no key to see gives 0.
        spec: kernel, threshold, tiles.
        layout: mesh and rules.
        precision: of the matrix products.

    Returns:
        array of the shape and dtype of q, laid out as q.

    Raises:
        UsageError: shapes or dtypes do not fit, or flash attention without a mesh.

    Warns:
        LayoutWarning: batch or heads do not divide by their mesh axes; the result is right, the work is repeated.
    """
    check_arguments(q, k, v, mask)
    if not math.prod(q.shape) or not math.prod(k.shape):
        return jnp.zeros_like(q)
    full_mask = mask is not None and mask.ndim == 4
    choice = choose(q.shape, k.shape, spec=spec, layout=layout, full_mask=full_mask)
    if choice.kernel == "dot_product":
        q = layout.constrain(q, *_Q)
        k, v = layout.constrain(k, *_KV), layout.constrain(v, *_KV)
        out = dot_product_attention(q, k, v, mask=mask, precision=precision)
        return layout.constrain(out, *_Q)

    blocks = choice.block_sizes
    assert blocks is not None

    def kernel(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        return attend(KERNELS[choice.kernel], blocks, precision, Inputs(q, k, v, mask))

    if layout.platform != "cpu":
        _say_once(f"attention: {choice.reason}")
    args = [layout.constrain(x, *names) for x, names in ((q, _Q_LOCAL), (k, _KV_LOCAL), (v, _KV_LOCAL))]
    names = [_Q_LOCAL, _KV_LOCAL, _KV_LOCAL]
    if mask is not None:
        args.append(layout.constrain(mask, *_MASK_LOCAL))
        names.append(_MASK_LOCAL)
    return layout.local(kernel, names, _Q_LOCAL)(*args)


@functools.lru_cache(maxsize=256)
def _say_once(text: str) -> None:
    log.warning(text)


def _per_device(q_shape: Sequence[int], layout: Layout) -> tuple[int, int, int]:
    """Batch rows, queries and heads that one device computes."""
    sizes = list(q_shape[:3])
    for dim, axes in enumerate(layout.resolve(*_Q_LOCAL, shape=q_shape).axes[:3]):
        for axis in axes:
            sizes[dim] //= layout.sizes[axis]
    return sizes[0], sizes[1], sizes[2]


def _gathered(q_shape: Sequence[int], k_shape: Sequence[int], layout: Layout) -> list[str]:
    """What the rules shard and the blockwise kernel needs whole."""
    wanted = (*layout.resolve(*_Q, shape=q_shape).axes[3:], *layout.resolve(*_KV, shape=k_shape).axes[1:2])
    names = ("activation_kv", "activation_kv_length")
    return [f"{name} is gathered along {', '.join(axes)}" for name, axes in zip(names, wanted, strict=True) if axes]
