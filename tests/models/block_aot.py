"""Compiles a block of FLUX.1 for absent accelerators: `python -m tests.models.block_aot TARGET FOLDER NAMES`.

A name is `STRATEGY:forward` or `STRATEGY:gradients`. The strategy is one of context parallelism over two of
four devices; the two others have a sample each. The compiled text goes into the folder as NAME.hlo.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.kernels.rope import Rotation
from maxdiffusion.models.flux_blocks import DoubleBlock, Streams
from maxdiffusion.models.registry import lookup
from tests.kernels.attention.aot import devices

TEXT, IMAGE, HEADS, DIM = 512, 4096, 4, 128
"""Tokens and head size of FLUX.1 at 1024 x 1024 pixels; its 24 heads would take compilers for TPUs a minute."""

_TOKENS = ("activation_batch", "activation_length", None)


def lower(name: str, chips: list[jax.Device]) -> jax.stages.Lowered:
    """A double block, and the gradients of its two streams and its parameters."""
    strategy, what = name.split(":")
    model = lookup("flux-dev").build(
        mesh=Mesh(np.array(chips).reshape(2, 2), ("data", "context")),
        attention_kernel="flash",
        context_attention=strategy,
        dtype="bfloat16",
    )
    layout, width = model.layout, HEADS * DIM

    def shape(size: tuple[int, ...], names: tuple[str | None, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=layout.sharding(*names, shape=size))

    streams = Streams(image=shape((2, IMAGE, width), _TOKENS), text=shape((2, TEXT, width), _TOKENS))
    cond = shape((2, width), ("activation_batch", None))
    turn = Rotation(*[shape((1, TEXT + IMAGE, DIM // 2), (None, *_TOKENS[1:]), jnp.float32)] * 2)
    block = DoubleBlock(num_heads=HEADS, runtime=model.runtime, parent=None)
    with layout.scope():
        params = nn.unbox(jax.eval_shape(lambda *args: block.init(jax.random.key(0), *args, None), streams, cond, turn))
    params = jax.tree.map(lambda leaf: shape(leaf.shape, (None,) * leaf.ndim, leaf.dtype), params)

    def forward(params: Any, streams: Streams, cond: jax.Array, turn: Rotation) -> Streams:
        return block.apply(params, streams, cond, turn, None)  # type: ignore[return-value]

    def loss(*args: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in forward(*args))  # type: ignore[return-value]

    run = forward if what == "forward" else jax.grad(loss, argnums=(0, 1))
    return jax.jit(run).lower(params, streams, cond, turn)


def main() -> None:
    target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    for name in names:
        (folder / f"{name}.hlo").write_text(lower(name, devices(target)).compile().as_text() or "")


if __name__ == "__main__":
    main()
