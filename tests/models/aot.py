"""Compiles the gradients of models for TPUs that this machine lacks: `python -m tests.models.aot TARGET FOLDER NAMES`.

A name is `MODEL:scanned:POLICY` or `MODEL:unrolled:POLICY`, with `:NAMES` to save as well. The compiled text goes into
the folder as NAME.hlo, and the bytes of one chip's temporary memory, its own and that on its host, as NAME.memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from maxdiffusion.models.registry import lookup
from tests.aot import TPUS

NUM_LAYERS = {"unrolled": 2, "scanned": 16}
"""Of each stack; scanned ones are deep, so that what is kept for each layer outweighs what one layer needs."""

BATCH, HEIGHT = 8, {"flux-dev": 32, "sd15": 16}
"""Samples a chip, and the height of their latents: more than a chip's vector memory (128 MiB) takes, so that what is
kept shows in its main memory."""

_WIDE: dict[str, dict[str, Any]] = {
    # Channels that fill a TPU's tiles of 128, so that padding does not decide what a program holds.
    "flux-dev": {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)},
    "sd15": {
        "block_out_channels": (128,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "norm_num_groups": 32,
    },
}


def lower(name: str, devices: list[jax.Device]) -> jax.stages.Lowered:
    """The gradients of a mean square, on one chip."""
    model_name, form, policy, save, *_ = (*name.split(":"), "")
    spec = lookup(model_name)
    model = spec.build(
        "tiny",
        mesh=Mesh(np.array(devices), ("data",)),
        scan_layers=form == "scanned",
        remat_policy=policy,
        remat_save=save,
        **dict.fromkeys(spec.depths, NUM_LAYERS[form]),
        **_WIDE[model_name],
    )
    shapes, names = model.abstract_params()
    params = _placed(shapes, model.layout.shardings(shapes, names))
    inputs = model.call_shapes(BATCH * len(devices), height=HEIGHT[model_name], width=HEIGHT[model_name], text=128)
    inputs = _placed(inputs, jax.tree.map(lambda leaf: model.layout.rows(leaf.shape[0]), inputs))

    def loss(params: Any, inputs: Any) -> jax.Array:
        out = jax.tree.leaves(model.apply({"params": params}, **inputs))[0]
        return jnp.mean(jnp.square(out))

    return jax.jit(jax.grad(loss)).lower(params, inputs)


def _placed(shapes: Any, shardings: Any) -> Any:
    def one(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


def main() -> None:
    target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target]).devices
    for name in names:
        compiled = lower(name, devices).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        (folder / f"{name}.hlo").write_text(compiled.as_text() or "")
        sizes = {"device": memory.temp_size_in_bytes, "host": memory.host_temp_size_in_bytes}
        (folder / f"{name}.memory").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
