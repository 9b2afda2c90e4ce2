"""A denoiser is a function; guidance, caching and the like map a denoiser to a denoiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from jaxtyping import Array, Float

Cond: TypeAlias = Any
"""A pytree of conditions (text embeddings, labels, ...), the batch first in each leaf; None for no condition."""

CacheState: TypeAlias = Any
"""A pytree that a denoiser carries from step to step; `()` when it carries nothing."""

Denoiser: TypeAlias = Callable[
    [CacheState, Float[Array, "batch ..."], Float[Array, " batch"], Cond],
    tuple[CacheState, Float[Array, "batch ..."]],
]
"""(cache, x, timestep, cond) -> (cache, prediction): `x` (batch, ...), `timestep` float32 (batch,) as
`Process.timestep` gives it, the prediction in the shape of `x` and of the type that the model was trained for."""
