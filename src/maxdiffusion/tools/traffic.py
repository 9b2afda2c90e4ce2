"""What a compiled program moves between devices: each collective, its bytes, how often, and along which mesh axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from maxdiffusion.tools.hlo import Instruction, arrays_of, instructions

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
"""Collectives of XLA's HLO."""

_BITS = {"pred": 8, "bf16": 16}
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}")
_CHOSEN = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes along which it moves, in the order of the mesh; empty where the groups fit no axes.
        tensors: bytes of each array that it moves at once: of the whole that a group of devices holds together, so what
            an all-gather makes, what an all-reduce or reduce-scatter takes from each device, what a device gives to an
            all-to-all or sends in a permute.
        count: how often it runs in one call of the program, loops counted by their trips.
        in_loop_of_unknown_length: whether a loop around it has no known number of trips, and counts as one.
    """

    kind: str
    axes: tuple[str, ...]
    tensors: tuple[int, ...]
    count: int
    in_loop_of_unknown_length: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all its arrays, once."""
        return sum(self.tensors)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of a program.

    Attributes:
        collectives: in the order of the program's text.
    """

    collectives: tuple[Collective, ...]

    def bytes(self, kind: str | None = None, axes: Sequence[str] | None = None, *, above: int = 0) -> int:
        """Bytes of one call, of the arrays larger than `above` bytes that this kind moves along these axes."""
        chosen = self._chosen(kind, axes, above)
        return sum(size * one.count for one in chosen for size in one.tensors if size > above)

    def count(self, kind: str | None = None, axes: Sequence[str] | None = None, *, above: int = 0) -> int:
        """How many arrays of more than `above` bytes this kind moves along these axes in one call.

        A collective that the compiler has made of several counts once for each array.
        """
        return sum(one.count * sum(size > above for size in one.tensors) for one in self._chosen(kind, axes, above))

    def table(self, *, above: int = 0) -> list[tuple[str, str, int, int]]:
        """Rows (kind, axes, number of arrays, bytes), the most bytes first."""
        keys = dict.fromkeys((one.kind, one.axes) for one in self._chosen(None, None, above))
        rows = [(*key, self.count(*key, above=above), self.bytes(*key, above=above)) for key in keys]
        rows.sort(key=lambda row: -row[3])
        return [(kind, "+".join(axes) or "?", number, total) for kind, axes, number, total in rows]

    def _chosen(self, kind: str | None, axes: Sequence[str] | None, above: int) -> Iterator[Collective]:
        for one in self.collectives:
            if (
                kind in (None, one.kind)
                and (axes is None or tuple(axes) == one.axes)
                and max(one.tensors, default=0) > above
            ):
                yield one


def traffic(text: str, mesh: Mesh) -> Traffic:
    """The collectives of a compiled program.

    Args:
        text: of the optimised program, `jitted.lower(...).compile().as_text()`.
        mesh: that it was compiled for, its devices in the order of the program's partitions.
    """
    groups = _groups_of_axes(mesh)
    found = (_collective(one, groups) for one in instructions(text))
    return Traffic(collectives=tuple(one for one in found if one is not None))


def _collective(one: Instruction, axes: dict[frozenset[frozenset[int]], tuple[str, ...]]) -> Collective | None:
    """The collective that an instruction is, if it is one among several devices."""
    kind = one.operation.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _groups(one.rest)
    size = max(map(len, groups), default=1)
    if size == 1 and not (kind == "collective-permute" and groups):
        return None
    # What TPU compilers make of a sum of which each device keeps a part.
    scattered = kind == "all-reduce" and one.computation.startswith("all-reduce-scatter")
    return Collective(
        kind="reduce-scatter" if scattered else kind,
        axes=_axes_of(kind, groups, axes),
        tensors=_tensors(one.shape, kind, size, started=one.operation.endswith("-start")),
        count=one.count,
        in_loop_of_unknown_length=one.in_loop_of_unknown_length,
    )


def _tensors(shape: str, kind: str, size: int, *, started: bool) -> tuple[int, ...]:
    parts = [_array_bytes(dtype, dims) for dtype, dims in arrays_of(shape)]
    if started and kind in ("all-gather", "collective-permute"):
        # (operand, result, and for permutes two counters): the result is what arrives
        parts = parts[1:2] if len(parts) % 2 == 0 else parts[-1:]
    if kind == "all-to-all":
        return (sum(parts),)  # a tuple there is one array, cut into what each device of the group gets
    return tuple(part * (size if kind == "reduce-scatter" else 1) for part in parts)


def _array_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)
    return math.prod(dims) * bits // 8


def _groups(rest: str) -> list[tuple[int, ...]]:
    """The groups of devices of a collective; of a permute the pairs (source, target)."""
    iota, of_mesh = _IOTA.search(rest), _MESH.search(rest)
    if iota:
        rows, columns, dims, order = iota.groups()
        return _rows(_numbers(dims, order).reshape(int(rows), int(columns)))
    if of_mesh:
        return _rows(_along(*of_mesh.groups()))
    listed = _LISTED.search(rest) or _PAIRS.search(rest)
    if not listed:
        return []
    return [tuple(int(number) for number in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", listed[1])]


def _rows(numbers: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in numbers]


def _numbers(dims: str, order: str | None) -> np.ndarray:
    """The device numbers of `[dims]` or `[dims]T(order)`, in their order."""
    shape = [int(size) for size in dims.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose([int(axis) for axis in order.split(",")]) if order else numbers


def _along(sizes: str, dims: str | None, order: str | None, chosen: str) -> np.ndarray:
    """The groups of `mesh['a'=2,'b'=4], device_ids=(...) {'a','b':(1)2}`: those that differ along the chosen axes.

    An axis may be chosen in part: `:(before)size` of its digits.
    """
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    numbers = _numbers(dims or str(math.prod(axes.values())), order).reshape(list(axes.values()))
    wanted = {name: (int(before or 1), int(size or axes[name])) for name, before, size in _CHOSEN.findall(chosen)}
    shape, along = list[int](), list[int]()
    for name, total in axes.items():
        before, size = wanted.get(name, (1, 1))
        if name in wanted:
            along.append(len(shape) + 1)
        shape += [before, size, total // (before * size)]
    rest = [axis for axis in range(len(shape)) if axis not in along]
    return numbers.reshape(shape).transpose([*rest, *along]).reshape(-1, math.prod(shape[axis] for axis in along))


def _groups_of_axes(mesh: Mesh) -> dict[frozenset[frozenset[int]], tuple[str, ...]]:
    """For each choice of mesh axes, the groups of partitions that differ along them alone; fewest axes first."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    wide = [axis for axis, size in enumerate(numbers.shape) if size > 1]
    found: dict[frozenset[frozenset[int]], tuple[str, ...]] = {}
    for chosen in (axes for n in range(1, len(wide) + 1) for axes in itertools.combinations(wide, n)):
        rest = [axis for axis in range(numbers.ndim) if axis not in chosen]
        width = math.prod(numbers.shape[axis] for axis in chosen)
        rows = numbers.transpose([*rest, *chosen]).reshape(-1, width)
        key = frozenset(frozenset(map(int, row)) for row in rows)
        found.setdefault(key, tuple(mesh.axis_names[axis] for axis in chosen))
    return found


def _axes_of(
    kind: str, groups: list[tuple[int, ...]], axes: dict[frozenset[frozenset[int]], tuple[str, ...]]
) -> tuple[str, ...]:
    if kind not in ("collective-permute", "all-to-all"):
        return axes.get(frozenset(map(frozenset, groups)), ())
    # The fewest axes whose groups hold every pair of source and target, or every group that is a part of one.
    for rows, names in axes.items():
        if all(any(set(group) <= row for row in rows) for group in groups):
            return names
    return ()
