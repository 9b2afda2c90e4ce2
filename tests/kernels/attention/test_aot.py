"""Attention compiled ahead of time for accelerators that this machine lacks (`make aot` installs their compilers)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.aot import TPUS, compile_ahead
from tests.kernels.attention.aot import PROGRAMS


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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"image", "text", "ring", "three-heads"}))
def test_every_program_compiles_for_gpus(name: str, tmp_path: Path) -> None:
    program = _compile("h100", [name], tmp_path)[name]
    assert program.hlo.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert _collectives(program.hlo) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"image", "ring", "three-heads"}))
def test_every_program_compiles_for_tpus(target: str, name: str, tmp_path: Path) -> None:
    """The seven block sizes of the page, masks, float32, wide heads, lengths that no tile divides."""
    program = _compile(target, [name], tmp_path)[name]
    assert program.hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert _collectives(program.hlo) == []
    length, _, _, _, masked, _ = PROGRAMS[name]
    assert masked == ("_segmented" in program.hlo) or length % 128


@pytest.mark.slow
@pytest.mark.parametrize(("target", "call"), [("v5p", "tpu_custom_call"), ("h100-cudnn", "triton"), ("h100", "triton")])
def test_rings_are_built_of_these_kernels(target: str, call: str, tmp_path: Path) -> None:
    """Keys travel round the ring and are gathered nowhere; cuDNN, where there is one, gives no ring its sums."""
    program = _compile(target, ["ring"], tmp_path)["ring"]
    assert call in program.stablehlo and "cudnn" not in program.stablehlo
    if program.hlo:
        assert set(_collectives(program.hlo)) == {"collective-permute"}
        assert _lengths(program.hlo) <= {2304}
