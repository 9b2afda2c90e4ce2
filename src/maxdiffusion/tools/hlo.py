"""A compiled program's text, walked as it runs: every instruction of every computation, with how often it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}(?:, execution_thread=\S+)?$", re.MULTILINE | re.DOTALL
)
_INSIDE = r"[^()]*"
for _ in range(3):  # asynchronous calls make tuples of tuples of arrays, whose layouts have parentheses
    _INSIDE = rf"(?:[^()]|\({_INSIDE}\))*"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?([\w.\-]+) = (\({_INSIDE}\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE)
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"(?:calls|body|condition|branch_computations|true_computation|false_computation)=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a program.

    Attributes:
        computation: that it stands in.
        name: within its computation.
        shape: of the result, as written: `f32[4,8]{1,0}`, or several in parentheses.
        operation: `dot`, `all-reduce-start`, ...
        rest: operands and attributes, as written after the operation's opening parenthesis.
        count: how often it runs in one call of the program, loops counted by their trips; of the branches of a
            conditional, each counts as if it were taken.
        in_loop_of_unknown_length: whether a loop around it has no known number of trips, and counts as one.
        shapes: what every instruction of the same computation makes, by name.
    """

    computation: str
    name: str
    shape: str
    operation: str
    rest: str
    count: int
    in_loop_of_unknown_length: bool
    shapes: Mapping[str, str]

    def operand(self, index: int) -> str:
        """The shape of an operand, as written."""
        return self.shapes[_OPERAND.findall(self.rest)[index]]

    def operands(self) -> list[str]:
        """The shapes of all operands, as written."""
        return [self.shapes[name] for name in _OPERAND.findall(self.rest.partition("), ")[0])]


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction that a compiled program runs, in the order of its text, those of called computations inside.

    What reductions, sorts and scatters apply to single numbers is left out.

    Args:
        text: of the optimised program, `jitted.lower(...).compile().as_text()`.
    """
    computations = _COMPUTATION.findall(text)
    bodies = {name: _INSTRUCTION.findall(body) for _, name, body in computations}
    for entry, name, _ in computations:
        if entry:
            yield from _walk(name, bodies, 1, False)


def _walk(
    computation: str, bodies: Mapping[str, list[tuple[str, str, str, str]]], times: int, unknown: bool
) -> Iterator[Instruction]:
    """The instructions of a computation that runs `times` times, and of those that it calls."""
    body = bodies.get(computation, [])
    shapes = {name: shape for name, shape, _, _ in body}
    for name, shape, operation, rest in body:
        yield Instruction(
            computation=computation,
            name=name,
            shape=shape,
            operation=operation,
            rest=rest,
            count=times,
            in_loop_of_unknown_length=unknown,
            shapes=shapes,
        )
        trips = _trips(rest, bodies) if operation == "while" else 1
        called = [one for several, single in _CALLED.findall(rest) for one in (several or single).split(",")]
        if operation == "call":
            called += _APPLIED.findall(rest)
        for one in called:
            yield from _walk(one.strip().removeprefix("%"), bodies, times * (trips or 1), unknown or trips is None)


def _trips(rest: str, bodies: Mapping[str, list[tuple[str, str, str, str]]]) -> int | None:
    """How often a loop runs: as the compiler says, else the one number that its condition compares a counter with.

    Loops that jax makes of a known length count up from 0.
    """
    known = _TRIPS.search(rest)
    if known:
        return int(known[1])
    condition = _CONDITION.search(rest)
    body = bodies.get(condition[1], []) if condition else []
    limits = [text for _, shape, operation, text in body if operation == "constant" and shape.startswith("s32[]")]
    upwards = any(operation == "compare" and "direction=LT" in text for _, _, operation, text in body)
    return int(limits[0].partition(")")[0]) if len(limits) == 1 and upwards else None


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and sizes of each array of a shape as written: `[("f32", (4, 8))]` for `f32[4,8]{1,0}`."""
    return [(dtype, tuple(int(size) for size in dims.split(",") if size)) for dtype, dims in _SHAPE.findall(shape)]
