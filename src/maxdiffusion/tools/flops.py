"""What a compiled program computes: FLOPs of its matrix products and convolutions, loops counted by their trips."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from maxdiffusion.kernels.flops import meetings
from maxdiffusion.tools.hlo import Instruction, arrays_of, instructions

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one device in one call; a multiplication and an addition are two.

    Attributes:
        dots: of matrix products.
        convolutions: of convolutions; what meets padding or the gaps of a dilation is not computed and not counted.
        in_loops_of_unknown_length: part of both that lies in loops without a known number of trips, counted once.
        custom_calls: targets of calls whose inside the text does not show (flash kernels, cuBLAS, cuDNN) and how often
            they run: what they compute is not counted.
    """

    dots: int
    convolutions: int
    in_loops_of_unknown_length: int
    custom_calls: dict[str, int]

    @property
    def total(self) -> int:
        """All that is counted."""
        return self.dots + self.convolutions


def flops(text: str) -> Flops:
    """FLOPs of a compiled program.

    `compiled.cost_analysis()` counts the body of a loop once, so that a scanned stack of layers costs one layer there.

    Args:
        text: of the optimised program, `jitted.lower(...).compile().as_text()`. Of a partitioned program it is that of
            one device.
    """
    totals, calls = Counter[str](), Counter[str]()
    for one in instructions(text):
        if one.operation == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', one.rest)
            calls[target[1] if target else "?"] += one.count
        elif one.operation in _PRODUCTS:
            found = one.count * _PRODUCTS[one.operation](one)
            totals[one.operation] += found
            totals["unknown"] += found * one.in_loop_of_unknown_length
    return Flops(
        dots=totals["dot"],
        convolutions=totals["convolution"],
        in_loops_of_unknown_length=totals["unknown"],
        custom_calls=dict(calls),
    )


def products(text: str) -> Counter[tuple[str, str]]:
    """FLOPs of a compiled program by the dtypes of the two operands, as XLA writes them: `("s8", "s8")`.

    Args:
        text: as for `flops`.
    """
    found = Counter[tuple[str, str]]()
    for one in instructions(text):
        if one.operation in _PRODUCTS:
            dtypes = arrays_of(one.operand(0))[0][0], arrays_of(one.operand(1))[0][0]
            found[dtypes] += one.count * _PRODUCTS[one.operation](one)
    return found


def _sizes(shape: str) -> tuple[int, ...]:
    return arrays_of(shape)[0][1]


def _of_dot(one: Instruction) -> int:
    contracted = _CONTRACTED.search(one.rest)
    lhs = _sizes(one.operand(0))
    summed = math.prod(lhs[int(dim)] for dim in contracted[1].split(",") if dim) if contracted else 1
    return 2 * math.prod(_sizes(one.shape)) * summed


def _of_convolution(one: Instruction) -> int:
    labels = _LABELS.search(one.rest)
    assert labels is not None, one.rest
    of_input, of_kernel, of_output = labels.groups()
    inputs, kernel, output = _sizes(one.operand(0)), _sizes(one.operand(1)), _sizes(one.shape)
    window = _window(one.rest)
    # Groups need no care: the kernel's input features are those of one group, the output's batch and features of all.
    pairs = output[of_output.index("b")] * output[of_output.index("f")] * kernel[of_kernel.index("i")]
    for dim in range(len(of_output) - 2):
        digit = str(dim)
        sizes = inputs[of_input.index(digit)], kernel[of_kernel.index(digit)], output[of_output.index(digit)]
        pairs *= _meetings(sizes, window, dim)
    return 2 * pairs


_PRODUCTS = {"dot": _of_dot, "convolution": _of_convolution}


def _window(rest: str) -> dict[str, list[str]]:
    """`window={size=3x3 pad=1_1x0_1 lhs_dilate=2x2}` as lists, one entry for each dimension."""
    written = _WINDOW.search(rest)
    pairs = (part.partition("=") for part in written[1].split()) if written else ()
    return {key: value.split("x") for key, _, value in pairs}


def _meetings(sizes: tuple[int, int, int], window: dict[str, list[str]], dim: int) -> int:
    """Pairs (position of the output, position of the kernel) at which there is a value of the input."""
    size, taps, outputs = sizes

    def setting(key: str, default: str) -> str:
        return window[key][dim] if key in window else default

    stride, dilation, gaps = (int(setting(key, "1")) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    low = int(setting("pad", "0_0").split("_")[0])
    # Reversal permutes the taps of a window and changes no count.
    return meetings(size, taps, outputs, stride=stride, dilation=dilation, gaps=gaps, low=low)
