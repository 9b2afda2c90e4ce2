"""The one entry to attention: runs the kernel and the exchange that `choose` picks on each device's own part."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.attention.choose import KERNELS, KV_AXES, Q_AXES, Choice, choose, device_lengths
from maxdiffusion.kernels.attention.context import Plan
from maxdiffusion.kernels.attention.flash_gpu import cudnn_attention
from maxdiffusion.kernels.attention.local import Inputs, attend
from maxdiffusion.kernels.attention.reference import DOT_PRODUCT, check_arguments, dot_product_attention
from maxdiffusion.kernels.attention.ring import Ring, ring_attention
from maxdiffusion.kernels.attention.ulysses import Groups, ulysses_attention
from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

log = logging.getLogger(__name__)

# A device's own kernel needs whole heads, whatever the rules say of their size; and keys that do not travel whole.
_Q_LOCAL = ("activation_batch", "activation_length", "activation_heads", None)
_KV_LOCAL = ("activation_batch", None, "activation_heads", None)


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
        k, v = layout.constrain(k, *Q_AXES), layout.constrain(v, *Q_AXES)
    if choice.kernel == "dot_product" and not plan.travels:
        q = layout.constrain(q, *Q_AXES)
        k, v = layout.constrain(k, *KV_AXES), layout.constrain(v, *KV_AXES)
        out = layout.constrain(dot_product_attention(q, k, v, mask=mask, precision=precision), *Q_AXES)
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
    lengths = device_lengths(q_shape[1], k_shape[1], plan)
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


@contextlib.contextmanager
def recording(record: Callable[[Call], None]) -> Iterator[None]:
    """Tells `record` of each attention call that is traced within."""
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)
