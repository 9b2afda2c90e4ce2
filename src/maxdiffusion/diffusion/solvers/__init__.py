"""Solvers that fold a denoiser over a time grid, one a file; `get_solver` finds one by its name."""

from __future__ import annotations

from maxdiffusion.diffusion.solvers.ddim import DDIM
from maxdiffusion.diffusion.solvers.dpmpp_2m import DPMpp2M
from maxdiffusion.diffusion.solvers.euler import Euler
from maxdiffusion.diffusion.solvers.euler_ancestral import EulerAncestral
from maxdiffusion.diffusion.solvers.protocol import Solver, SolverState, Step
from maxdiffusion.errors import UsageError, nearest

SOLVERS: dict[str, Solver] = {
    "ddim": DDIM(),
    "dpmpp_2m": DPMpp2M(),
    "euler": Euler(),
    "euler_ancestral": EulerAncestral(),
}


def get_solver(name: str) -> Solver:
    """The solver of this name with its default settings.

    Raises:
        UsageError: no such solver; the message has the nearest name.
    """
    if name not in SOLVERS:
        raise UsageError(f"solver {name!r}: {nearest(str(name), SOLVERS)}")
    return SOLVERS[name]


__all__ = ["DDIM", "SOLVERS", "DPMpp2M", "Euler", "EulerAncestral", "Solver", "SolverState", "Step", "get_solver"]
