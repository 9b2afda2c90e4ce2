"""Denoisers and what belongs to them; one registry line a model."""

from maxdiffusion.models.unet import FlaxUNet2DConditionModel, UNet2DConditionOutput

__all__ = ["FlaxUNet2DConditionModel", "UNet2DConditionOutput"]
