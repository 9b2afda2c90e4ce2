"""The one entry to attention: picks a kernel for each call, says why, and runs it on each device's own part."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan, plan_context
from maxdiffusion.kernels.attention.flash_cpu import FLASH_CPU
from maxdiffusion.kernels.attention.flash_gpu import CUDNN_ABSENT, FLASH_GPU, WIDEST, cudnn_attention, cudnn_refusal
from maxdiffusion.kernels.attention.flash_tpu import FLASH_TPU
from maxdiffusion.kernels.attention.local import Inputs, LocalKernel, attend
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT, check_arguments, dot_product_attention
from maxdiffusion.kernels.attention.ring import Ring, ring_attention
from maxdiffusion.kernels.attention.ulysses import Groups, ulysses_attention
from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

log = logging.getLogger(__name__)

_Q = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
_KV = ("activation_batch", "activation_kv_length", "activation_heads", "activation_kv")
# A device's own kernel needs whole heads, whatever the rules say of their size; and keys that do not travel whole.
_Q_LOCAL = ("activation_batch", "activation_length", "activation_heads", None)
_KV_LOCAL = ("activation_batch", None, "activation_heads", None)


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


@dataclass(frozen=True, kw_only=True)
class Call:
    """What `choose` needs to know of one attention call.

    Attributes:
        q_shape: shape of the queries (batch, length, heads, dim).
        k_shape: shape of the keys.
        full_mask: whether the mask is one of scores.
        key_mask: whether there is a mask of keys.
        dtype: of queries, keys and values.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    full_mask: bool = False
    key_mask: bool = False
    dtype: DTypeLike = jnp.float32


_recorder: ContextVar[Callable[[Call], None] | None] = ContextVar("recorder of attention calls", default=None)


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
    (queries, keys), head_dim = _lengths(q_shape[1], k_shape[1], plan), q_shape[3]
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
        parts.append(_why_not_cudnn(what, refusal, layout, head_dim) if refusal else what)
        chosen = "" if spec.block_sizes else " chosen for these lengths"
        parts.append(f"tiles of {blocks.block_q} x {blocks.block_k}{chosen}")
    if layout.num_devices > 1:
        of_keys = f" x {keys} keys at a time" if plan.travels else ""
        heads = plan.heads // plan.ulysses
        parts.append(f"each device: batch {plan.batch}, {heads} heads, {queries} queries{of_keys}")
    even = (q_shape[0], layout.num_devices, *q_shape[2:])
    parts += [note.text for note in layout.resolve(*_Q, shape=even).notes]
    parts += _gathered(q_shape, k_shape, plan, layout)
    return Choice(kernel=kernel, block_sizes=blocks, context=plan, reason="; ".join(parts + _told(q_shape, plan)))


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
    """softmax(q k^T / sqrt(D)) v by the kernel and the exchange that `choose` picks, laid out by the rules.

    The blockwise kernel, and every kernel whose keys travel, runs inside `shard_map`: each device computes its own
    batch rows, heads and queries, and what is exchanged is what the plan says. The dot-product kernel whose keys stay
    is left to the partitioner. Lengths that do not divide by their mesh axes are padded, and padding is never seen.

    Args:
        q: queries, any floating dtype; logical axes activation_batch, activation_length, activation_heads,
            activation_kv.
        k: keys, of the dtype of q; as many as the queries they are laid out as these, else activation_kv_length
            stands in place of activation_length.
        v: values, as k.
        mask: True where a key may be seen: (batch, keys), or a full mask (batch, heads, queries, keys) whose
            dimensions may be 1. A query with no key to see gives 0.
        spec: kernel, threshold, tiles, exchange.
        layout: mesh and rules.
        precision: of the matrix products.

    Returns:
        array of the shape and dtype of q, laid out as q.

    Raises:
        UsageError: shapes or dtypes do not fit, flash attention without a mesh, or a Ulysses degree that cannot be.

    Warns:
        LayoutWarning: batch or heads do not divide by their mesh axes; the result is right, the work is repeated.
    """
    check_arguments(q, k, v, mask)
    if not math.prod(q.shape) or not math.prod(k.shape):
        return jnp.zeros_like(q)
    full_mask = mask is not None and mask.ndim == 4
    key_mask = mask is not None and not full_mask
    record = _recorder.get()
    if record is not None:
        record(Call(q_shape=q.shape, k_shape=k.shape, full_mask=full_mask, key_mask=key_mask, dtype=q.dtype))
    choice = choose(q.shape, k.shape, spec=spec, layout=layout, full_mask=full_mask, key_mask=key_mask, dtype=q.dtype)
    plan, length = choice.context, q.shape[1]
    if choice.kernel != "dot_product" and layout.platform != "cpu":
        say_once(log, f"attention: {choice.reason}")
    if plan.axes:
        say_once(log, f"attention: {plan.reason}", logging.INFO)
    if not full_mask:
        q, k, v, mask = _padded(Inputs(q, k, v, mask), plan, layout)
    if plan.strategy == "gather" and not k.shape[1] % plan.parts:
        # Gathered from equal parts, so that their gradients go back into these: the partitioner would rather gather
        # the tokens once more for the gradient of every product before.
        k, v = layout.constrain(k, *_Q), layout.constrain(v, *_Q)
    if choice.kernel == "dot_product" and not plan.travels:
        q = layout.constrain(q, *_Q)
        k, v = layout.constrain(k, *_KV), layout.constrain(v, *_KV)
        out = layout.constrain(dot_product_attention(q, k, v, mask=mask, precision=precision), *_Q)
    else:
        keys = _Q_LOCAL if plan.travels else _KV_LOCAL
        arrays = [(q, _Q_LOCAL), (k, keys), (v, keys), *([] if mask is None else [(mask, keys[:2])])]
        args, names = [layout.constrain(x, *axes) for x, axes in arrays], [axes for _, axes in arrays]
        out = layout.local(_on_device(choice, q.shape, k.shape, precision), names, _Q_LOCAL)(*args)
    return out[:, :length]


