"""`ModelSpec` says what a model is: its class, its config and a tiny twin for tests and demos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from maxdiffusion.nn.model import DiffusionModel


class FromConfig(Protocol):
    """A model class that a config can be given to."""

    def from_config(self, config: Mapping[str, Any], **overrides: Any) -> DiffusionModel:
        """The model that the config describes."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model of the registry.

    Attributes:
        name: what users write.
        family: models of one family share their code.
        license: of the published weights, as an SPDX name or the name in the model card.
        denoiser: class of the network.
        config: the published `config.json`, as far as it says something.
        tiny: config of a twin of the same kind that compiles in seconds.
        depths: config keywords that say how many equal blocks are stacked.
    """

    name: str
    family: str
    license: str
    denoiser: FromConfig = field(hash=False)
    config: Mapping[str, Any] = field(hash=False)
    tiny: Mapping[str, Any] = field(hash=False)
    depths: tuple[str, ...]

    def build(self, size: Literal["full", "tiny"] = "full", **keywords: Any) -> DiffusionModel:
        """The denoiser, without weights.

        Args:
            size: the model itself, or its tiny twin.
            keywords: constructor keywords that come before the config (`mesh`, `dtype`, ...).

        Raises:
            UsageError: a keyword is unknown or its value cannot work.
        """
        return self.denoiser.from_config(self.tiny if size == "tiny" else self.config, **keywords)

    def depth(self, layers: int) -> dict[str, Any]:
        """Keywords of a tiny twin whose stacks are so many layers deep.

        Of a UNet's, only those of the last level on the way down and of the middle block are.
        With 8 layers in every stack it would have 40 of them, which multiply rounding beyond any limit, on any mesh.
        """
        if self.family != "unet":
            return dict.fromkeys(self.depths, layers)
        levels = len(self.tiny["block_out_channels"])
        up = {"reverse_transformer_layers_per_block": (1,) * levels}
        return dict.fromkeys(self.depths, (*(1,) * (levels - 1), layers)) | up
