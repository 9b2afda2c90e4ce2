"""Compiles quantised models for accelerators that this machine lacks: `python -m tests.nn.aot TARGET FOLDER NAMES`.

A name is `MODEL:MODE`, with `:gradients` for those of a mean square, with `:stored` for kernels that are stored
quantised. StableHLO and the compiled text go into the folder as NAME.stablehlo and NAME.hlo, the number of kernels that
the ledger calls quantised as NAME.quantised.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.models.registry import lookup
from tests.kernels.attention.aot import devices

_WIDE: dict[str, dict[str, Any]] = {
    # Channels that fill tiles of 128: compilers multiply smaller arrays without matrix units.
    "flux-dev": {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)},
    "sd15": {
        "block_out_channels": (128,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "norm_num_groups": 32,
    },
}


def main() -> None:
    target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    mesh = Mesh(np.array(devices(target)[:1]), ("data",))
    for name in names:
        model_name, mode, *words = name.split(":")
        spec = lookup(model_name)
        changes = dict.fromkeys(spec.depths, 1) | _WIDE[model_name]
        model = spec.build("tiny", mesh=mesh, dtype="bfloat16", quantization=mode, **changes)
        shapes, paths = model.abstract_params()
        params = _placed(shapes, model.layout.shardings(shapes, paths))
        if "stored" in words:
            stored = jax.eval_shape(model.quantize_weights, shapes)
            params = _placed(stored, jax.tree.map(lambda _, where=model.layout.replicated: where, stored))
        inputs = model.call_shapes(8, height=16, width=16, text=128)
        inputs = _placed(inputs, jax.tree.map(lambda leaf, rows=model.layout.rows: rows(leaf.shape[0]), inputs))

        def call(params: Any, inputs: Any, model: Any = model) -> jax.Array:
            return jnp.mean(jnp.square(jax.tree.leaves(model.apply({"params": params}, **inputs))[0]))

        lowered = jax.jit(jax.grad(call) if "gradients" in words else call).lower(params, inputs)
        (folder / f"{name}.stablehlo").write_text(lowered.as_text())
        (folder / f"{name}.hlo").write_text(lowered.compile().as_text() or "")
        done = sum(row.mode is not None for row in model.ledger())
        (folder / f"{name}.quantised").write_text(str(done))


def _placed(shapes: Any, shardings: Any) -> Any:
    def one(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


if __name__ == "__main__":
    main()
