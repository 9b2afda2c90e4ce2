"""What training steps move on TPUs, compiled ahead of time (`make aot` installs the compiler)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import budget
from maxdiffusion.tools.measure import SIZES, SMALL, STRATEGIES, TOLERANCE, twin
from maxdiffusion.tools.traffic import traffic
from tests.aot import compile_ahead
from tests.tools.aot import MESHES, WIDE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tpus_reduce_and_scatter_gradients(tmp_path: Path, devices: np.ndarray) -> None:
    """FSDP's own collective, where XLA's CPU compiler sums the whole: the formula's bytes, and nothing summed whole."""
    text = compile_ahead("tests.tools.aot", "v5e", ["FSDP"], tmp_path, timeout=900)["FSDP.hlo"]
    mesh = build_mesh(MeshSpec.parse(MESHES["FSDP"]), devices[:4])
    wanted = budget(twin("flux-dev", mesh, {**STRATEGIES["FSDP"].keywords, **WIDE}), **SIZES)
    formula = sum(one.bytes * one.count for one in wanted if one.kinds[0] == "reduce-scatter" and one.bytes > SMALL)
    found = traffic(text, mesh)
    assert not any(one.in_loop_of_unknown_length for one in found.collectives)
    scattered = found.bytes("reduce-scatter", ["fsdp"], above=SMALL)
    assert abs(scattered - formula) <= TOLERANCE * formula
    assert found.bytes("all-reduce", above=SMALL) <= TOLERANCE * formula
