"""Denoisers and what belongs to them; one registry line a model."""

from maxdiffusion.models.flux import FlaxFluxTransformer2DModel, Transformer2DModelOutput
from maxdiffusion.models.unet import FlaxUNet2DConditionModel, UNet2DConditionOutput

__all__ = [
    "FlaxFluxTransformer2DModel",
    "FlaxUNet2DConditionModel",
    "Transformer2DModelOutput",
    "UNet2DConditionOutput",
]
