"""Logical axis rules: the table of names, the presets, and the resolver that turns names into mesh axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from maxdiffusion.common_types import LogicalAxisRules, MeshAxes
from maxdiffusion.errors import RuleError, nearest
from maxdiffusion.specs import MESH_AXES

LOGICAL_AXES: dict[str, str] = {
    # parameters
    "embed": "width of the stream that a projection reads or writes",
    "cross_embed": "width of the text states that cross-attention reads",
    "heads": "attention heads: the unit of tensor parallelism, never cut",
    "kv": "size of one attention head",
    "mlp": "hidden units of a feed-forward layer",
    "conv_in": "input channels of a convolution kernel",
    "conv_out": "output channels of a convolution kernel, and its bias",
    "norm": "scale and bias of a normalisation",
    "vocab": "rows of an embedding table",
    "length": "rows of a table of positions",
    "layers": "equal blocks stacked for a scan",
    # activations
    "activation_batch": "samples of a batch",
    "activation_length": "tokens of a sequence (queries)",
    "activation_kv_length": "tokens of another sequence that are attended to (own keys lie where the queries lie)",
    "activation_embed": "width of the token stream",
    "activation_heads": "attention heads of queries, keys and values",
    "activation_kv": "size of one head of queries, keys and values",
    "activation_mlp": "hidden units of a feed-forward layer",
    "activation_height": "rows of a feature map",
    "activation_width": "columns of a feature map",
    "activation_channels": "channels of a feature map",
}
"""Every logical axis that a model may declare and a rule may name, with what it stands for."""

KNOWN_MESH_AXES = (*MESH_AXES, "model")
"""Mesh axes that a rule may name even when this mesh lacks them (the rule is then skipped)."""

_ACTIVATIONS = tuple(name for name in LOGICAL_AXES if name.startswith("activation_"))

_TENSOR: LogicalAxisRules = tuple(
    (name, axis)
    for axis in ("tensor", "model")
    for name in ("heads", "mlp", "conv_out", "vocab", "activation_heads", "activation_mlp", "activation_channels")
)
_FSDP: LogicalAxisRules = tuple((name, "fsdp") for name in ("embed", "cross_embed", "conv_in", "norm", "length"))
_FSDP_ALONE: LogicalAxisRules = (*_FSDP, *((name, "fsdp") for name in ("conv_out", "mlp", "heads", "vocab")))
# Guidance puts the two halves of a sample next to each other in the batch: along the last axis they part.
_BATCH: LogicalAxisRules = (("activation_batch", ("data", "fsdp", "cfg")),)
_CONTEXT: LogicalAxisRules = (("activation_length", "context"), ("activation_height", "context"))
_STAGES: LogicalAxisRules = (("layers", "stage"),)


def _closed(names: Iterable[str], *parts: LogicalAxisRules) -> LogicalAxisRules:
    """The rules, with None for each of the names that they leave out."""
    rules = tuple(rule for part in parts for rule in part)
    named = {name for name, _ in rules}
    return (*rules, *((name, None) for name in names if name not in named))


DEFAULT_RULES: LogicalAxisRules = _closed(_ACTIVATIONS, _BATCH, _CONTEXT, _STAGES, _TENSOR, _FSDP)
"""Serve meshes with any of the axes data, fsdp, cfg, context, stage, tensor, and `model` as another name for tensor."""

PRESETS: dict[str, LogicalAxisRules] = {
    "dp": _closed(LOGICAL_AXES, (("activation_batch", ("data", "fsdp", "cfg", "tensor", "model")),)),
    "fsdp": _closed(_ACTIVATIONS, _BATCH, _FSDP_ALONE, _STAGES),
    "tp": _closed(_ACTIVATIONS, (("activation_batch", ("data", "cfg")),), _TENSOR, _STAGES),
    "fsdp_tp": _closed(_ACTIVATIONS, _BATCH, _TENSOR, _FSDP, _STAGES),
    "hsdp": _closed(_ACTIVATIONS, _BATCH, _FSDP_ALONE, _STAGES),
    "context": _closed(_ACTIVATIONS, _BATCH, _CONTEXT, _FSDP_ALONE, _STAGES),
}
"""dp: replicas, the batch over every axis. fsdp: parameters and batch over `fsdp`. tp: heads, hidden units and
channels over `tensor`. fsdp_tp: both. hsdp: fsdp within a slice, replicas over `data` across slices.
context: fsdp, and sequences and rows of feature maps over `context`. All but dp: stacked layers over `stage`."""

STORAGE_RULES: LogicalAxisRules = tuple(
    (name, axis)
    for axis in ("tensor", "model", "fsdp")
    for name in ("embed", "cross_embed", "conv_in", "norm", "length", "mlp", "conv_out", "vocab")
)
"""Tried after the rules, for parameters only: a mesh axis that no dimension took (heads that do not divide, a bias)
still shards the storage along another dimension, alone or behind the axes that it has; the parameter is gathered where
it is used. A logical axis whose rule says None stays whole."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Why a dimension is not sharded as a rule wished.

    Attributes:
        kind: `conflict` (another dimension took the mesh axis) or `indivisible` (the size does not divide).
        logical: logical axis of the dimension.
        wanted: mesh axes that the rule named.
        text: one line for people.
    """

    kind: Literal["conflict", "indivisible"]
    logical: str
    wanted: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What the rules make of one array.

    Attributes:
        axes: mesh axes of each dimension (empty: replicated along it).
        notes: wishes that were not met.
    """

    axes: tuple[tuple[str, ...], ...]
    notes: tuple[Note, ...] = ()


