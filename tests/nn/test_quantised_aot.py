"""Compilers for TPUs and GPUs keep the quantised products (`make aot` installs them): none becomes a wider one."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from maxdiffusion.tools.hlo import arrays_of, instructions
from tests.aot import compile_ahead


def _products(text: str) -> Counter[tuple[str, str, str]]:
    """How often a compiled program multiplies operands of which dtypes, and into which."""
    found: Counter[tuple[str, str, str]] = Counter()
    for one in instructions(text):
        if one.operation in ("dot", "convolution"):
            a, b, made = (arrays_of(shape)[0][0] for shape in (one.operand(0), one.operand(1), one.shape))
            found[a, b, made] += one.count
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "name", "small"),
    [
        ("v5e", "flux-dev:int8", [("s8", "s8", "s32")]),
        ("v5e", "flux-dev:int8:stored", [("s8", "s8", "s32")]),
        pytest.param("v6e", "flux-dev:int8", [("s8", "s8", "s32")], marks=pytest.mark.slow),
        pytest.param("v6e", "sd15:int8:stored", [("s8", "s8", "s32")], marks=pytest.mark.slow),
        pytest.param("v6e", "sd15:int8", [("s8", "s8", "s32")], marks=pytest.mark.slow),
        pytest.param("7x", "flux-dev:fp8:stored", [("f8e4m3fn", "f8e4m3fn", "f32")], marks=pytest.mark.slow),
        pytest.param("7x", "sd15:fp8", [("f8e4m3fn", "f8e4m3fn", "f32")], marks=pytest.mark.slow),
        pytest.param(
            "7x",
            "flux-dev:fp8_full:gradients",
            [
                ("f8e4m3fn", "f8e4m3fn", "f32"),
                ("f8e5m2", "f8e4m3fn", "f32"),
                ("f8e4m3fn", "f8e5m2", "f32"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tpu_multiplies_what_the_ledger_says(
    target: str, name: str, small: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    files = compile_ahead("tests.nn.aot", target, [name], tmp_path, timeout=600)
    found, quantised = _products(files[f"{name}.hlo"]), int(files[f"{name}.quantised"])
    assert quantised > 10
    assert {kind: found[kind] for kind in small} == dict.fromkeys(small, quantised)
    assert not [kind for kind in found if set(kind[:2]) & {"s8", "f8e4m3fn", "f8e5m2"} and kind not in small]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "dtype", "in_stablehlo"),
    [
        ("flux-dev:fp8", "f8e4m3fn", "f8E4M3FN"),
        pytest.param("flux-dev:int8", "s8", "i8", marks=pytest.mark.slow),
        pytest.param("flux-dev:fp8:stored", "f8e4m3fn", "f8E4M3FN", marks=pytest.mark.slow),
        pytest.param("sd15:fp8", "f8e4m3fn", "f8E4M3FN", marks=pytest.mark.slow),
    ],
)
def test_an_h100_multiplies_small_operands_in_dense_layers(
    name: str, dtype: str, in_stablehlo: str, tmp_path: Path
) -> None:
    """Products of one input are joined into one, and long sums are split: multiplications are counted, not products."""
    files = compile_ahead("tests.nn.aot", "h100", [name], tmp_path, timeout=600)
    small = rf"tensor<([0-9x]*)x{in_stablehlo}>"
    asked = 0
    for summed, a, _, made in re.findall(
        rf"dot_general.*contracting_dims = \[([0-9, ]*)\].*\({small}, {small}\) -> tensor<([0-9x]*)x\w+>",
        files[f"{name}.stablehlo"],
    ):
        sizes = [int(size) for size in a.split("x")]
        asked += math.prod(int(size) for size in made.split("x")) * math.prod(
            sizes[int(at)] for at in summed.split(",")
        )
    done = 0
    for one in instructions(files[f"{name}.hlo"]):
        if one.operation == "dot" and arrays_of(one.operand(0))[0][0] == arrays_of(one.operand(1))[0][0] == dtype:
            (_, a), (_, made) = arrays_of(one.operand(0))[0], arrays_of(one.shape)[0]
            summed = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", one.rest)
            assert summed is not None
            done += one.count * math.prod(made) * math.prod(a[int(at)] for at in summed[1].split(","))
    assert done == asked > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["sd15:int8", "sd15:fp8"])
def test_an_h100_convolves_quantised_values_in_bfloat16(name: str, tmp_path: Path) -> None:
    """XLA would turn int8 and float8 convolutions into float32 ones, many times slower."""
    files = compile_ahead("tests.nn.aot", "h100", [name], tmp_path, timeout=600)
    calls = [
        {arrays_of(shape)[0][0] for shape in (one.operand(0), one.operand(1), one.shape)}
        for one in instructions(files[f"{name}.hlo"])
        if one.operation == "custom-call" and "__cudnn$conv" in one.rest
    ]
    asked = len(re.findall(r"stablehlo\.convolution", files[f"{name}.stablehlo"]))
    assert len(calls) == asked > 10
    assert all(dtypes == {"bf16"} for dtypes in calls), calls
