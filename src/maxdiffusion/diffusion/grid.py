"""A grid is the sequence of times that a solver walks, from noise to data, with the noise level at each.

Made on the host in float64 and rounded once to float32; never in the dtype of the data (bfloat16 merges neighbours).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from maxdiffusion.diffusion.process import FlowMatching, Process, VariancePreserving
from maxdiffusion.errors import UsageError, nearest

Spacing = Literal["leading", "linspace", "trailing", "karras", "exponential", "uniform"]
_RHO = 7.0  # Karras et al. 2022, equation 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """N steps between N + 1 times, strictly falling; a pytree, so that grids of one length share a compiled program.

    Args:
        t: process times, from the noisiest.
        alpha: factor of the data at `t`.
        sigma: factor of the noise at `t`.
        timestep: what the model is given at the start of each step.
        h: how much log(alpha / sigma) rises in each step, rounded from float64 (a difference taken in float32 would
            cancel); infinite for a step from alpha = 0 or to sigma = 0.
        index: number of each step, which names its noise; a part of a grid keeps the numbers of the whole.
        no_signal: whether the first step starts from alpha = 0 (static).
    """

    t: Float[np.ndarray | Array, " points"]
    alpha: Float[np.ndarray | Array, " points"]
    sigma: Float[np.ndarray | Array, " points"]
    timestep: Float[np.ndarray | Array, " steps"]
    h: Float[np.ndarray | Array, " steps"]
    index: Int[Array | np.ndarray, " steps"]
    no_signal: bool

    @property
    def num_steps(self) -> int:
        """Number of steps, which is the number of calls of the denoiser."""
        return self.h.shape[0]

    def part(self, start: int, stop: int | None = None) -> Grid:
        """Steps `start` .. `stop - 1` (to the end if None), for image to image or for running in pieces.

        Raises:
            UsageError: no step is left.
        """
        stop = self.num_steps if stop is None else stop
        if not 0 <= start < stop <= self.num_steps:
            raise UsageError(f"steps {start} .. {stop} of a grid of {self.num_steps}: keep at least one step")
        steps, points = slice(start, stop), slice(start, stop + 1)
        return Grid(
            t=self.t[points],
            alpha=self.alpha[points],
            sigma=self.sigma[points],
            timestep=self.timestep[steps],
            h=self.h[steps],
            index=self.index[steps],
            no_signal=self.no_signal and start == 0,
        )


jax.tree_util.register_dataclass(
    Grid,
    data_fields=[f.name for f in dataclasses.fields(Grid) if f.name != "no_signal"],
    meta_fields=["no_signal"],
)


def make_grid(
    process: Process,
    num_steps: int,
    spacing: Spacing,
    *,
    offset: int = 0,
    final: Literal["zero", "sigma_min"] = "zero",
) -> Grid:
    """The usual grids by name.

    For `VariancePreserving`, whole-numbered times (Lin et al. 2023, table 2):
    `leading` (multiples of num_steps // N, plus `offset`; Stable Diffusion 1.x and XL have offset 1), `linspace` (both
    ends included, rounded), `trailing` (from the last step down). By level of sigma / alpha between the first and the
    last trained step, with times that are not whole: `karras` (Karras et al. 2022, equation 5, rho 7), `exponential`
    (uniform in the logarithm).

    For `FlowMatching`: `uniform`, 1 .. 0 in equal steps and then shifted by the process.

    Args:
        process: gives the levels.
        num_steps: N, number of steps.
        spacing: one of the above.
        offset: added to `leading` times.
        final: where the last step ends: `zero`, clean data; or `sigma_min`, the level of the first trained step (time
            0, what `set_alpha_to_one=False` means in configurations of Stable Diffusion).

    Raises:
        UsageError: no step, more steps than distinct times, an unknown spacing, or one that the process does not have.
    """
    if spacing not in get_args(Spacing):
        raise UsageError(f"spacing {spacing!r}: {nearest(str(spacing), get_args(Spacing))}")
    if final not in ("zero", "sigma_min"):
        raise UsageError(f"final {final!r}: {nearest(str(final), ('zero', 'sigma_min'))}")
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise UsageError(f"num_steps={num_steps!r}: write a whole number of steps, 1 or more")
    if offset and spacing != "leading":
        raise UsageError(f"offset={offset} belongs to spacing 'leading': leave it out with '{spacing}'")
    if isinstance(process, FlowMatching):
        if spacing != "uniform" or final != "zero":
            raise UsageError(f"FlowMatching has no spacing {spacing!r} with final {final!r}: use 'uniform' with 'zero'")
        return grid_from_times(process, process.shifted(np.linspace(1, 0, num_steps + 1)))
    if not isinstance(process, VariancePreserving):
        raise UsageError(f"no named spacing for {type(process).__name__}: use grid_from_times")
    last = process.t_data if final == "zero" else process.t_min
    return grid_from_times(process, np.append(_discrete_times(process, num_steps, spacing, offset), last))


def grid_from_times(process: Process, times: np.ndarray) -> Grid:
    """The grid that walks given times.

    Args:
        process: gives the levels.
        times: at least two process times, strictly falling (see `maxdiffusion.diffusion.process` for their meaning).

    Raises:
        UsageError: fewer than two times, times out of range, or times that are not distinct in float32.
    """
    times = np.asarray(times, np.float64)
    if times.ndim != 1 or times.size < 2:
        raise UsageError(f"times of shape {times.shape}: a grid needs a list of two times or more")
    alpha, sigma = process.levels(times)
    with np.errstate(divide="ignore"):
        h = np.diff(np.log(alpha) - np.log(sigma))
    t = times.astype(np.float32)
    timestep = np.asarray(process.timestep(times), np.float64)[:-1].astype(np.float32)
    clash = np.flatnonzero(~((np.diff(t) < 0) & (h > 0)))
    if clash.size:
        first = int(clash[0])
        raise UsageError(
            f"{times.size - 1} steps: times {first} and {first + 1} of the grid "
            f"({times[first]:g}, {times[first + 1]:g}) do not fall strictly: "
            "use fewer steps, another spacing, or another end"
        )
    return Grid(
        t=t,
        alpha=alpha.astype(np.float32),
        sigma=sigma.astype(np.float32),
        timestep=timestep,
        h=h.astype(np.float32),
        index=np.arange(times.size - 1, dtype=np.int32),
        no_signal=bool(alpha[0] == 0),
    )


def _discrete_times(process: VariancePreserving, num_steps: int, spacing: Spacing, offset: int) -> np.ndarray:
    trained = process.num_steps
    if spacing == "uniform":
        raise UsageError("spacing 'uniform' belongs to FlowMatching: use 'leading', 'linspace' or 'trailing'")
    if num_steps > trained:
        raise UsageError(f"{num_steps} steps: the process has {trained}, ask for at most that many")
    if spacing == "leading":
        return (np.arange(num_steps) * (trained // num_steps) + float(offset))[::-1]
    if spacing == "linspace":
        return np.linspace(trained - 1, 0, num_steps).round()
    if spacing == "trailing":
        return (trained - np.arange(num_steps) * (trained / num_steps)).round() - 1
    alpha, sigma = process.levels(np.array([process.t_prior, process.t_min]))
    if alpha[0] == 0:
        raise UsageError(
            f"spacing {spacing!r} needs a finite sigma / alpha, and zero_terminal_snr has none: use 'trailing'"
        )
    high, low = sigma / alpha
    if spacing == "karras":
        ratio = np.linspace(high ** (1 / _RHO), low ** (1 / _RHO), num_steps) ** _RHO
    else:
        ratio = np.exp(np.linspace(np.log(high), np.log(low), num_steps))
    return process.time_at(ratio)
