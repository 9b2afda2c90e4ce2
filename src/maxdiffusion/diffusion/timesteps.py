"""Training times are a function of (key, global sample index), as noise is, so they do not depend on the mesh.

A sampler draws numbers u in [0, 1), 0 towards the data; `Process.training_time` turns them into the process's times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from maxdiffusion.diffusion.noise import sample_keys, stream
from maxdiffusion.errors import UsageError, nearest

_BELOW_ONE = 1 - 2.0**-24
_GOLDEN = 2654435769  # 2^32 / golden ratio, rounded to odd: the steps of the most even additive sequence


class TimeSampler(Protocol):
    """Frozen and hashable, static under jit."""

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        """float32 numbers in [0, 1), one for each sample, from the streams of `key`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Uniform numbers.

    Args:
        draw: `independent`; or `stratified`: neighbours in `indices` are spread evenly (an additive sequence with the
            golden ratio, shifted at random in each step), which lowers the variance of the batch's mean loss.

    Raises:
        UsageError: another `draw`.
    """

    draw: Literal["independent", "stratified"] = "independent"

    def __post_init__(self) -> None:
        options = get_args(Literal["independent", "stratified"])
        if self.draw not in options:
            raise UsageError(f"draw {self.draw!r}: {nearest(str(self.draw), options)}")

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        key = stream(key, "time")
        if self.draw == "independent":
            return jax.vmap(lambda one: jax.random.uniform(one, (), jnp.float32))(sample_keys(key, indices, step=step))
        shift = jax.random.bits(jax.random.fold_in(key, step), (), jnp.uint32)
        word = indices.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + shift  # wraps modulo 2^32, as wanted
        return (word >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Equidistant:
    """The same time for all samples: 0, 1/8, ... 7/8 in steps 0 to 7, and so on anew; for measuring, not for training.

    MLPerf Training measures its text-to-image model (FLUX.1, since v5.1) by the mean validation loss at these times.

    Args:
        number: of times.

    Raises:
        UsageError: number is not positive.
    """

    number: int = 8

    def __post_init__(self) -> None:
        if self.number < 1:
            raise UsageError(f"Equidistant(number={self.number}): write 1 time or more")

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        del key
        return jnp.full(indices.shape, jnp.asarray(step % self.number, jnp.float32) / self.number)


@dataclass(frozen=True, kw_only=True)
class LogitNormal:
    """u = sigmoid(mean + std n) with n normal: most draws in the middle (Esser et al. 2024, section 3.1).

    Args:
        mean: of the normal; positive moves towards noise.
        std: of the normal.

    Raises:
        UsageError: std is not positive, or mean is not finite.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise UsageError(f"LogitNormal(mean={self.mean}, std={self.std}): write a finite mean and a positive std")

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        keys = sample_keys(stream(key, "time"), indices, step=step)
        normal = jax.vmap(lambda one: jax.random.normal(one, (), jnp.float32))(keys)
        return jnp.minimum(jax.nn.sigmoid(self.mean + self.std * normal), _BELOW_ONE)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """u = 1 - 1 / (tan(pi v / 2) + 1) with v uniform, called CosMap (Esser et al. 2024, section 3.1, equation 21).

    Its density 2 / (pi - 2 pi u + 2 pi u^2) is 2 / pi at both ends and 4 / pi in the middle.
    """

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        angle = Uniform()(key, indices, step=step) * (math.pi / 2)
        # The same as the formula, without its pole at the end.
        return jnp.minimum(jnp.sin(angle) / (jnp.sin(angle) + jnp.cos(angle)), _BELOW_ONE)


@dataclass(frozen=True, kw_only=True)
class Biased:
    """Uniform but for a part [begin, end), which is `multiplier` times as likely as the rest.

    Training scripts of the field call it `earlier` where the part is the times next to the data, `later` where it is
    those next to the noise, and `range` else.

    Args:
        begin: of the part, as a share of all times.
        end: of the part.
        multiplier: density in the part over density outside; below 1 makes it rarer.

    Raises:
        UsageError: the part is empty or leaves [0, 1], or the multiplier is not positive and finite.
    """

    begin: float = 0.25
    end: float = 0.75
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise UsageError(
                f"times from {self.begin} to {self.end} are no part of all times: write shares, 0 <= begin < end <= 1"
            )
        if not (math.isfinite(self.multiplier) and self.multiplier > 0):
            raise UsageError(
                f"timestep bias multiplier {self.multiplier}: write a number above 0 (1 is no bias; times outside of a "
                "part are left out by no sampler)"
            )

    def __call__(
        self, key: Key[Array, ""], indices: Int[Array, " batch"], *, step: int | Int[Array, ""] = 0
    ) -> Float[Array, " batch"]:
        width = self.end - self.begin
        whole = 1 + (self.multiplier - 1) * width
        v = Uniform()(key, indices, step=step) * whole  # the inverse of the distribution, a line in three pieces
        inside = self.begin + (v - self.begin) / self.multiplier
        behind = self.end + (v - self.begin - self.multiplier * width)
        u = jnp.where(v < self.begin, v, jnp.where(inside < self.end, inside, behind))
        return jnp.clip(u, 0.0, _BELOW_ONE)


TIME_SAMPLERS: dict[str, TimeSampler] = {
    "uniform": Uniform(),
    "stratified": Uniform(draw="stratified"),
    "logit_normal": LogitNormal(),
    "cosine": Cosine(),
    "earlier": Biased(begin=0.0, end=0.25),
    "later": Biased(begin=0.75, end=1.0),
    "range": Biased(),
}


def get_time_sampler(name: str) -> TimeSampler:
    """The time sampler of this name with its default settings.

    Raises:
        UsageError: no such sampler; the message has the nearest name.
    """
    if name not in TIME_SAMPLERS:
        raise UsageError(f"time sampler {name!r}: {nearest(str(name), TIME_SAMPLERS)}")
    return TIME_SAMPLERS[name]
