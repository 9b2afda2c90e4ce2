"""Device meshes: from the sizes in a `MeshSpec` to a `jax.sharding.Mesh`, within a slice and across slices."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from maxdiffusion.errors import MeshError
from maxdiffusion.specs import MeshSpec

log = logging.getLogger(__name__)


def build_mesh(spec: MeshSpec | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the devices with the axes and sizes of `spec`; all axes are Auto.

    Axes across slices (`spec.dcn`) lie outside the axes within a slice, so that only they cross the slower network.
    Slices are the TPU slices of the devices; where there are none, the processes; in one process, equal runs of
    consecutive devices stand for slices, which is said once.

    Args:
        spec: sizes; None puts every device on the data axis.
        devices: devices to lay out; None takes all.

    Raises:
        MeshError: the sizes do not multiply to the number of devices, or the slices do not match `spec.dcn`.
    """
    spec = spec or MeshSpec()
    devices = list(jax.devices() if devices is None else devices)
    sizes = tuple(spec.shape(len(devices)).values())
    ici = tuple(size // outer for size, outer in zip(sizes, spec.dcn, strict=True))
    if math.prod(spec.dcn) > 1:
        grid = _hybrid(ici, spec.dcn, devices)
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices=devices)
    return Mesh(grid, spec.axes, axis_types=(AxisType.Auto,) * len(spec.axes))


def abstract_mesh(spec: MeshSpec, num_devices: int | None = None, *, platform: str | None = None) -> AbstractMesh:
    """The mesh of `spec` without devices: enough to say where arrays would live.

    Args:
        spec: sizes.
        num_devices: what the sizes must multiply to; None takes any.
        platform: `cpu`, `gpu` or `tpu`, for the choice of kernels; None is that of this process.

    Raises:
        MeshError: the sizes do not multiply to `num_devices`.
    """
    shape = spec.shape(num_devices)
    device = None if platform is None else AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    types = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types, abstract_device=device)


def auto(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with Auto axes, which is what a `Layout` works on."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return mesh if mesh.axis_types == types else AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return mesh if mesh.axis_types == types else Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def written(mesh: Mesh | AbstractMesh) -> str:
    """`data=4,tensor=2`, as `--mesh` takes it; axes of size 1 are left out, but for one device's."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    rest = "data" if "data" in sizes else mesh.axis_names[0]
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or f"{rest}=1"


def describe(mesh: Mesh | AbstractMesh) -> str:
    """`data=4,tensor=2 (8 devices)`; axes of size 1 are left out."""
    return "one device" if mesh.size == 1 else f"{written(mesh)} ({mesh.size} devices)"


def _hybrid(ici: tuple[int, ...], dcn: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    wanted = math.prod(dcn)
    slices = _slices(devices)
    if len(slices) == 1:
        log.warning(
            "mesh: no slices found, %d runs of %d consecutive devices stand for them (dcn sizes of 1 turn this off)",
            wanted,
            len(devices) // wanted,
        )
        slices = [devices[i : i + len(devices) // wanted] for i in range(0, len(devices), len(devices) // wanted)]
    if len(slices) != wanted or len({len(part) for part in slices}) != 1:
        raise MeshError(
            f"mesh asks for {wanted} slices, but the devices lie in {len(slices)} of sizes "
            f"{sorted({len(part) for part in slices})}: make the dcn sizes multiply to {len(slices)}"
        )
    inner = [mesh_utils.create_device_mesh(ici, devices=part) for part in slices]
    blocks = np.stack(inner).reshape(*dcn, *ici)
    rank = len(ici)
    order = [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
    return blocks.transpose(order).reshape([outer * size for outer, size in zip(dcn, ici, strict=True)])


def _slices(devices: list[Any]) -> list[list[Any]]:
    """Devices by TPU slice; where the devices know of no slices, by process."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    return [groups[key] for key in sorted(groups)]
