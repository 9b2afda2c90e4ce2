"""What devices that share a sequence exchange: the strategy of one attention call, its degrees, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maxdiffusion.errors import UsageError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec

Strategy = Literal["local", "gather", "ring", "ulysses", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one attention call deals with a sequence that is cut over mesh axes.

    Attributes:
        strategy: `local` (nothing to exchange: the sequence is whole, or its queries are cut and the keys of another
            sequence are whole), `gather` (every device gets all keys), `ring`, `ulysses` or `hybrid`.
        axes: mesh axes that cut the queries, outermost first; empty where none do.
        parts: parts that the queries are cut into.
        ring: devices that keys go round; 1 without a ring.
        ulysses: devices that swap tokens for heads; 1 without a swap.
        heads: heads of a device before any swap.
        batch: batch rows of a device.
        reason: why, empty where the sequence is whole.
    """

    strategy: Strategy
    axes: tuple[str, ...] = ()
    parts: int = 1
    ring: int = 1
    ulysses: int = 1
    heads: int
    batch: int
    reason: str = ""

    @property
    def travels(self) -> bool:
        """Whether keys are cut as the queries are, and travel."""
        return self.ring * self.ulysses > 1


def plan_context(
    q_shape: Sequence[int], k_shape: Sequence[int], *, spec: AttentionSpec, layout: Layout, full_mask: bool = False
) -> Plan:
    """The plan for queries and keys of these global shapes (batch, length, heads, dim).

    Keys as many as the queries are the same sequence, and live where the queries live. Keys of another length are
    another sequence (77 words that 4096 positions read): they live as the rule of `activation_kv_length` says, and
    travel only if that is where the queries live.

    Args:
        q_shape: global shape of the queries; lengths need not divide by the mesh axes.
        k_shape: global shape of the keys.
        spec: what the user asked for.
        layout: mesh and rules.
        full_mask: the mask is one of scores, whose keys cannot travel.

    Raises:
        UsageError: a Ulysses degree was asked for that does not divide the devices or the heads of a device.
    """
    batch_axes, axes, head_axes = _axes(q_shape, "activation_length", layout)
    (_, length, _, _), (_, num_keys, _, _) = q_shape, k_shape
    tensor = layout.size(head_axes)
    heads = q_shape[2] // tensor
    batch = q_shape[0] // layout.size(batch_axes)
    devices = layout.size(axes)
    if devices == 1:
        return Plan(strategy="local", heads=heads, batch=batch)
    cut = f"sequence over {layout.written(axes)}"

    def plan(strategy: Strategy, why: str, *, ulysses: int = 1, ring: int = 1) -> Plan:
        return Plan(
            strategy=strategy,
            axes=axes,
            parts=devices,
            ring=ring,
            ulysses=ulysses,
            heads=heads,
            batch=batch,
            reason=f"{cut}: {why}",
        )

    if num_keys != length and _axes(k_shape, "activation_kv_length", layout)[1] != axes:
        return plan("local", f"queries stay where they are, and the {num_keys} keys of another sequence are whole")
    if full_mask:
        return plan("gather", "a full mask needs all keys on each device")
    if spec.context == "gather":
        return plan("gather", "context_attention='gather'")
    if spec.context == "ring":
        return plan("ring", "context_attention='ring'", ring=devices)
    legal = [degree for degree in range(1, devices + 1) if devices % degree == 0 and heads % degree == 0]
    of_all = f" = {q_shape[2]} / {'+'.join(head_axes)} {tensor}" if tensor > 1 else ""
    shared = f"the heads of a device ({heads}{of_all})"
    if spec.context == "ulysses" or spec.ulysses:
        degree = spec.ulysses or devices
        if degree not in legal:
            raise UsageError(_illegal(degree, legal, devices=devices, cut=cut, shared=shared, heads=heads))
        why = f"context_attention={spec.context!r}" + (f" with ulysses_degree={degree}" if spec.ulysses else "")
        return plan(_name(degree, devices), why, ulysses=degree, ring=devices // degree)
    inner = layout.sizes[axes[-1]]
    degree = inner if len(axes) > 1 and inner in legal else legal[-1]
    if spec.context == "hybrid" and degree == devices and len(legal) > 2:
        degree = legal[-2]
    if degree == 1:
        return plan("ring", f"ring, as {shared} and the {devices} devices share no divisor", ring=devices)
    if degree == devices:
        return plan("ulysses", f"ulysses, as {shared} divide by {devices}", ulysses=devices)
    not_all = "" if devices in legal else f" and not by {devices}"
    why = f"ulysses {degree} x ring {devices // degree}, as {shared} divide by {degree}{not_all}"
    return plan("hybrid", why, ulysses=degree, ring=devices // degree)


def _axes(shape: Sequence[int], length: str, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Mesh axes of batch, length and heads; every length counts as divisible, because it will be padded."""
    B, _, H, D = shape
    names = ("activation_batch", length, "activation_heads", None)
    return layout.resolve(*names, shape=(B, layout.num_devices, H, D)).axes[:3]


def _name(degree: int, devices: int) -> Strategy:
    return "ring" if degree == 1 else "ulysses" if degree == devices else "hybrid"


def _illegal(degree: int, legal: Sequence[int], *, devices: int, cut: str, shared: str, heads: int) -> str:
    """The message for a Ulysses degree that cannot be, with the nearest that can."""
    if devices % degree:
        cause = f"ulysses_degree={degree} does not divide the {devices} devices"
    else:
        cause = f"a Ulysses degree of {degree} does not divide {shared}: {heads} % {degree} = {heads % degree}"
    best = min(legal, key=lambda other: (abs(math.log(other / degree)), other))
    if best == 1:
        cure = "write context_attention='ring' (no degree above 1 divides both)"
    elif best == devices:
        cure = f"the nearest legal degree is {best}: write context_attention='ulysses'"
    else:
        cure = f"the nearest legal degree is {best}: write context_attention='hybrid' with ulysses_degree={best}"
    return f"{cut}: {cause}; {cure}, or leave the choice to 'auto'"
