"""The first tensor of a step that is not finite, by name: the step is run once more, and looked at on the way.

The gradient of the loss is traced to a jaxpr, which is then run equation by equation. Flax names every equation by its
module (`unet/mid_block/attentions_0`); what one module hands to another is looked at, in the order in which it is made,
inside of scans too. That needs no hook in a model, and costs a step nothing: it happens after one has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives
from jaxtyping import Array, Bool

from maxdiffusion.diffusion.loss import weighted_sum
from maxdiffusion.kernels.flops import scan_sizes
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, Objective

Tree: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class BadTensor:
    """What was found.

    Attributes:
        name: of the first tensor that is not finite, in words.
        kind: `state`, `batch`, `activation`, `gradient`, or `none` where everything is finite this time.
        gradients: names of the parameters whose gradients are not finite.
        rows: of the batch, whose losses are not finite.
    """

    name: str
    kind: str
    gradients: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Values that were looked at in one run of a jaxpr, in order: a name and the index of its flag, or those of a loop.

    Attributes:
        entries: in the order in which they are made.
        turns: of the loop, in their order; None outside of one.
    """

    entries: tuple[tuple[str, int] | Seen, ...]
    turns: Sequence[int] | None = None


def first_bad_tensor(objective: Objective, state: TrainState, examples: Examples, *, parts: int = 1) -> BadTensor:
    """Looks through the state, the batch, the forward and the backward pass, in this order.

    Every process must call it; all find the same.

    Args:
        objective: of the training.
        state: before the step.
        examples: of the step.
        parts: that the batch is worked off in.
    """
    named = {
        "parameter": state.params,
        "averaged weight": state.ema,
        "optimizer state": state.opt_state,
        "batch": {"images": examples.images, "weight": examples.weight},
    }
    flags = dict(zip(named, _finite(named), strict=True))
    for kind, tree in named.items():
        broken = [f"{kind} {name}" for name, fine in _named(tree, flags[kind]) if not fine]
        if broken:
            group = "batch" if kind == "batch" else "state"
            rows = _rows(examples.images) if group == "batch" else ()
            return BadTensor(name=_first(broken), kind=group, rows=rows)
    return _in_passes(objective, state, examples, parts)


def _in_passes(objective: Objective, state: TrainState, examples: Examples, parts: int) -> BadTensor:
    """Forward and backward, one part of the batch after the other."""

    def cut(examples: Examples, part: Array) -> Examples:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, parts, *leaf.shape[1:])[:, part], examples)

    def gradients(params: Tree, part: Examples, key: Array, step: Array, count: Array) -> tuple[Array, Tree]:
        def share(params: Tree) -> tuple[Array, Array]:
            losses = objective.losses(params, part, key, step)
            return weighted_sum(losses, part.weight)[0] / count, losses

        (_, losses), found = jax.value_and_grad(share, has_aux=True)(params)
        return losses, found

    master = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), state.params)
    rest = (jax.eval_shape(cut, examples, 0), state.key, state.step, jax.ShapeDtypeStruct((), jnp.float32))
    look = Watched(gradients, master, *rest)

    @jax.jit
    def run(state: TrainState, examples: Examples, part: Array) -> Any:
        count = jnp.maximum(jnp.sum(examples.weight), 1.0)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.params)
        (losses, found), flags = look(params, cut(examples, part), state.key, state.step, count)
        everything = (flags, jnp.isfinite(losses), jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), found))
        whole = objective.text_to_image.layout.replicated
        return everything if whole is None else jax.lax.with_sharding_constraint(everything, whole)

    for part in range(parts):
        flags, losses, found = jax.device_get(run(state, examples, np.int32(part)))
        broken = tuple(name for name, fine in _named(state.params, found) if not fine)
        rows = tuple(int(row) * parts + part for row in np.flatnonzero(~losses))
        name = (look.first(flags) or "").replace(f"{type(objective.text_to_image.model).__name__}/", "")
        backward = name.startswith("gradient")
        if rows and (backward or not name):
            return BadTensor(name="loss of a picture", kind="activation", gradients=broken, rows=rows)
        if name:
            kind = "gradient" if backward else "activation"
            return BadTensor(name=name, kind=kind, gradients=broken, rows=rows)
        if broken:
            return BadTensor(name=f"gradient of parameter {_first(broken)}", kind="gradient", gradients=broken)
    return BadTensor(name="none: run again by itself, the step is finite", kind="none")


