"""Where the compilers for accelerators are not installed, tests that need them skip, and name what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import aot


@pytest.mark.parametrize(
    ("target", "missing"),
    [("v5e", "libtpu"), ("v5p", "libtpu"), ("v6e", "libtpu"), ("h100", "jax_plugins/xla_cuda13")],
)
def test_tests_skip_by_name(target: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_COMPILERS", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(pytest.skip.Exception, match=rf"no compiler for {target} here \({missing}\): make aot"):
        aot.compile_ahead("tests.kernels.attention.aot", target, ["image"], tmp_path)
