"""Inputs and measures that the attention tests share."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.local import Inputs, LocalKernel, Result
from maxdiffusion.kernels.attention.reference import dot_product_attention
from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

F32_LIMIT = 1e-5
"""max|a-b| / max|b| between two orders of float32 summation; a dropped mask or tile is above 1e-2."""


def arrays(q_shape: tuple[int, ...], num_keys: int, dtype: jnp.dtype = jnp.float32, seed: int = 0) -> list[jax.Array]:
    """q, k, v and a cotangent of the output."""
    B, Lq, H, D = q_shape
    rng = np.random.default_rng(seed)
    lengths = (Lq, num_keys, num_keys, Lq)
    return [jnp.asarray(rng.normal(size=(B, length, H, D)), dtype) for length in lengths]


def key_mask(batch: int, num_keys: int, seed: int = 0) -> jax.Array:
    """Holes everywhere; the last batch row sees no key at all."""
    mask = np.random.default_rng(seed).random((batch, num_keys)) < 0.6
    mask[:, 0] = True
    mask[-1] = False
    return jnp.asarray(mask)


def with_grads(fn: Callable, mask: jax.Array | None = None) -> Callable:
    """(q, k, v, cotangent) -> the output and the three gradients."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda q, k, v: fn(q, k, v, mask=mask), q, k, v)
        return (out, *pull(cotangent))

    return run


def exact(args: list[jax.Array], mask: jax.Array | None = None, rows: int = 2048) -> tuple[np.ndarray, ...]:
    """The output and the three gradients by their formulas, in float64, `rows` queries at a time.

    Every batch row must see a key.
    """
    q, k, v, d_out = (np.asarray(x, np.float64) for x in args)
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    scale = q.shape[3] ** -0.5
    for b, h, first in itertools.product(range(q.shape[0]), range(q.shape[2]), range(0, q.shape[1], rows)):
        at = (b, slice(first, first + rows), h)
        seen = (b, slice(None) if mask is None else np.asarray(mask[b]), h)
        scores = scale * q[at] @ k[seen].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[at] = weights @ v[seen]
        dv[seen] += weights.T @ d_out[at]
        d_scores = weights * (d_out[at] @ v[seen].T - (d_out[at] * out[at]).sum(axis=1, keepdims=True))
        dq[at] = scale * d_scores @ k[seen]
        dk[seen] += scale * d_scores.T @ q[at]
    return out, dq, dk, dv


def local_with_grads(
    kernel: LocalKernel, mask: jax.Array | None = None, blocks: BlockSizes | None = None, parts: int = 1
) -> Callable:
    """The same of a device's own kernel; with `parts`, keys come in as many parts, as in a ring.

    Results of the parts are merged by their log-sum-exp, and each part's gradients are taken from the merged result.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        ends = [k.shape[1] * part // parts for part in range(parts + 1)]
        held = [
            Inputs(q, k[:, a:b], v[:, a:b], None if mask is None else mask[:, a:b]) for a, b in itertools.pairwise(ends)
        ]
        sizes = [blocks or kernel.tiles(q.shape[1], part.k.shape[1], q.shape[3]) for part in held]
        precision = jax.lax.Precision.HIGHEST
        found = [kernel.forward(part, size, precision) for part, size in zip(held, sizes, strict=True)]
        lse = jax.nn.logsumexp(jnp.stack([part.lse for part in found]), axis=0)
        out = sum(part.out.astype(jnp.float32) * jnp.exp(part.lse - lse)[..., None] for part in found)
        merged = Result(jnp.asarray(out).astype(q.dtype), lse) if parts > 1 else found[0]
        grads = [
            kernel.backward(part, merged, cotangent, size, precision) for part, size in zip(held, sizes, strict=True)
        ]
        assert all(x.dtype == jnp.float32 for part in grads for x in part)
        dq, dk, dv = zip(*grads, strict=True)
        return merged.out, jnp.asarray(sum(dq)), jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1)

    return run


@functools.cache
def sequence(
    length: int, num_keys: int, heads: int = 2, dtype: str = "float32"
) -> tuple[list[jax.Array], jax.Array, tuple[jax.Array, ...]]:
    """Two rows of arguments, a mask with holes that hides all of the second row, and the reference's answer."""
    args, mask = arrays((2, length, heads, 8), num_keys, jnp.dtype(dtype)), key_mask(2, num_keys)
    return args, mask, jax.jit(with_grads(dot_product_attention, mask))(*args)


def layout_of(devices: np.ndarray, rules: list | None = None, **sizes: int) -> Layout:
    """A layout on the first devices, with mesh axes of these sizes."""
    shape = tuple(sizes.values())
    return Layout.of(Mesh(devices[: math.prod(shape)].reshape(shape), tuple(sizes)), rules)


def on_mesh(
    layout: Layout, args: list[jax.Array], mask: jax.Array | None, spec: AttentionSpec
) -> tuple[tuple[jax.Array, ...], str]:
    """Output and gradients on the mesh from inputs that lie there by the rules, and the compiled text."""
    length = "activation_length" if args[1].shape[1] == args[0].shape[1] else "activation_kv_length"
    q_names = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
    k_names = ("activation_batch", length, "activation_heads", "activation_kv")

    def place(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        return jax.device_put(x, NamedSharding(layout.mesh, layout.spec(*names, shape=x.shape)))

    placed = [place(x, names) for x, names in zip(args, (q_names, k_names, k_names, q_names), strict=True)]
    mask = None if mask is None else place(mask, k_names[:2])

    def run(mask: jax.Array | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        return with_grads(functools.partial(attention, spec=spec, layout=layout), mask)(*args)

    compiled = jax.jit(run).lower(mask, *placed).compile()
    return compiled(mask, *placed), compiled.as_text()


def collectives(text: str) -> Counter[str]:
    """How often each kind of exchange stands in compiled text."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


def errors(found: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> list[float]:
    """max|a-b| / max|b| of each pair, in float64; an array that is zero counts as 1e-3 of the largest."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, wanted, strict=True)]
    least = 1e-3 * max(np.abs(b).max() for _, b in pairs)
    return [float(np.abs(a - b).max() / max(np.abs(b).max(), least)) for a, b in pairs]


def largest_array(text: str) -> int:
    """Elements of the largest array named in StableHLO or compiled text."""
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([0-9,]+)\]", text)
    shapes += [dims.replace("x", ",").rstrip(",") for dims in re.findall(r"tensor<((?:\d+x)+)", text)]
    return max(math.prod(int(size) for size in dims.split(",")) for dims in shapes)