# --- Running a jaxpr and looking --------------------------------------------------------------------------------------


class Watched:
    """A function that also says which of the values that its modules hand to one another are not finite."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        """Traces it.

        Args:
            fn: of arrays; modules are what `jax.named_scope` names, as flax does.
            args: arrays or `jax.ShapeDtypeStruct`s.
        """
        self._jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._form = jax.tree.structure(shapes)
        self._seen = Seen(entries=())

    def __call__(self, *args: Any) -> tuple[Any, list[Bool[Array, "..."]]]:
        """What the function returns, and a flag for each value that was looked at; inside of `jax.jit` or not."""
        outputs, flags, self._seen = _watch(self._jaxpr.jaxpr, self._jaxpr.consts, jax.tree.leaves(args), scope="")
        return jax.tree.unflatten(self._form, outputs), flags

    def first(self, flags: Sequence[np.ndarray]) -> str | None:
        """The name of the first value that is not finite, by the flags of a call; None if all are."""
        return _earliest(self._seen, flags)


def _watch(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: str, backward: bool = False
) -> tuple[list[Any], list[Bool[Array, "..."]], Seen]:
    """Runs a jaxpr.

    Args:
        jaxpr: to run.
        consts: its constants.
        args: its arguments.
        scope: names of the modules around it.
        backward: whether it is a part of the backward pass.

    Returns:
        Its outputs, a flag for each value that was looked at (True: NaN or +Inf; masks are -Inf), and their order.
    """
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    handed = _handed_over(jaxpr, scope, backward)
    flags: list[Any] = []
    entries: list[tuple[str, int] | Seen] = []
    for equation in jaxpr.eqns:
        read = [one.val if isinstance(one, core.Literal) else values[one] for one in equation.invars]
        place, back = _joined(scope, equation), backward or _is_backward(equation)
        inner = _inside(equation)
        if equation.primitive is primitives.scan_p:
            outputs, more, turns = _watch_scan(equation.params, read, place, back)
            entries.append(_shifted(turns, len(flags)))
            flags += more
        elif inner is not None:
            outputs, more, order = _watch(inner[0], inner[1], read, place, back)
            entries += _shifted(order, len(flags)).entries
            flags += more
        else:
            with equation.ctx.manager:
                outputs = equation.primitive.bind(*read, **equation.primitive.get_bind_params(equation.params))
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        for variable, value in zip(equation.outvars, outputs, strict=True):
            values[variable] = value
            if variable in handed:
                entries.append((handed[variable], len(flags)))
                flags.append(jnp.any(jnp.isnan(value) | (value == jnp.inf)))
    results = [one.val if isinstance(one, core.Literal) else values[one] for one in jaxpr.outvars]
    return results, flags, Seen(entries=tuple(entries))


def _watch_scan(params: Any, read: Sequence[Any], scope: str, backward: bool) -> tuple[list[Any], list[Any], Seen]:
    """Runs a scan; the flags of its turns are stacked."""
    (num_consts, num_carry), body = scan_sizes(params), params["jaxpr"]
    fixed, carry, inputs = read[:num_consts], read[num_consts : num_consts + num_carry], read[num_consts + num_carry :]
    seen: list[Seen] = []

    def turn(carry: Sequence[Any], each: Sequence[Any]) -> tuple[list[Any], Any]:
        outputs, flags, order = _watch(body.jaxpr, body.consts, [*fixed, *carry, *each], scope, backward)
        seen[:] = [order]
        return outputs[:num_carry], (outputs[num_carry:], flags)

    length, reverse = params["length"], params["reverse"]
    last, (outputs, flags) = jax.lax.scan(turn, list(carry), list(inputs), length=length, reverse=reverse)
    turns = range(length - 1, -1, -1) if reverse else range(length)
    return [*last, *outputs], flags, Seen(entries=seen[0].entries, turns=turns)


def _inside(equation: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """The jaxpr of an equation that only calls one, and its constants.

    What is recomputed for the backward pass stays as it is: written out, the compiler would keep the first results
    instead, and need the memory that recomputing saves.
    """
    inner = equation.params.get("jaxpr") if equation.primitive in (primitives.jit_p, primitives.remat_p) else None
    if equation.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p):
        inner = equation.params.get("call_jaxpr")
    if inner is None or equation.params.get("differentiated"):
        return None
    return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, ())


def _is_backward(equation: core.JaxprEqn) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _handed_over(jaxpr: core.Jaxpr, scope: str, backward: bool) -> dict[Any, str]:
    """Names of the values that one module makes and another reads, of floating dtypes."""
    made = {
        variable: (_joined(scope, equation), backward or _is_backward(equation))
        for equation in jaxpr.eqns
        for variable in equation.outvars
        if jnp.issubdtype(getattr(variable.aval, "dtype", np.int32), jnp.floating)
    }
    named: dict[Any, str] = {}
    for equation in jaxpr.eqns:
        reader = _joined(scope, equation)
        for variable in equation.invars:
            if isinstance(variable, core.Literal) or variable not in made or variable in named:
                continue
            maker, back = made[variable]
            if maker and not f"{reader}/".startswith(f"{maker}/"):
                named[variable] = f"gradient that leaves {maker}" if back else f"activation {maker}"
            elif not maker and reader:
                named[variable] = f"gradient that reaches {reader}" if back else f"input of {reader}"
    for variable in jaxpr.outvars:
        maker, back = made.get(variable, ("", False)) if not isinstance(variable, core.Literal) else ("", False)
        if maker and variable not in named:
            named[variable] = f"gradient that leaves {maker}" if back else f"activation {maker}"
    return named


_AROUND = re.compile(r"^(?:\w+\()*(.*?)\)*$")
_NO_MODULE = re.compile(r"jit\(|(while|body|cond|scan|checkpoint|rematted_computation|remat|closed_call)$|.*\.|$")
"""Parts of a name stack that are no modules: what jax adds, and flax's `module.method`."""


