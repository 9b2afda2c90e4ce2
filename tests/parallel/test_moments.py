"""An optimizer's arrays are laid out as their weights, Adafactor's lack the dimension that optax averages; scales of a
stored weight are cut as it is, as far as they divide."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.parallel.moments import moment_sharding, part_sharding

AXES = ("a", "b", "c")


@pytest.fixture(scope="module")
def mesh(devices) -> Mesh:
    return Mesh(devices.reshape(2, 2, 2), AXES)


def test_an_array_of_the_weight_lies_as_the_weight(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("a", None))
    assert moment_sharding("mu", (4, 6), weight=(4, 6), sharding=sharding) is sharding
    assert moment_sharding("v", (1,), weight=(4, 6), sharding=sharding) is None
    assert moment_sharding("mu", (4,), weight=(4, 6), sharding=sharding) is None


@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 4), (2, 8, 8), (8, 8, 2), (8, 8, 8), (6, 4, 2)])
def test_rows_and_columns_keep_the_axes_of_what_is_left(shape: tuple[int, ...], mesh: Mesh) -> None:
    """What optax averages is seen in the numbers: a gradient that varies along one dimension alone."""
    rule = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    sharding = NamedSharding(mesh, P(*AXES[: len(shape)]))
    weight = jnp.zeros(shape)
    state = rule.init(weight)
    for field in ("v_row", "v_col"):
        wanted = []
        for dim in range(len(shape)):
            ramp = 1 + jnp.arange(shape[dim], dtype=jnp.float32).reshape(
                *(-1 if at == dim else 1 for at in range(len(shape)))
            )
            moments = getattr(rule.update(jnp.broadcast_to(ramp, shape), state, weight)[1], field)
            if np.ptp(moments) > 0:  # this dimension was not averaged
                wanted.append(AXES[dim])
        found = moment_sharding(field, moments.shape, weight=shape, sharding=sharding)
        assert found is not None and list(found.spec) == wanted


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 1, 6), P("a", None, "c")),
        ((8, 6, 6), P("a", "b", "c")),
        ((1, 3, 6), P(None, None, "c")),
        ((4, 6, 3), P("a", "b", None)),
    ],
)
def test_a_part_of_a_weight_is_cut_as_the_weight_where_it_divides(shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    sharding = part_sharding(shape, (8, 12, 6), NamedSharding(mesh, P("a", "b", "c")))
    assert sharding is not None and sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    both = part_sharding((2,), (8,), NamedSharding(mesh, P(("a", "b"))))
    assert both is not None and both.is_equivalent_to(NamedSharding(mesh, P("a")), 1)
    assert part_sharding(shape, (8, 12, 6), None) is None
