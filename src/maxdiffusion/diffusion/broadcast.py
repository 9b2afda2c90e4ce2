"""One value per sample meets arrays of any rank without implicit rank promotion."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def over_batch(value: Float[Array, "..."], like: Float[Array, "batch ..."]) -> Float[Array, "..."]:
    """Shape a scalar or a value per sample so that it multiplies `like`.

    Args:
        value: a scalar, or shape (batch,).
        like: the array whose first dim is the batch.

    Returns:
        float32, a scalar or shape (batch, 1, ..., 1) with the rank of `like`.
    """
    value = jnp.asarray(value, jnp.float32)
    return value if value.ndim == 0 else value.reshape(value.shape + (1,) * (like.ndim - 1))
