"""Compiles training steps for TPUs that this machine lacks: `python -m tests.tools.aot TARGET FOLDER STRATEGY ...`.

Runs in a process of its own, as `tests.kernels.attention.aot` does; each program's compiled text goes into the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.measure import STRATEGIES, lower_step, twin
from tests.kernels.attention.aot import devices

MESHES = {"FSDP": "fsdp=4"}
"""The strategies, on the four chips of a topology."""

WIDE = {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
"""A width of 512, a whole tile of 128 on each chip: a TPU scatters no parts of one, and sums such arrays whole."""


def main() -> None:
    target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for name in names:
        mesh = build_mesh(MeshSpec.parse(MESHES[name]), devices(target))
        lowered = lower_step(twin("flux-dev", mesh, {**STRATEGIES[name].keywords, **WIDE}))
        (folder / f"{name}.hlo").write_text(lowered.compile().as_text() or "")


if __name__ == "__main__":
    main()