def _joined(scope: str, equation: core.JaxprEqn) -> str:
    """The modules that an equation stands in, as a path."""
    parts = []
    for part in str(equation.source_info.name_stack).split("/"):
        bare = _AROUND.sub(r"\1", part)
        if bare and not _NO_MODULE.match(part) and not _NO_MODULE.match(bare):
            parts.append(bare)
    outer = scope.split("/") if scope else []
    # What recomputes names its modules from the root on, what calls or scans does from where it stands.
    return "/".join(parts if outer and parts[:1] == outer[:1] else [*outer, *parts])


def _shifted(seen: Seen, by: int) -> Seen:
    entries = tuple(_shifted(one, by) if isinstance(one, Seen) else (one[0], one[1] + by) for one in seen.entries)
    return Seen(entries=entries, turns=seen.turns)


def _earliest(seen: Seen, flags: Sequence[np.ndarray], at: tuple[int, ...] = ()) -> str | None:
    """The name of the first flag that is set, with the turn of each loop around it."""
    for entry in seen.entries:
        if isinstance(entry, Seen):
            found = (_earliest(entry, flags, (*at, turn)) for turn in entry.turns or ())
            name = next(filter(None, found), None)
            if name is not None:
                return name
        elif flags[entry[1]][at]:
            return entry[0] + (f" (layer {', '.join(map(str, at))} of its stack)" if at else "")
    return None


# --- Trees of arrays --------------------------------------------------------------------------------------------------


def _finite(trees: dict[str, Tree]) -> list[Tree]:
    """Whether each array is finite, for each tree."""

    @jax.jit
    def look(trees: list[Tree]) -> list[Tree]:
        return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), trees)

    return jax.device_get(look(list(trees.values())))


def _named(tree: Tree, flags: Tree) -> list[tuple[str, bool]]:
    """The name of each array of a tree, with its flag."""
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return list(zip(paths, map(bool, jax.tree.leaves(flags)), strict=True))


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" (the first of {len(names)})" if len(names) > 1 else "")


def _rows(images: Array) -> tuple[int, ...]:
    """Rows of the batch with a pixel that is not finite, as far as all processes can see them."""
    flags = jax.jit(lambda x: jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))))(images)
    if not flags.is_fully_addressable:
        return ()
    return tuple(int(row) for row in np.flatnonzero(~np.asarray(flags)))
