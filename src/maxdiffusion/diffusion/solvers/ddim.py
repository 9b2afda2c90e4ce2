"""DDIM: x' = alpha' x_0 + sqrt(sigma'^2 - std^2) eps + std noise (Song et al. 2021, equations 12 and 16).

The paper's std = eta sqrt((1 - a') / (1 - a)) sqrt(1 - a / a') with a = alpha^2 is eta sigma' sqrt(1 - exp(-2h)), which
needs no variance-preserving process and does not cancel. eta 0 is deterministic; eta 1 is ancestral sampling (DDPM).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.diffusion.solvers.protocol import SolverState, Step
from maxdiffusion.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DDIM:
    """Carries nothing; stochastic if eta > 0.

    Args:
        eta: share of the noise that is drawn anew, 0 .. 1.

    Raises:
        UsageError: eta is outside 0 .. 1.
    """

    eta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise UsageError(f"DDIM eta={self.eta!r}: write a number from 0 (deterministic) to 1 (ancestral)")

    @property
    def stochastic(self) -> bool:
        return self.eta > 0

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
        if not self.stochastic:
            return state, step.next_alpha * x0 + step.next_sigma * eps
        assert noise is not None, "a stochastic solver is given noise"
        fresh = self.eta**2 * -jnp.expm1(-2 * step.h)  # std^2 / sigma'^2
        kept = step.next_sigma * jnp.sqrt(1 - fresh)
        return state, step.next_alpha * x0 + kept * eps + step.next_sigma * jnp.sqrt(fresh) * noise
