"""Kernels say every cast: dtypes that would mix silently are errors here."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
