"""Activations by name."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.nn.activations import activation


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("silu", 1.5 / (1 + math.exp(-1.5))),
        ("swish", 1.5 / (1 + math.exp(-1.5))),
        ("gelu", 0.75 * (1 + math.erf(1.5 / math.sqrt(2)))),
        ("mish", 1.5 * math.tanh(math.log1p(math.exp(1.5)))),
        ("relu", 1.5),
    ],
)
def test_activation_is_its_formula(name: str, value: float) -> None:
    assert float(activation(name)(jnp.float32(1.5))) == pytest.approx(value, rel=1e-6)


def test_an_unknown_activation_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'silu'"):
        activation("sliu")
