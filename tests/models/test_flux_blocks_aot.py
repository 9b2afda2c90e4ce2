"""A block of FLUX.1 whose sequence two devices share, compiled for absent accelerators (`make aot`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxdiffusion.tools.hlo import arrays_of, instructions
from tests.aot import TPUS, compile_ahead
from tests.models.block_aot import IMAGE, TEXT

_CALL = r'custom_call_target="(?:tpu_custom_call|__gpu\$xla.gpu.triton)"'
_KINDS = {"ring": "collective-permute", "ulysses": "all-to-all"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "strategy", "what"),
    [
        ("v5e", "ulysses", "forward"),
        ("h100", "ring", "gradients"),
        *(
            pytest.param(target, strategy, "gradients", marks=pytest.mark.slow)
            for target in (*TPUS, "h100")
            for strategy in _KINDS
            if (target, strategy) != ("h100", "ring")
        ),
    ],
)
def test_keys_travel_and_are_gathered_nowhere(target: str, strategy: str, what: str, tmp_path: Path) -> None:
    """The kernel runs in the block on text and image in one, 4,608 tokens and none more; only gradients are summed."""
    name = f"{strategy}:{what}"
    text = compile_ahead("tests.models.block_aot", target, [name], tmp_path, timeout=580)[f"{name}.hlo"]
    calls = 3 if what == "gradients" else 1
    assert len(re.findall(_CALL, text)) == calls * (2 if strategy == "ring" else 1)
    found = list(instructions(text))
    kinds = {one.operation.removesuffix("-start") for one in found}
    assert _KINDS[strategy] in kinds and not kinds & {"all-gather", "collective-broadcast"}
    assert ("all-reduce" in kinds) <= (what == "gradients")
    tokens = TEXT + IMAGE
    sizes = {size for one in found for _, dims in arrays_of(one.shape) for size in dims}
    assert tokens // 2 in sizes and not any(tokens < size < 2 * tokens for size in sizes)
    if strategy == "ring":
        assert not any(tokens in dims and len(dims) == 4 for one in found for _, dims in arrays_of(one.shape))
