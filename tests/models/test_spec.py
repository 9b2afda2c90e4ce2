"""A model's spec builds the model, with keywords before its config."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.models.registry import lookup


def test_keywords_come_before_the_config() -> None:
    spec = lookup("sd15")
    model = spec.build("tiny", dtype=jnp.bfloat16, in_channels=9)
    assert (model.in_channels, model.runtime.dtype) == (9, jnp.dtype(jnp.bfloat16))
    assert model.block_out_channels == spec.tiny["block_out_channels"]


def test_a_misspelt_keyword_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean"):
        lookup("sd15").build("tiny", in_chanels=9)
