"""FLOPs of products and convolutions, from their shapes: of one, and of all in a function and its gradients.

A function is traced, not compiled, so what is counted is the model's arithmetic: scans by their length, the same on
every mesh, nothing that a backward pass computes again. A multiplication and an addition are two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives


def meetings(size: int, taps: int, outputs: int, *, stride: int, dilation: int, gaps: int, low: int) -> int:
    """Pairs (position of the output, tap of the kernel) at which there is a value of the input, along one dimension.

    Args:
        size: of the input.
        taps: of the kernel.
        outputs: of the output.
        stride: of the window.
        dilation: of the kernel.
        gaps: dilation of the input.
        low: padding before the input.
    """
    at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None, :] * dilation - low
    return int(np.sum((at >= 0) & (at <= (size - 1) * gaps) & (at % gaps == 0)))


def flops_of_gradients(fn: Callable[..., Any], params: Any, *inputs: Any) -> int:
    """FLOPs of products and convolutions in `fn` and in its gradient by `params`.

    The gradient of a product is one product of the same size for each factor that depends on `params`: so the forward
    pass is traced alone, and each of its products counts once, and once more for each such factor.

    Args:
        fn: `(params, *inputs) -> array`; by a loop whose length is not known, its body counts once.
        params: arrays or `jax.ShapeDtypeStruct`s.
        inputs: the same, which no gradient is taken by.
    """
    jaxpr = jax.make_jaxpr(fn)(params, *inputs)
    number = len(jax.tree.leaves(params))
    return _count(jaxpr.jaxpr, [index < number for index in range(len(jaxpr.in_avals))])[0]


def _count(jaxpr: core.Jaxpr, learnt: Sequence[bool]) -> tuple[int, list[bool]]:
    """FLOPs, and which outputs depend on inputs that are learnt; `learnt` says which inputs are."""
    active = dict(zip(jaxpr.invars, learnt, strict=True))
    total = 0

    def depends(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and active.get(atom, False)

    for equation in jaxpr.eqns:
        read = [depends(atom) for atom in equation.invars]
        found, written = _of_equation(equation, read)
        total += found
        for variable, depending in zip(equation.outvars, written, strict=True):
            # By dependence alone, whole numbers too: a gradient passes straight through what quantisation rounds.
            active[variable] = depending
    return total, [depends(atom) for atom in jaxpr.outvars]


def _of_equation(equation: core.JaxprEqn, read: list[bool]) -> tuple[int, list[bool]]:
    """FLOPs of an equation, and which of its results depend on what is learnt."""
    params, primitive = equation.params, equation.primitive
    if primitive is jax.lax.dot_general_p:
        return (1 + sum(read)) * _of_dot(equation), [any(read)]
    if primitive is jax.lax.conv_general_dilated_p:
        return (1 + sum(read)) * _of_convolution(equation), [any(read)]
    if primitive is primitives.scan_p:
        return _of_scan(params, read)
    if primitive is primitives.while_p:
        body = params["body_nconsts"], params["cond_nconsts"]
        return _until_settled(params["body_jaxpr"].jaxpr, read[body[1] :], body[0], len(equation.outvars))
    if primitive is primitives.cond_p:
        counted = [_count(branch.jaxpr, read[1:]) for branch in params["branches"]]
        return max(total for total, _ in counted), [
            any(each) for each in zip(*(one for _, one in counted), strict=True)
        ]
    for name in ("jaxpr", "call_jaxpr"):
        inner = params.get(name)
        inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
        if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(read):
            return _count(inner, read)
    return 0, [any(read)] * len(equation.outvars)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many arrays every turn of a scan reads, and how many it carries, from the parameters of its equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 and later keep the trees of the arguments instead.
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def _of_scan(params: Any, read: list[bool]) -> tuple[int, list[bool]]:
    consts, carried = scan_sizes(params)
    total, written = _until_settled(params["jaxpr"].jaxpr, read, consts, carried)
    return params["length"] * total, written


def _until_settled(jaxpr: core.Jaxpr, read: list[bool], consts: int, carried: int) -> tuple[int, list[bool]]:
    """One turn of a loop, once it is clear which of the values that it carries depend on what is learnt."""
    while True:
        total, written = _count(jaxpr, read)
        carry = [old or new for old, new in zip(read[consts : consts + carried], written, strict=False)]
        if carry == read[consts : consts + carried]:
            return total, [*carry, *written[carried:]]
        read = [*read[:consts], *carry, *read[consts + carried :]]


def _of_dot(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)


def _of_convolution(equation: core.JaxprEqn) -> int:
    params = equation.params
    lhs, rhs, out = params["dimension_numbers"]
    inputs, kernel = (atom.aval.shape for atom in equation.invars)  # type: ignore[attr-defined]
    output = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    # Groups need no care: the kernel's input features are those of one group.
    pairs = output[out[0]] * output[out[1]] * kernel[rhs[1]]
    for dim, (low, _) in enumerate(params["padding"]):
        pairs *= meetings(
            inputs[lhs[2 + dim]],
            kernel[rhs[2 + dim]],
            output[out[2 + dim]],
            stride=params["window_strides"][dim],
            dilation=params["rhs_dilation"][dim],
            gaps=params["lhs_dilation"][dim],
            low=low,
        )
    return 2 * pairs
