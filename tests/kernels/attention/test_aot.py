"""Attention compiled ahead of time for accelerators that this machine lacks (`make aot` installs their compilers)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxdiffusion.tools.hlo import arrays_of, instructions
from tests.aot import TPUS, compile_ahead
from tests.kernels.attention.aot import PROGRAMS

_WHOLE = ["page-sizes", "video", "wide"]
"""Programs of whole sequences that only slow tests compile everywhere."""


@dataclass(frozen=True)
class _Compiled:
    """Texts of one program: what jax handed to the compiler, and what the compiler made of it."""

    stablehlo: str
    hlo: str


def _compile(target: str, names: list[str], folder: Path) -> dict[str, _Compiled]:
    texts = compile_ahead("tests.kernels.attention.aot", target, names, folder)
    return {name: _Compiled(texts[f"{name}.stablehlo"], texts.get(f"{name}.hlo", "")) for name in names}


def _collectives(text: str) -> list[str]:
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


def _gathered(text: str) -> set[str]:
    """Dtypes of what is gathered."""
    found = [one for one in instructions(text) if one.operation.startswith("all-gather")]
    return {dtype for one in found for dtype, *_ in arrays_of(one.shape)}


def _calls(text: str) -> list[str]:
    """The operands' shapes of each call of an attention kernel; whole numbers among them say which keys may be seen."""
    calls = "tpu_custom_call|__gpu\\$xla.gpu.triton"
    return re.findall(rf'custom_call_target="(?:{calls})", operand_layout_constraints={{(.*?}})}}', text)


def _lengths(text: str) -> set[int]:
    """Every dimension beyond 1024 of every array in compiled text."""
    shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([0-9,]+)\]", text)
    return {int(size) for shape in shapes for size in shape.split(",") if int(size) > 1024}


@pytest.mark.parametrize("target", TPUS)
def test_tpus_run_splash_attention(target: str, tmp_path: Path) -> None:
    """Forward and backward; each chip its own batch row and heads, nothing exchanged, 4,608 tokens not padded."""
    program = _compile(target, ["image"], tmp_path)["image"]
    assert program.hlo.count('custom_call_target="tpu_custom_call"') == 3  # forward, keys and values, queries
    assert _collectives(program.hlo) == []
    assert _lengths(program.hlo) == {4608}
    assert "bf16[1,4608,2,64]" in program.hlo


def test_tpus_run_it_where_heads_do_not_divide(tmp_path: Path) -> None:
    """Chips along an axis that attention cannot use repeat the work: the kernel leaves no axis to the partitioner."""
    program = _compile("v5p", ["three-heads"], tmp_path)["three-heads"]
    assert program.hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert "bf16[1,512,3,64]" in program.hlo
    assert set(_collectives(program.hlo)) <= {"all-reduce"}  # of equal halves of the gradients


def test_gpus_run_the_triton_kernel(tmp_path: Path) -> None:
    """No cuDNN here: forward and backward for an H100, masked and not; nothing exchanged, 4,608 tokens not padded."""
    programs = _compile("h100", ["image", "text"], tmp_path)
    for program in programs.values():
        assert program.hlo.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
        assert _collectives(program.hlo) == []
    assert _lengths(programs["image"].hlo) == {4608}


def test_gpus_with_cudnn_call_it(tmp_path: Path) -> None:
    """Each GPU its own batch row and heads; a mask of keys goes to the Triton kernel, never into thin air."""
    programs = _compile("h100-cudnn", ["image", "text"], tmp_path)
    image, text = programs["image"].stablehlo, programs["text"].stablehlo
    for call in ("@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("):
        (line,) = [line for line in image.splitlines() if call in line]
        assert "tensor<1x4608x2x64xbf16>" in line
    assert "triton" not in image and "all_gather" not in image
    assert "cudnn" not in text and text.count("@__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize(
    "target", ["v5e", "h100", *(pytest.param(one, marks=pytest.mark.slow) for one in ("v5p", "v6e"))]
)
def test_masks_and_parts_of_a_sequence(target: str, tmp_path: Path) -> None:
    """Segment ids reach the kernel in every exchange, keys and values are gathered in none, no length is padded."""
    names = ["masked", "ring-masked", "ulysses-masked", "hybrid-masked"]
    masked, ring, ulysses, hybrid = _compile(target, names, tmp_path).values()
    for program, calls, kinds, lengths in (
        (masked, 3, set(), {4608}),
        (ring, 6, {"collective-permute"}, {2304}),  # of two parts of the keys each
        (ulysses, 3, {"all-to-all", "all-gather"}, {2304, 4608}),
        (hybrid, 6, {"all-to-all", "all-gather", "collective-permute"}, {1152, 2304}),
    ):
        found = _calls(program.hlo)
        assert len(found) == calls and all("s32[" in operands for operands in found)
        assert set(_collectives(program.hlo)) == kinds
        assert _gathered(program.hlo) <= {"pred", "u8"}  # a byte a token: the mask
        assert _lengths(program.hlo) <= lengths | {4608}  # the mask comes in whole
        assert max(lengths) in _lengths(program.hlo)


def test_sequences_in_parts_with_cudnn(tmp_path: Path) -> None:
    """It runs between Ulysses' swaps, on all tokens of half the heads; it gives no ring its sums."""
    programs = _compile("h100-cudnn", ["ring", "ulysses", "ulysses-masked"], tmp_path)
    ring, ulysses, masked = (program.stablehlo for program in programs.values())
    for call in ("@__cudnn$fmhaSoftmax(", "@__cudnn$fmhaSoftmaxBackward("):
        (line,) = [line for line in ulysses.splitlines() if call in line]
        assert "tensor<1x4608x2x128xbf16>" in line
    assert "triton" not in ulysses and "all_gather" not in ulysses
    assert "cudnn" not in ring and ring.count("@__gpu$xla.gpu.triton") == 6 and "all_gather" not in ring
    assert "cudnn" not in masked and masked.count("@__gpu$xla.gpu.triton") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", _WHOLE)
def test_every_program_compiles_for_gpus(name: str, tmp_path: Path) -> None:
    program = _compile("h100", [name], tmp_path)[name]
    assert program.hlo.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert _collectives(program.hlo) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("name", ["text", *_WHOLE])
def test_every_program_compiles_for_tpus(target: str, name: str, tmp_path: Path) -> None:
    """The seven block sizes of the page, masks, float32, wide heads, lengths that no tile divides."""
    program = _compile(target, [name], tmp_path)[name]
    assert program.hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert _collectives(program.hlo) == []
    assert PROGRAMS[name].masked == ("_segmented" in program.hlo)


@pytest.mark.slow
@pytest.mark.parametrize("target", [*TPUS, "h100"])
def test_parts_of_a_sequence_without_a_mask(target: str, tmp_path: Path) -> None:
    """Nothing hides keys where nothing is masked or padded; keys travel, and are gathered nowhere."""
    programs = _compile(target, ["ring", "ulysses"], tmp_path)
    ring, ulysses = programs["ring"].hlo, programs["ulysses"].hlo
    assert set(_collectives(ring)) == {"collective-permute"} and _lengths(ring) == {2304}
    assert set(_collectives(ulysses)) == {"all-to-all"} and _lengths(ulysses) == {2304, 4608}
    for text, calls in ((ring, 6), (ulysses, 3)):
        found = _calls(text)
        assert len(found) == calls and not any("s32[" in operands for operands in found)
