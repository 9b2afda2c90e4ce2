"""Patch pipelining against a plain loop over steps, patches and layers; ticks, and what moves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.patches import At, Flow, bubble_fraction, num_ticks, rows, run
from maxdiffusion.tools.traffic import traffic

BATCH, LENGTH, WIDTH = 2, 3, 4
# float32 sums of a few terms in another order, through some ten layers of slope below 1.
TOLERANCE = 1e-6


def enter(shared: Any, x: Any, at: At) -> Any:
    return jnp.tanh(x) + shared["step"][at.step]


def leave(shared: Any, h: Any, x: Any, at: At) -> Any:
    return x + 0.3 * h * shared["patch"][at.patch]


def layer(shared: Any, weight: Any, kept: Any, h: Any, at: At) -> tuple[Any, Any]:
    """Reads the mean of what all patches left, its own anew."""
    fresh = jnp.tanh(h * weight)
    seen = jax.lax.dynamic_update_slice(kept, fresh[:, None], (0, at.patch, 0, 0))
    return h + jnp.mean(seen, axis=(1, 2), keepdims=True)[:, 0] + fresh, fresh


FLOW = Flow(enter=enter, lanes=(layer, layer), leave=leave)


def inputs(depths: tuple[int, ...], patches: int, steps: int) -> tuple[Any, Any, Any]:
    """Weights of each stack, x and what is shared."""
    keys = jax.random.split(jax.random.key(3), len(depths) + 3)
    weights = tuple(jax.random.normal(key, (depth, WIDTH)) for key, depth in zip(keys, depths, strict=False))
    weights = tuple(lane[:, None, None] for lane in weights)
    x = jax.random.normal(keys[-1], (patches, BATCH, LENGTH, WIDTH))
    shared = {"step": jax.random.normal(keys[-2], (steps,)), "patch": jax.random.normal(keys[-3], (patches,))}
    return weights, x, shared


def stores(layout: Layout, depths: tuple[int, ...], patches: int) -> Any:
    names = ("layers", "activation_batch", None, None, None)
    shapes = [(rows(layout, depth), BATCH, patches, LENGTH, WIDTH) for depth in depths]
    return tuple(layout.constrain(jnp.full(shape, 0.5), *names) for shape in shapes)


def loop(weights: Any, x: Any, shared: Any, steps: int) -> np.ndarray:
    """What patch pipelining means."""
    x = list(x)
    kept = [[jnp.full((BATCH, len(x), LENGTH, WIDTH), 0.5) for _ in lane] for lane in weights]
    for step in range(steps):
        for patch in range(len(x)):
            at = At(jnp.int32(step), jnp.int32(patch))
            h = enter(shared, x[patch], at)
            for lane, store in zip(weights, kept, strict=True):
                for index, weight in enumerate(lane):
                    h, fresh = layer(shared, weight, store[index], h, at)
                    store[index] = store[index].at[:, patch].set(fresh)
            x[patch] = leave(shared, h, x[patch], at)
    return np.stack(x)


@pytest.mark.parametrize(
    ("sizes", "depths", "patches"),
    [
        ({}, (2, 3), 3),
        ({"stage": 2}, (2, 4), 5),  # more patches than a round of both lanes takes
        ({"stage": 2, "data": 2}, (3, 2), 4),  # an uneven stack, as many patches as a round takes
        ({"stage": 4}, (4, 8), 2),  # fewer: stages wait
        ({"stage": 4}, (2, 4), 8),  # stages without a layer of the first stack
    ],
    ids=["alone", "many", "uneven x data", "few", "idle"],
)
def test_the_numbers_of_a_loop(
    sizes: dict[str, int], depths: tuple[int, int], patches: int, devices: np.ndarray
) -> None:
    mesh = Mesh(devices[: np.prod([*sizes.values()])].reshape(*sizes.values()), tuple(sizes)) if sizes else None
    layout, steps = Layout.of(mesh), 3
    weights, x, shared = inputs(depths, patches, steps)

    def call(weights: Any, x: Any) -> Any:
        x = layout.constrain(x, None, "activation_batch", None, None)
        return run(FLOW, weights, stores(layout, depths, patches), x, shared, steps=steps, layout=layout)

    compiled = jax.jit(call).lower(weights, x).compile()
    kept, out = compiled(weights, x)
    expected = loop(weights, x, shared, steps)
    assert np.abs(out - expected).max() <= TOLERANCE * np.abs(expected).max()
    if mesh is not None:
        assert {leaf.sharding.spec[0] for leaf in kept} == {"stage"}
        moved = traffic(compiled.as_text(), mesh)
        ticks = num_ticks(sizes["stage"], patches, steps, lanes=2)
        assert moved.count("collective-permute", ("stage",)) == ticks
        # One patch of both lanes a tick, on each shard of the batch.
        per_device = BATCH // sizes.get("data", 1) * LENGTH * WIDTH * 4
        assert moved.bytes("collective-permute", ("stage",)) == ticks * 2 * per_device
        assert {one.kind for one in moved.collectives} <= {"collective-permute", "all-reduce"}
        # Once a call, x from the first stage.
        assert moved.bytes("all-reduce") == patches * per_device


def test_ticks() -> None:
    """By hand: 2 stages, 2 lanes, a round of 4 ticks."""
    # 5 patches, 3 steps: 15 ticks of work, then 3 until the last patch has been through.
    assert num_ticks(2, 5, 3, lanes=2) == 18
    # 2 patches wait for 2 of 4 ticks in the first two steps.
    assert num_ticks(2, 2, 3, lanes=2) == 4 + 4 + 5
    assert num_ticks(1, 1, 1) == 1
    assert np.isclose(bubble_fraction(2, 5, 3, lanes=2), 3 / 18)
    # A pipeline that drained after each step would wait for 3 of 8 ticks.
    assert np.isclose(bubble_fraction(2, 5, 1, lanes=2), 3 / 8)
