"""A process mixes data and noise over time: x_t = alpha(t) x_0 + sigma(t) eps, eps ~ N(0, I).

Times. Each process has its own axis of continuous time, from `t_data` (alpha 1, sigma 0) up to `t_prior`:

- `VariancePreserving`: t is the index of the training step. Whole numbers 0 .. num_steps - 1 are the trained steps, and
  the model is given t itself as `timestep`. -1 is clean data. Between two whole numbers (alpha, sigma) turns uniformly
  on the unit circle; this agrees with interpolation in log sigma to second order, and stays finite at both ends.
- `FlowMatching`: t in [0, 1], and the model is given `timestep_scale * t` (1000 t) as `timestep`.

Schedules are made on the host in float64; on the device they are float32, whatever the dtype of the data.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.diffusion.broadcast import over_batch
from maxdiffusion.diffusion.prediction import Prediction, check_prediction
from maxdiffusion.errors import UsageError, nearest

BetaSchedule = Literal["scaled_linear", "linear", "squaredcos_cap_v2"]
Times = TypeVar("Times", np.ndarray, Array)


class Process(ABC):
    """What every process answers; hashable, so that it is a static argument of a jitted function."""

    @property
    @abstractmethod
    def t_data(self) -> float:
        """The time of clean data (alpha 1, sigma 0)."""

    @property
    @abstractmethod
    def t_min(self) -> float:
        """The smallest time at which a model is trained."""

    @property
    @abstractmethod
    def t_prior(self) -> float:
        """The time of the most noise."""

    @property
    def prior_std(self) -> float:
        """Standard deviation of the Gaussian from which sampling starts."""
        return 1.0

    @abstractmethod
    def levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, sigma) at the times `t`, on the host in float64.

        Raises:
            UsageError: a time outside [t_data, t_prior].
        """

    @abstractmethod
    def time_at(self, ratio: np.ndarray) -> np.ndarray:
        """The times at which sigma / alpha is `ratio`, on the host in float64: the inverse of `levels`."""

    @abstractmethod
    def alpha_sigma(self, t: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """(alpha, sigma) at the times `t`, on the device in float32; times beyond the ends count as the ends.

        Raises:
            UsageError: times in half precision, which merges neighbours (999 becomes 1000).
        """

    @abstractmethod
    def timestep(self, t: Times) -> Times:
        """What a model is given at time `t`."""

    @abstractmethod
    def training_time(self, u: Float[Array, " batch"]) -> Float[Array, " batch"]:
        """The times of training for numbers `u` in [0, 1); uniform numbers give the process's own distribution."""

    def alpha(self, t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The factor of the data at the times `t`, float32."""
        return self.alpha_sigma(t)[0]

    def sigma(self, t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The factor of the noise at the times `t`, float32."""
        return self.alpha_sigma(t)[1]

    def add_noise(
        self, x0: Float[Array, "batch ..."], noise: Float[Array, "batch ..."], t: Float[Array, "..."]
    ) -> Float[Array, "batch ..."]:
        """x_t = alpha(t) x0 + sigma(t) noise, computed in float32.

        Args:
            x0: clean data.
            noise: standard normal, the shape of `x0`.
            t: times, shape (batch,) or a scalar.

        Returns:
            The shape and dtype of `x0`.
        """
        alpha, sigma = self.alpha_sigma(jnp.asarray(t))
        mixed = over_batch(alpha, x0) * x0.astype(jnp.float32) + over_batch(sigma, x0) * noise.astype(jnp.float32)
        return mixed.astype(x0.dtype)

    def check(self, prediction: Prediction) -> None:
        """Refuse a prediction type from which nothing can be sampled.

        Raises:
            UsageError: no such prediction type, or `epsilon` where alpha(t_prior) is 0: the noise alone says nothing
                of x_0 there (Lin et al. 2023, section 3.3).
        """
        check_prediction(prediction)
        if prediction == "epsilon" and self.levels(np.array(self.t_prior))[0] == 0:
            raise UsageError(
                f"prediction 'epsilon' does not determine the data where {type(self).__name__} has alpha = 0 "
                f"(t = {self.t_prior:g}): use 'v_prediction', 'velocity' or 'sample'"
            )


@dataclass(frozen=True, kw_only=True)
class VariancePreserving(Process):
    """The discrete process of DDPM and Stable Diffusion: alpha^2 = prod(1 - beta), sigma^2 = 1 - alpha^2.

    Args:
        schedule: `scaled_linear` (linear in sqrt(beta), Rombach et al. 2022), `linear` (Ho et al. 2020) or
            `squaredcos_cap_v2` (Nichol & Dhariwal 2021, equation 17; betas at most 0.999; beta_start and beta_end are
            not used).
        beta_start: beta of step 0; the default is Stable Diffusion's.
        beta_end: beta of the last step.
        num_steps: number of trained steps.
        zero_terminal_snr: rescale sqrt(prod(1 - beta)) so that the last step has no data at all (Lin et al. 2023,
            algorithm 1); `epsilon` prediction is then refused.

    Raises:
        UsageError: an unknown schedule, or betas that are not 0 < beta_start <= beta_end < 1.
    """

    schedule: BetaSchedule = "scaled_linear"
    beta_start: float = 0.00085
    beta_end: float = 0.012
    num_steps: int = 1000
    zero_terminal_snr: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in get_args(BetaSchedule):
            raise UsageError(f"beta schedule {self.schedule!r}: {nearest(str(self.schedule), get_args(BetaSchedule))}")
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise UsageError(f"betas {self.beta_start:g} .. {self.beta_end:g}: write 0 < beta_start <= beta_end < 1")
        if self.num_steps < 2:
            raise UsageError(f"num_steps={self.num_steps}: a discrete process needs 2 steps or more")

    @property
    def t_data(self) -> float:
        return -1.0

    @property
    def t_min(self) -> float:
        return 0.0

    @property
    def t_prior(self) -> float:
        return self.num_steps - 1.0

    def levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = _checked_times(self, t)
        position = t + 1
        index = np.floor(position).astype(np.int64)
        alpha, sigma, turn = (table[index] for table in _tables(self))
        angle = (position - index) * turn
        return alpha * np.cos(angle) - sigma * np.sin(angle), sigma * np.cos(angle) + alpha * np.sin(angle)

    def time_at(self, ratio: np.ndarray) -> np.ndarray:
        alpha, sigma, _ = _tables(self)
        return np.interp(np.arctan(ratio), np.arctan2(sigma, alpha), np.arange(-1.0, self.num_steps))

    def alpha_sigma(self, t: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        position = jnp.clip(_device_times(t) + 1, 0, self.num_steps)
        index = jnp.floor(position)
        row = index.astype(jnp.int32)
        alpha, sigma, turn = (jnp.asarray(table, jnp.float32)[row] for table in _tables(self))
        angle = (position - index) * turn
        return alpha * jnp.cos(angle) - sigma * jnp.sin(angle), sigma * jnp.cos(angle) + alpha * jnp.sin(angle)

    def timestep(self, t: Times) -> Times:
        return t

    def training_time(self, u: Float[Array, " batch"]) -> Float[Array, " batch"]:
        return jnp.clip(jnp.floor(u * self.num_steps), 0, self.num_steps - 1)


@dataclass(frozen=True, kw_only=True)
class FlowMatching(Process):
    """Rectified flow: alpha = 1 - t, sigma = t (Liu et al. 2022; Lipman et al. 2022).

    Args:
        shift: s of t -> s t / (1 + (s - 1) t) (Esser et al. 2024, equation 23), which moves uniform times of training
            and of sampling grids towards noise when s > 1; alpha and sigma as functions of t do not change.
        timestep_scale: the model is given `timestep_scale * t`.

    Raises:
        UsageError: shift or timestep_scale is not positive.
    """

    shift: float = 1.0
    timestep_scale: float = 1000.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.shift) and self.shift > 0):
            raise UsageError(f"shift={self.shift!r}: write a positive number (1 is no shift)")
        if not (math.isfinite(self.timestep_scale) and self.timestep_scale > 0):
            raise UsageError(f"timestep_scale={self.timestep_scale!r}: write a positive number (1000 is usual)")

    @property
    def t_data(self) -> float:
        return 0.0

    @property
    def t_min(self) -> float:
        return 0.0

    @property
    def t_prior(self) -> float:
        return 1.0

    def shifted(self, u: Times) -> Times:
        """The times for uniform times `u` in [0, 1]; the ends stay."""
        return self.shift * u / (1.0 + (self.shift - 1.0) * u)

    def levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = _checked_times(self, t)
        return 1 - t, t

    def time_at(self, ratio: np.ndarray) -> np.ndarray:
        return 1 - 1 / (1 + np.asarray(ratio, np.float64))

    def alpha_sigma(self, t: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        t = jnp.clip(_device_times(t), 0, 1)
        return 1 - t, t

    def timestep(self, t: Times) -> Times:
        return t * self.timestep_scale

    def training_time(self, u: Float[Array, " batch"]) -> Float[Array, " batch"]:
        return self.shifted(u)


def _checked_times(process: Process, t: np.ndarray) -> np.ndarray:
    t = np.asarray(t, np.float64)
    if not np.all((t >= process.t_data) & (t <= process.t_prior)):  # NaN is refused too
        raise UsageError(
            f"times {t.min():g} .. {t.max():g} leave the range of {type(process).__name__}, "
            f"{process.t_data:g} (data) .. {process.t_prior:g} (prior)"
        )
    return t


def _device_times(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    if jnp.issubdtype(t.dtype, jnp.floating) and jnp.finfo(t.dtype).bits < 32:
        raise UsageError(f"times in {t.dtype} merge neighbours: keep times in float32, whatever the dtype of the data")
    return t.astype(jnp.float32)


def _betas(process: VariancePreserving) -> np.ndarray:
    steps = process.num_steps
    if process.schedule == "linear":
        return np.linspace(process.beta_start, process.beta_end, steps)
    if process.schedule == "scaled_linear":
        return np.linspace(process.beta_start**0.5, process.beta_end**0.5, steps) ** 2
    alpha_bar = np.cos((np.linspace(0, 1, steps + 1) + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


@functools.lru_cache(maxsize=64)
def _tables(process: VariancePreserving) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64 (alpha, sigma, angle to the next row) of clean data and every trained step: num_steps + 1 rows."""
    alpha_bar = np.cumprod(1 - _betas(process))
    if process.zero_terminal_snr:
        root = np.sqrt(alpha_bar)
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    alpha_bar = np.concatenate([[1.0], alpha_bar])
    alpha, sigma = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)
    turn = np.append(np.diff(np.arctan2(sigma, alpha)), 0.0)
    for table in (alpha, sigma, turn):
        table.setflags(write=False)
    return alpha, sigma, turn
