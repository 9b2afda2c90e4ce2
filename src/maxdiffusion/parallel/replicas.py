"""Whether copies of an array are copies: a checksum of each device's part, computed where it lies, nothing gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32


def replica_checksums(tree: Any) -> dict[str, int]:
    """The checksums of this host's copies of what other hosts hold too, by leaf and part.

    Args:
        tree: arrays that all live on one mesh.

    Returns:
        `PATH[PART]` and a number of 32 bits; parts that no other host holds are left out, for there is nothing to
        compare them with.

    Raises:
        ValueError: copies on devices of this host differ.
    """
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    mesh = leaves[0].sharding.mesh
    sums = _sums(mesh, leaves)
    of_device = {shard.device: np.asarray(shard.data)[0] for shard in sums.addressable_shards}
    found: dict[str, int] = {}
    shared: set[str] = set()
    for number, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        places = leaf.sharding.devices_indices_map(leaf.shape)
        hosts: dict[str, set[int]] = {}
        for device, index in places.items():
            hosts.setdefault(_part(index, leaf.shape), set()).add(device.process_index)
        for device, column in of_device.items():
            part, value = _part(places[device], leaf.shape), int(column[number])
            name = f"{jax.tree_util.keystr(path, simple=True, separator='/')}[{part}]"
            if found.setdefault(name, value) != value:
                raise ValueError(f"copies of {name} differ between the devices of one host")
            if len(hosts[part]) > 1:
                shared.add(name)
    return {name: value for name, value in found.items() if name in shared}


def checksum(x: Array) -> UInt32[Array, ""]:
    """A sum of the bits of an array, each element with an odd weight of its place, modulo 2^32."""
    bits = jax.lax.bitcast_convert_type(x.reshape(-1), {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    return jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)


def _sums(mesh: Mesh, leaves: tuple[Array, ...]) -> UInt32[Array, "devices leaves"]:
    def local(*parts: Array) -> Array:
        return jnp.stack([checksum(part) for part in parts])[None]

    specs = tuple(leaf.sharding.spec for leaf in leaves)  # type: ignore[attr-defined]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False)
    return jax.jit(mapped)(*leaves)


def _part(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return ",".join(
        f"{low}:{high}" for low, high in (entry.indices(size)[:2] for entry, size in zip(index, shape, strict=True))
    )