def axes_of(wanted: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule as a tuple."""
    return () if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)


def resolve(
    names: Sequence[str | None],
    rules: LogicalAxisRules,
    sizes: Mapping[str, int],
    *,
    shape: Sequence[int] | None = None,
    storage: LogicalAxisRules = (),
) -> Resolution:
    """Mesh axes for an array whose dimensions carry these logical names.

    Rules are tried in order. A rule applies when its dimension has no answer yet and its mesh axes are still free;
    mesh axes that the mesh lacks, or holds with size 1, do not count. With `shape`, axes that do not divide the
    dimension are refused; of a tuple of axes the longest leading part that divides is kept.

    Args:
        names: logical axis of each dimension; None is never sharded.
        rules: ordered rules.
        sizes: size of each mesh axis.
        shape: size of each dimension, in elements.
        storage: further rules for mesh axes that are still free; what they cannot do is not noted.

    Raises:
        RuleError: a name is unknown, or stands twice.
    """
    check_names(names)
    found: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {}
    notes: list[Note] = []
    for logical, wanted in rules:
        if logical not in names or logical in found:
            continue
        axes = _present(wanted, sizes)
        if wanted is None:
            found[logical] = ()
        if not axes:
            continue
        clash = next((axis for axis in axes if axis in taken), None)
        if clash:
            notes.append(_conflict(logical, axes, clash, taken[clash]))
            continue
        size = None if shape is None else shape[names.index(logical)]
        kept = axes if size is None else _dividing(axes, sizes, size)
        if size is not None and kept != axes:
            notes.append(_indivisible(logical, axes, sizes, size))
        if kept:
            found[logical] = kept
            taken.update(dict.fromkeys(kept, logical))
    for logical, wanted in storage:
        if logical not in names or found.get(logical) == ():
            continue
        size = None if shape is None else shape[names.index(logical)]
        for axis in _present(wanted, sizes):
            wider = (*found.get(logical, ()), axis)
            if axis not in taken and (size is None or _dividing(wider, sizes, size) == wider):
                found[logical] = wider
                taken[axis] = logical
    return Resolution(axes=tuple(found.get(name, ()) if name else () for name in names), notes=tuple(notes))


def _present(wanted: MeshAxes, sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in axes_of(wanted) if sizes.get(axis, 1) > 1)


def check_names(names: Sequence[str | None]) -> None:
    """Refuse logical names that no model declares, and a name that stands twice.

    Raises:
        RuleError: with the nearest valid name.
    """
    given = [name for name in names if name is not None]
    for name in given:
        if name not in LOGICAL_AXES:
            raise RuleError(f"logical axis '{name}' is unknown: {nearest(name, LOGICAL_AXES)}")
        if given.count(name) > 1:
            raise RuleError(
                f"logical axis '{name}' stands twice in {tuple(names)}: a mesh axis can shard one dimension only, "
                "name the dimensions by their different roles"
            )


def check_rules(rules: LogicalAxisRules, mesh_axes: Iterable[str] | None) -> LogicalAxisRules:
    """The rules as a tuple of pairs, once every name in them is known.

    Args:
        rules: what the user wrote.
        mesh_axes: axes of the mesh; None when there is no mesh.

    Raises:
        RuleError: a rule is no pair, or names an unknown logical axis or mesh axis.
    """
    here = tuple(mesh_axes or ())
    known = (*KNOWN_MESH_AXES, *here)
    checked = []
    for rule in rules:
        if isinstance(rule, str) or len(rule) != 2 or not isinstance(rule[0], str):
            raise RuleError(f'rule {rule!r} is no pair: write ("logical axis", "mesh axis"), a tuple of axes, or None')
        logical, wanted = rule
        check_names((logical,))
        if not (wanted is None or isinstance(wanted, str)) and not (
            isinstance(wanted, list | tuple) and all(isinstance(axis, str) for axis in wanted)
        ):
            raise RuleError(
                f"rule ('{logical}', {wanted!r}) names no mesh axis: write a name, a tuple of names, or None"
            )
        if logical == "activation_width" and axes_of(wanted):
            raise RuleError(
                f"rule ('{logical}', {wanted!r}): convolutions exchange border rows, not columns: cut the rows "
                f"instead, ('activation_height', {wanted!r})"
            )
        for axis in axes_of(wanted):
            if axis not in known:
                raise RuleError(
                    f"rule ('{logical}', {wanted!r}): mesh axis '{axis}' is unknown: {nearest(axis, here or known)}"
                )
        if len(set(axes_of(wanted))) != len(axes_of(wanted)):
            raise RuleError(f"rule ('{logical}', {wanted!r}) names a mesh axis twice: name it once")
        checked.append((logical, wanted if wanted is None or isinstance(wanted, str) else tuple(wanted)))
    return tuple(checked)


def complete(rules: LogicalAxisRules | str | None, mesh_axes: Iterable[str] | None) -> LogicalAxisRules:
    """The rules that a layout works with: the user's first, defaults for the logical axes that they leave out.

    Args:
        rules: rules, the name of a preset, or None for the defaults.
        mesh_axes: axes of the mesh; None when there is no mesh.

    Raises:
        RuleError: unknown names.
    """
    if isinstance(rules, str):
        if rules not in PRESETS:
            raise RuleError(f"rules '{rules}' is no preset: {nearest(rules, PRESETS)}")
        return PRESETS[rules]
    if not rules:
        return DEFAULT_RULES
    own = check_rules(rules, mesh_axes)
    named = {name for name, _ in own}
    return (*own, *(rule for rule in DEFAULT_RULES if rule[0] not in named))


def without_axes(rules: LogicalAxisRules, mesh_axes: Iterable[str]) -> LogicalAxisRules:
    """The user's own rules that do nothing on a mesh: it has no axis of any rule that they give for the logical axis.

    Args:
        rules: complete; what equals a rule of the defaults is none of the user's own.
        mesh_axes: axes of the mesh.
    """
    here = set(mesh_axes)
    met = {name for name, wanted in rules if wanted is None or here & set(axes_of(wanted))}
    return tuple(rule for rule in rules if rule[0] not in met and axes_of(rule[1]) and rule not in DEFAULT_RULES)


def _dividing(axes: tuple[str, ...], sizes: Mapping[str, int], size: int) -> tuple[str, ...]:
    while axes and size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _conflict(logical: str, axes: tuple[str, ...], clash: str, owner: str) -> Note:
    text = f"{logical} wanted `{'+'.join(axes)}`, taken by {owner}" + (f" (`{clash}`)" if len(axes) > 1 else "")
    return Note(kind="conflict", logical=logical, wanted=axes, text=text)


def _indivisible(logical: str, axes: tuple[str, ...], sizes: Mapping[str, int], size: int) -> Note:
    total = math.prod(sizes[axis] for axis in axes)
    below, above = size // total * total, -(-size // total) * total
    legal = f"{below} or {above}" if below else f"{above}"
    text = f"{logical} of {size} does not divide by {' x '.join(axes)}={total} (nearest sizes that do: {legal})"
    return Note(kind="indivisible", logical=logical, wanted=axes, text=text)
