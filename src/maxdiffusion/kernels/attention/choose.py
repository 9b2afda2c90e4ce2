"""Which kernel an attention call runs, with which tiles and which exchange, and why; from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan, plan_context
from maxdiffusion.kernels.attention.flash_cpu import FLASH_CPU
from maxdiffusion.kernels.attention.flash_gpu import CUDNN_ABSENT, FLASH_GPU, WIDEST, cudnn_refusal
from maxdiffusion.kernels.attention.flash_tpu import FLASH_TPU
from maxdiffusion.kernels.attention.local import LocalKernel
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

Q_AXES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
KV_AXES = ("activation_batch", "activation_kv_length", "activation_heads", "activation_kv")
"""Names of the dimensions of queries, and of keys of another sequence."""


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
    """What one attention call runs.

    Attributes:
        kernel: one of `KERNELS`, or `cudnn`, which computes whole attentions only.
        block_sizes: tiles of the blockwise kernel on one device; None for the dot-product kernel and cuDNN.
        context: what devices that share the sequence exchange.
        reason: one line that says why, with the sizes that decided.
    """

    kernel: KernelName | Literal["cudnn"]
    block_sizes: BlockSizes | None
    context: Plan
    reason: str


def choose(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    *,
    spec: AttentionSpec,
    layout: Layout,
    full_mask: bool = False,
    key_mask: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Choice:
    """The kernel, and the exchange, for queries and keys of these global shapes (batch, length, heads, dim).

    With `spec.kernel == "flash"` a call runs blockwise when both its queries and its keys are at least
    `spec.flash_min_seq_length` long. When either is shorter (77 text tokens seen by 4096 image tokens), the scores are
    only as large as the longer side, and padding the shorter to a tile would waste most of the work: such a call runs
    the dot-product kernel, whose result is the same up to the order of float32 sums. The decision reads global
    lengths, so that it is the same on every mesh. `plan_context` decides on the exchange, for both kernels.

    Args:
        q_shape: global shape of the queries.
        k_shape: global shape of the keys.
        spec: what the user asked for.
        layout: mesh and rules.
        full_mask: the mask is (batch, heads, queries, keys), which only the dot-product kernel takes.
        key_mask: there is a mask of keys, which cuDNN does not take.
        dtype: of queries, keys and values; cuDNN takes 16-bit ones.

    Raises:
        UsageError: flash attention without a mesh, or a Ulysses degree that cannot be.
    """
    if spec.kernel == "flash" and layout.mesh is None:
        raise UsageError(
            "attention_kernel='flash' needs a mesh, on whose devices the kernel runs: give mesh=..., for one device "
            "jax.sharding.Mesh(jax.devices()[:1], ('data',)), or write attention_kernel='dot_product'"
        )
    plan = plan_context(q_shape, k_shape, spec=spec, layout=layout, full_mask=full_mask)
    why = _why_dot_product(q_shape[1], k_shape[1], spec, full_mask)
    if why:
        return Choice(
            kernel="dot_product", block_sizes=None, context=plan, reason="; ".join([why, *_told(q_shape, plan)])
        )
    (queries, keys), head_dim = device_lengths(q_shape[1], k_shape[1], plan), q_shape[3]
    kernel, what = local_kernel(layout.platform, head_dim)
    refusal = ""
    if kernel == "flash_gpu":
        hides = key_mask or (plan.travels and k_shape[1] % plan.parts > 0)
        refusal = cudnn_refusal(q_shape, k_shape, dtype, masked=hides, ring=plan.ring > 1)
    parts = [f"{q_shape[1]} queries x {k_shape[1]} keys reach flash_min_seq_length={spec.flash_min_seq_length}"]
    if refusal is None:
        kernel, blocks = "cudnn", None
        parts.append(f"cuDNN{', which ignores flash_block_sizes' if spec.block_sizes else ''}")
    else:
        blocks = spec.block_sizes or KERNELS[kernel].tiles(queries, keys, head_dim)
        runs = KERNELS[kernel].runs(blocks, queries, keys, head_dim, dtype)
        parts.append(_why_not_cudnn(what, refusal, layout, head_dim) if refusal else what)
        asked = f"{blocks.block_q} x {blocks.block_k}"
        origin = " chosen for these lengths"
        if spec.block_sizes:
            origin = f", which {asked} comes to" if runs != (blocks.block_q, blocks.block_k) else ""
        parts.append(f"tiles of {runs[0]} x {runs[1]}{origin}")
    if layout.num_devices > 1:
        of_keys = f" x {keys} keys at a time" if plan.travels else ""
        heads = plan.heads // plan.ulysses
        parts.append(f"each device: batch {plan.batch}, {heads} heads, {queries} queries{of_keys}")
    even = (q_shape[0], layout.num_devices, *q_shape[2:])
    parts += [note.text for note in layout.resolve(*Q_AXES, shape=even).notes]
    parts += _gathered(q_shape, k_shape, plan, layout)
    return Choice(kernel=kernel, block_sizes=blocks, context=plan, reason="; ".join(parts + _told(q_shape, plan)))


def device_lengths(num_queries: int, num_keys: int, plan: Plan) -> tuple[int, int]:
    """Queries and keys that one device's kernel sees at a time."""
    group = plan.ulysses if plan.travels else 1
    queries = -(-num_queries // plan.parts) * group
    return queries, -(-num_keys // plan.parts) * group if plan.travels else num_keys


def _why_dot_product(num_queries: int, num_keys: int, spec: AttentionSpec, full_mask: bool) -> str:
    """Why a call runs the dot-product kernel; empty when it runs blockwise."""
    if spec.kernel == "dot_product":
        return "attention_kernel='dot_product'"
    if full_mask:
        return f"a full mask of {num_queries} x {num_keys} is as large as the scores, and flash takes masks of keys"
    least, side = min((num_queries, "queries"), (num_keys, "keys"))
    if least < spec.flash_min_seq_length:
        return (
            f"{least} {side} are below flash_min_seq_length={spec.flash_min_seq_length}: "
            f"scores of {num_queries} x {num_keys} are computed whole"
        )
    return ""


def _why_not_cudnn(what: str, refusal: str, layout: Layout, head_dim: int) -> str:
    """Why the Triton kernel runs; or, planning for GPUs where no cuDNN can be asked, which of the two would."""
    if refusal == CUDNN_ABSENT and isinstance(layout.mesh, AbstractMesh):
        return f"cuDNN on a GPU that has it, if it takes heads of {head_dim} (none is here to ask); else {what}"
    return f"{what}, for cuDNN refuses: {refusal}"


def _told(q_shape: Sequence[int], plan: Plan) -> list[str]:
    """What there is to say about the exchange."""
    padding = -q_shape[1] % plan.parts
    padded = f"{q_shape[1]} tokens are padded to {q_shape[1] + padding}"
    return [*([plan.reason] if plan.axes else []), *([padded] if padding else [])]


def _gathered(q_shape: Sequence[int], k_shape: Sequence[int], plan: Plan, layout: Layout) -> list[str]:
    """What the rules shard and a device needs whole."""
    wanted = [("activation_kv", layout.resolve(*Q_AXES, shape=q_shape).axes[3])]
    if not plan.travels:
        wanted.append(("activation_kv_length", layout.resolve(*KV_AXES, shape=k_shape).axes[1]))
    return [f"{name} is gathered along {', '.join(axes)}" for name, axes in wanted if axes]
