"""One step of FLUX.1's patch pipeline by itself, which only tests ask for: sampling overlaps its steps."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from maxdiffusion.models.flux import FlaxFluxTransformer2DModel
from maxdiffusion.models.flux_patches import Cond, Stores, cut_of, in_front, joined, patched_steps


def patched(
    model: FlaxFluxTransformer2DModel,
    params: Any,
    stores: Stores,
    x: Float[Array, "batch image channels"],
    timestep: Float[Array, " batch"],
    cond: Cond,
) -> tuple[Stores, Float[Array, "batch image channels"]]:
    """The velocity by one step of the patch pipeline, which fills and drains; arguments and result as `synchronous`.

    Each patch reads keys and values of this call for the patches before it and those of `stores` for the others.
    """
    cut = cut_of(model, x.shape[1], cond["encoder_hidden_states"].shape[1])
    by_patch = in_front(x, cut.patches, cut.image)
    stores, out = patched_steps(
        model, params, stores, by_patch, timestep[None], cond, lambda x, velocity, step: velocity
    )
    return stores, joined(out, x.shape[1])
