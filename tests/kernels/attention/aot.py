"""Compiles attention for accelerators that this machine lacks: `python -m tests.kernels.attention.aot TARGET FOLDER`.

Runs in a process of its own, so that the compilers of other platforms never meet the tests' eight CPU devices. Each
program's StableHLO and compiled text go into the folder as NAME.stablehlo and NAME.hlo. With the target `h100-cudnn`
jax is told that there is a cuDNN; only cuDNN itself could compile its calls, so that StableHLO is all there is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import Mesh

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec
from tests.aot import TOPOLOGIES

# What a compiler has to know of an H100 SXM: NVIDIA's data sheet and the limits of compute capability 9.0.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 52428800 memory_bandwidth: 3350000000000 device_memory_size: 85899345920
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""

PAGE = BlockSizes(block_q=128, block_k=128, block_b=1, block_q_dkv=128, block_k_dkv=128, block_k_dq=128, block_q_dq=128)

QKV = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Attention and its gradients, for two batch rows on four devices.

    Attributes:
        length: of the queries.
        keys: how many; None for as many.
        heads: number of heads.
        dim: size of a head.
        dtype: of queries, keys and values.
        masked: whether there is a mask of keys.
        blocks: tiles; None lets the kernel choose.
        mesh: sizes of the mesh axes.
        context: as `context_attention`.
    """

    length: int = 4608
    keys: int | None = None
    heads: int = 4
    dim: int = 64
    dtype: str = "bfloat16"
    masked: bool = False
    blocks: BlockSizes | None = None
    mesh: dict[str, int] = field(default_factory=lambda: {"data": 2, "tensor": 2})
    context: str = "auto"


_PARTS = {"data": 2, "context": 2}

PROGRAMS = {
    "image": Program(),
    "masked": Program(masked=True),
    "page-sizes": Program(dim=40, blocks=PAGE),
    "text": Program(length=333, keys=77, dim=80, dtype="float32", masked=True),
    "wide": Program(length=4992, dim=160, dtype="float32", masked=True),
    "three-heads": Program(length=512, heads=3),
    "video": Program(length=32_760, dim=128, masked=True),
    "ring": Program(dim=128, mesh=_PARTS, context="ring"),
    "ring-masked": Program(dim=128, masked=True, mesh=_PARTS, context="ring"),
    "ulysses": Program(dim=128, mesh=_PARTS, context="ulysses"),
    "ulysses-masked": Program(dim=128, masked=True, mesh=_PARTS, context="ulysses"),
    "hybrid-masked": Program(dim=128, masked=True, mesh={"context": 4}, context="hybrid"),
}


def devices(target: str) -> list[jax.Device]:
    """Four devices of the target, to compile for."""
    if target in TOPOLOGIES:
        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices
    return topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=H100).devices


def lower(name: str, chips: list[jax.Device]) -> jax.stages.Lowered:
    """The output and the gradients of one program, through the public entry."""
    program = PROGRAMS[name]
    layout = Layout.of(Mesh(np.array(chips).reshape(tuple(program.mesh.values())), tuple(program.mesh)))
    spec = AttentionSpec(
        kernel="flash", flash_min_seq_length=0, block_sizes=program.blocks, context=cast(Any, program.context)
    )

    def shape(num_tokens: int) -> jax.ShapeDtypeStruct:
        size = (2, num_tokens, program.heads, program.dim)
        return jax.ShapeDtypeStruct(size, program.dtype, sharding=layout.sharding(*QKV, shape=size))

    q, k = shape(program.length), shape(program.keys or program.length)
    mask = jax.ShapeDtypeStruct(k.shape[:2], jnp.bool_, sharding=layout.sharding("activation_batch", None))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, cotangent: jax.Array):
        out, pull = jax.vjp(partial(attention, mask=mask, spec=spec, layout=layout), q, k, v)
        return out, pull(cotangent)

    return jax.jit(run).lower(q, k, k, mask if program.masked else None, q)


def main() -> None:
    target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if target == "h100-cudnn":
        fused_attention_stablehlo.check_cudnn_version = lambda: 91_100
    for name in names:
        lowered = lower(name, devices(target))
        (folder / f"{name}.stablehlo").write_text(lowered.as_text())
        if target != "h100-cudnn":
            (folder / f"{name}.hlo").write_text(lowered.compile().as_text() or "")


if __name__ == "__main__":
    main()
