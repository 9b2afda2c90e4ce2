"""The ledger of a quantised model: which layers multiply quantised operands, which do not, and why."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax.traverse_util import flatten_dict

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.log import say_once
from maxdiffusion.specs import QUANT_KEYWORDS, QuantSpec

log = logging.getLogger(__name__)

KERNEL = "kernel"
"""Name of the parameter of every layer that multiplies: dense ones and convolutions."""


@dataclass(frozen=True, kw_only=True)
class QuantRow:
    """One layer that multiplies.

    Attributes:
        module: its path, joined by `/`; that of a stack for all its layers.
        shape: of its kernel.
        mode: of its products; None where they are not quantised.
        reason: why not; empty where they are.
    """

    module: str
    shape: tuple[int, ...]
    mode: str | None
    reason: str


def ledger(params: Any, quant: QuantSpec) -> tuple[QuantRow, ...]:
    """A row for each layer that multiplies.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`s.
        quant: how the model is quantised.
    """
    rows = []
    for path, leaf in sorted(flatten_dict(params, sep="/").items()):
        module, _, name = str(path).rpartition("/")
        if name == KERNEL:
            reason = quant.why_not(module) if quant.mode else "no quantization"
            mode = None if reason else quant.mode
            rows.append(QuantRow(module=module, shape=tuple(leaf.shape), mode=mode, reason=reason))
    return tuple(rows)


def checked(rows: Sequence[QuantRow], quant: QuantSpec, *, own: Sequence[str] = ()) -> None:
    """Refuses expressions that match no layer, and says once what is quantised.

    Args:
        rows: of `ledger`.
        quant: how the model is quantised.
        own: expressions that the model excludes by itself; it need not have all these layers.

    Raises:
        UsageError: an expression matches nothing, or all layers are excluded.
    """
    if quant.mode is None:
        return
    modules = [row.module for row in rows]
    for key, patterns in (("modules", [quant.modules]), ("exclude", [p for p in quant.exclude if p not in own])):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, module) for module in modules):
                raise UsageError(
                    f"{QUANT_KEYWORDS[key]}: no layer's path is matched by {pattern!r} as a whole: "
                    f"{nearest(pattern, modules)}"
                )
    done = [row for row in rows if row.mode]
    if not done:
        raise UsageError(f"quantization={quant.mode!r}: {QUANT_KEYWORDS['exclude']} leaves no layer to quantise")
    share = _size(done) / _size(rows)
    say_once(
        log,
        f"quantization={quant.mode}: {len(done)} of {len(rows)} kernels, {share:.1%} of their weights; "
        f"left out by {QUANT_KEYWORDS['modules']} and {QUANT_KEYWORDS['exclude']}: {len(rows) - len(done)}",
        logging.INFO,
    )


def _size(rows: Sequence[QuantRow]) -> int:
    return sum(math.prod(row.shape) for row in rows)
