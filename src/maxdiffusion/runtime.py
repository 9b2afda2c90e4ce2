"""How a model runs: the one value that every layer receives besides its own sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec, PipelineSpec, QuantSpec, RematSpec


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Frozen and hashable: a linen attribute and part of jit's cache key.

    Attributes:
        layout: where every array lives.
        dtype: dtype of activations and matrix products.
        weights_dtype: dtype that parameters are made and stored in.
        precision: precision of float32 matrix products (`default`, `high`, `highest`).
        attention: kernel and tiles.
        remat: what the backward pass recomputes.
        quant: quantisation.
        scan_layers: equal blocks are stacked and scanned.
        pipeline: schedule of stacked blocks where a mesh axis holds their stages.
    """

    layout: Layout = field(default_factory=Layout)
    dtype: Any = jnp.float32
    weights_dtype: Any = jnp.float32
    precision: jax.lax.Precision | None = None
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    remat: RematSpec = field(default_factory=RematSpec)
    quant: QuantSpec = field(default_factory=QuantSpec)
    scan_layers: bool = False
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
