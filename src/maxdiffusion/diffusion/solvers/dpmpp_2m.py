"""DPM-Solver++(2M), second order with one call of the denoiser a step (Lu et al. 2022, DPM-Solver++, algorithm 2).

x' = (sigma' / sigma) x - alpha' (exp(-h) - 1) D,  D = (1 + 1 / (2r)) x_0 - 1 / (2r) previous x_0,  r = previous h / h.

The first step has no past and is of first order; so is a step to sigma = 0, where h is infinite (D = x_0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.diffusion.solvers.protocol import Step


class History(NamedTuple):
    """What the step before left: its estimate of x_0 and its h (infinite before the first step)."""

    x0: Float[Array, "batch ..."]
    h: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class DPMpp2M:
    """Deterministic, carries the last estimate of the data."""

    @property
    def stochastic(self) -> bool:
        return False

    def init(self, x: Float[Array, "batch ..."]) -> History:
        return History(x0=jnp.zeros_like(x), h=jnp.asarray(jnp.inf, jnp.float32))

    def step(
        self,
        state: History,
        x: Float[Array, "batch ..."],
        x0: Float[Array, "batch ..."],
        eps: Float[Array, "batch ..."],
        step: Step,
        noise: Float[Array, "batch ..."] | None,
    ) -> tuple[History, Float[Array, "batch ..."]]:
        finite = jnp.isfinite(step.h)
        half_inverse_r = jnp.where(finite, jnp.where(finite, step.h, 0.0) / (2 * state.h), 0.0)
        data = x0 + half_inverse_r * (x0 - state.x0)
        moved = (step.next_sigma / step.sigma) * x - step.next_alpha * jnp.expm1(-step.h) * data
        return History(x0=x0, h=step.h), moved
