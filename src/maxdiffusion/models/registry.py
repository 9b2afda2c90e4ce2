"""The models by name: one line a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.models.flux import FLUX_DEV, FLUX_SCHNELL
from maxdiffusion.models.pictures import PICTURES
from maxdiffusion.models.spec import ModelSpec
from maxdiffusion.models.stable_diffusion import SD15, SD21, SDXL

_SPECS: tuple[ModelSpec, ...] = (
    PICTURES,
    SD15,
    SD21,
    SDXL,
    FLUX_DEV,
    FLUX_SCHNELL,
)

MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Every model, by the name that users write."""


def lookup(name: str) -> ModelSpec:
    """The model that users call `name`.

    Raises:
        UsageError: there is none, with the nearest name.
    """
    if name not in MODELS:
        raise UsageError(f"model '{name}' is unknown: {nearest(name, MODELS)}")
    return MODELS[name]
