"""Activation functions by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import jax
from jaxtyping import Array

from maxdiffusion.errors import UsageError, nearest

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "mish": jax.nn.mish,
        "relu": jax.nn.relu,
    }
)


def activation(name: str) -> Callable[[Array], Array]:
    """The function that a config calls `name`.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"act_fn='{name}' is unknown: {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