def _on_device(
    choice: Choice, q_shape: Sequence[int], k_shape: Sequence[int], precision: jax.lax.PrecisionLike
) -> Callable[..., Array]:
    """What each device runs on its own part of queries, keys, values and mask."""
    plan = choice.context
    kernel = None if choice.kernel == "cudnn" else KERNELS[choice.kernel]
    lengths = _lengths(q_shape[1], k_shape[1], plan)
    blocks = choice.block_sizes or (kernel or DOT_PRODUCT).tiles(*lengths, q_shape[3])

    def among_tokens(inputs: Inputs) -> Array:
        if kernel is None:
            assert plan.ring == 1 and inputs.mask is None
            return checkpoint_name(cudnn_attention(inputs.q, inputs.k, inputs.v), "attention")
        if plan.ring == 1:
            return attend(kernel, blocks, precision, inputs)
        ring = Ring(axes=plan.axes, size=plan.ring, stride=plan.ulysses)
        return ring_attention(ring, kernel, blocks, precision, inputs)

    def run(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        inputs = Inputs(q, k, v, mask)
        if plan.ulysses == 1:
            return among_tokens(inputs)
        groups = Groups(axes=plan.axes, devices=plan.ring * plan.ulysses, degree=plan.ulysses)
        return ulysses_attention(groups, among_tokens, inputs)

    return run


def _padded(inputs: Inputs, plan: Plan, layout: Layout) -> Inputs:
    """Queries, and keys that travel, padded to equal parts; keys that were added are hidden."""
    q, k, v, mask = inputs
    more_q = -q.shape[1] % plan.parts
    more_k = -k.shape[1] % plan.parts if plan.travels else 0
    if more_q:
        q = jnp.pad(layout.enter(q), ((0, 0), (0, more_q), (0, 0), (0, 0)))
    if more_k:
        seen = jnp.ones(k.shape[:2], bool) if mask is None else layout.enter(mask)
        mask = jnp.pad(seen, ((0, 0), (0, more_k)))
        k, v = (jnp.pad(layout.enter(x), ((0, 0), (0, more_k), (0, 0), (0, 0))) for x in (k, v))
    return Inputs(q, k, v, mask)


def _lengths(num_queries: int, num_keys: int, plan: Plan) -> tuple[int, int]:
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
    wanted = [("activation_kv", layout.resolve(*_Q, shape=q_shape).axes[3])]
    if not plan.travels:
        wanted.append(("activation_kv_length", layout.resolve(*_KV, shape=k_shape).axes[1]))
    return [f"{name} is gathered along {', '.join(axes)}" for name, axes in wanted if axes]


@contextlib.contextmanager
def recording(record: Callable[[Call], None]) -> Iterator[None]:
    """Tells `record` of each attention call that is traced within."""
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)
