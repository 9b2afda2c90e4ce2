"""Euler's method on the probability-flow ODE, first order.

In the coordinates x / alpha over sigma / alpha the ODE is d(x / alpha) / d(sigma / alpha) = eps (Karras et al. 2022,
algorithm 1 without churn), and Euler's step lands on next_alpha x_0 + next_sigma eps. For flow matching the same point
is x + (next_t - t) velocity. Written this way nothing is divided by alpha, which may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from maxdiffusion.diffusion.solvers.protocol import SolverState, Step


@dataclass(frozen=True, kw_only=True)
class Euler:
    """Deterministic, carries nothing."""

    @property
    def stochastic(self) -> bool:
        return False

    def init(self, x: Float[Array, "batch ..."]) -> SolverState:
        return ()

    def step(
        self,
        state: SolverState,
        x: Float[Array, "batch ..."],
        x0: Float[Array, "batch ..."],
        eps: Float[Array, "batch ..."],
        step: Step,
        noise: Float[Array, "batch ..."] | None,
    ) -> tuple[SolverState, Float[Array, "batch ..."]]:
        return state, step.next_alpha * x0 + step.next_sigma * eps
