"""Parts of a batch add up to the batch, no row moves, and sums cross the devices once where nothing is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.log import say_once
from maxdiffusion.parallel.accumulate import accumulate
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.tools.traffic import traffic

BATCH, WIDTH = 16, 8


def _gradient(params, part, scale):
    def total(params):
        losses = jnp.sum(jnp.square(jnp.tanh(part["x"] @ params["w"]) - part["x"]), axis=1)
        return scale * jnp.sum(losses * part["weight"]), losses

    (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(params)
    return gradients, losses


@pytest.mark.parametrize(
    ("sizes", "parts", "stored", "rows"),
    [
        ({"data": 8}, 2, P(), "data"),
        ({"data": 4, "tensor": 2}, 4, P(None, "tensor"), "data"),
        ({"data": 2, "fsdp": 4}, 2, P("fsdp"), ("data", "fsdp")),
        ({"fsdp": 8}, 2, P("fsdp"), "fsdp"),
    ],
)
def test_parts_add_up_in_place(devices, sizes, parts, stored, rows, caplog) -> None:
    say_once.cache_clear()
    mesh = Mesh(devices.reshape(*sizes.values()), tuple(sizes))
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.normal(size=(WIDTH, WIDTH)), jnp.float32)}
    weight = np.ones(BATCH, np.float32)
    weight[[3, 5, 15]] = 0
    batch = {"x": jnp.asarray(random.normal(size=(BATCH, WIDTH)), jnp.float32), "weight": jnp.asarray(weight)}
    wanted, losses = _gradient(params, batch, 0.5)
    shardings = {"w": NamedSharding(mesh, stored)}
    by_row = {"x": NamedSharding(mesh, P(rows)), "weight": NamedSharding(mesh, P(rows))}

    def run(params, batch, scale):
        return accumulate(
            _gradient,
            params,
            batch,
            scale,
            parts=parts,
            layout=Layout.of(mesh),
            batch_shardings=by_row,
            param_shardings=shardings,
        )

    whole = NamedSharding(mesh, P())
    compiled = (
        jax.jit(run, in_shardings=(shardings, by_row, whole), out_shardings=(shardings, by_row["weight"]))
        .lower(params, batch, jnp.float32(0.5))
        .compile()
    )
    placed = jax.device_put((params, batch, jnp.float32(0.5)), (shardings, by_row, whole))
    sums, found = compiled(*placed)
    # Another order of a sum of sixteen terms: a few roundings.
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(sums["w"], wanted["w"], rtol=0, atol=2e-6 * np.abs(wanted["w"]).max())
    moved = traffic(compiled.as_text(), mesh)
    assert moved.count("all-to-all") == moved.count("collective-permute") == 0
    size = WIDTH * WIDTH * 4
    if "data" in sizes:
        stored_size = size // sizes.get("tensor", 1) // sizes.get("fsdp", 1)
        assert moved.table(above=0)[:1] and moved.bytes("all-reduce", ("data",)) == stored_size
        assert moved.count("all-reduce", ("data",)) == 1
    assert ("once a step along no axis" in caplog.text) is ("data" not in sizes)
    assert ("after each part along fsdp" in caplog.text) is ("fsdp" in sizes)
    if "fsdp" in sizes:
        sums_of_parts = moved.count("all-reduce", ("fsdp",)) + moved.count("reduce-scatter", ("fsdp",))
        assert sums_of_parts == parts


def test_weights_are_gathered_anew_for_each_part(devices) -> None:
    """Gathered once in front of the loop, all of them would lie in memory while it runs."""
    mesh, parts = Mesh(devices, ("fsdp",)), 2
    whole, stored = NamedSharding(mesh, P()), {"w": NamedSharding(mesh, P("fsdp"))}
    rows = {"x": NamedSharding(mesh, P("fsdp")), "weight": NamedSharding(mesh, P("fsdp"))}
    batch = {"x": jnp.ones((BATCH, WIDTH)), "weight": jnp.ones(BATCH)}

    def gathering(params, part, scale):
        return _gradient({"w": jax.lax.with_sharding_constraint(params["w"], whole)}, part, scale)

    def run(params, batch, scale):
        return accumulate(
            gathering,
            params,
            batch,
            scale,
            parts=parts,
            layout=Layout.of(mesh),
            batch_shardings=rows,
            param_shardings=stored,
        )

    jitted = jax.jit(run, in_shardings=(stored, rows, whole), out_shardings=(stored, rows["weight"]))
    compiled = jitted.lower({"w": jnp.ones((WIDTH, WIDTH))}, batch, jnp.float32(1)).compile()
    assert traffic(compiled.as_text(), mesh).count("all-gather", ("fsdp",)) == parts
