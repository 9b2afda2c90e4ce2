"""Ancestral sampling: an Euler step to a lower noise level than wanted, then fresh noise up to it.

With s = sigma / alpha: s_up^2 = s'^2 (s^2 - s'^2) / s^2 and s_down^2 = s'^2 - s_up^2 (Song et al. 2020, appendix F; as
`euler_ancestral` in k-diffusion). As s' / s = exp(-h), s_down = s' exp(-h) and s_up = s' sqrt(1 - exp(-2h)): finite
where alpha = 0 too. The same law serves flow matching.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.diffusion.solvers.protocol import SolverState, Step


@dataclass(frozen=True, kw_only=True)
class EulerAncestral:
    """Stochastic, carries nothing."""

    @property
    def stochastic(self) -> bool:
        return True

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
        assert noise is not None, "a stochastic solver is given noise"
        down = step.next_sigma * jnp.exp(-step.h)
        up = step.next_sigma * jnp.sqrt(-jnp.expm1(-2 * step.h))
        return state, step.next_alpha * x0 + down * eps + up * noise
