"""A solver turns the estimates (x_0, eps) at one noise level into the sample at the next, and carries its memory."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from jaxtyping import Array, Float

SolverState: TypeAlias = Any
"""A pytree of fixed shapes and dtypes, the carry of a scan."""


class Step(NamedTuple):
    """One step of a grid, float32 scalars: from (alpha, sigma) to (next_alpha, next_sigma).

    `h` is the rise of lambda = log(alpha / sigma), infinite if the step starts without data or ends without noise;
    exp(-h) and expm1(-h) are finite always.
    """

    alpha: Float[Array, ""]
    sigma: Float[Array, ""]
    next_alpha: Float[Array, ""]
    next_sigma: Float[Array, ""]
    h: Float[Array, ""]


class Solver(Protocol):
    """What `sample` needs of a solver; implementations are frozen dataclasses, static under jit."""

    @property
    def stochastic(self) -> bool:
        """Whether `step` needs noise."""
        ...

    def init(self, x: Float[Array, "batch ..."]) -> SolverState:
        """The state before the first step, for samples like `x` (float32)."""
        ...

    def step(
        self,
        state: SolverState,
        x: Float[Array, "batch ..."],
        x0: Float[Array, "batch ..."],
        eps: Float[Array, "batch ..."],
        step: Step,
        noise: Float[Array, "batch ..."] | None,
    ) -> tuple[SolverState, Float[Array, "batch ..."]]:
        """One step.

        Args:
            state: from `init` or the step before.
            x: the sample at (alpha, sigma), float32.
            x0: the denoiser's estimate of the data.
            eps: its estimate of the noise; alpha x0 + sigma eps = x.
            step: the levels.
            noise: standard normal, None if the solver is not stochastic.

        Returns:
            The new state, and the sample at (next_alpha, next_sigma).
        """
        ...
