"""Copies that are none have other checksums; nothing but checksums leaves a device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.parallel.replicas import checksum, replica_checksums


def test_a_checksum_knows_bits_and_places() -> None:
    x = np.array([1.0, 2.0, -0.0], np.float32)
    weights = 2 * np.arange(3, dtype=np.uint32) + 1
    assert int(checksum(x)) == int((x.view(np.uint32) * weights).sum(dtype=np.uint32))
    others = (x[::-1].copy(), np.array([1.0, 2.0, 0.0], np.float32), np.nextafter(x, np.float32(9)))
    assert all(int(checksum(other)) != int(checksum(x)) for other in others)


def test_copies_that_differ_on_one_host_are_an_error(devices: np.ndarray) -> None:
    sharding = NamedSharding(Mesh(devices, ("all",)), P())
    parts = [jax.device_put(np.full(3, float(number == 5), np.float32), one) for number, one in enumerate(devices)]
    broken = jax.make_array_from_single_device_arrays((3,), sharding, parts)
    with pytest.raises(ValueError, match="copies of weight"):
        replica_checksums({"weight": broken})


def test_what_no_other_host_holds_is_not_compared(devices: np.ndarray) -> None:
    mesh = Mesh(devices.reshape(4, 2), ("data", "tensor"))
    tree = {
        "cut": jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("tensor"))),
        "whole": jax.device_put(np.ones((), np.float32), NamedSharding(mesh, P())),
    }
    assert replica_checksums(tree) == {}  # all of them are this host's
