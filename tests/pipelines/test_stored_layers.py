"""Checkpoints of unrolled models are read into scanned ones and the other way round, whatever the optimizer keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.errors import UsageError
from maxdiffusion.nn.stack import stack_params
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.train import optim
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.state import TrainState, state_shapes

LAYERS = 4
NAMES = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, "gain": {"scale": ("norm",)}}
SHAPES = {"dense": {"kernel": (8, 16), "bias": (16,)}, "gain": {"scale": (1,)}}


def _is_tuple(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def _model(mesh: Mesh, *, scanned: bool) -> Any:
    """What `state_shapes` and the optimizers ask: a stack of blocks, deep in the tree, beside a single weight."""
    if scanned:
        stacks = (
            {"blocks": jax.tree.map(lambda names: ("layers", *names), NAMES, is_leaf=_is_tuple)},
            {"blocks": jax.tree.map(lambda shape: (LAYERS, *shape), SHAPES, is_leaf=_is_tuple)},
        )
    else:
        stacks = tuple({f"blocks_{index}": tree for index in range(LAYERS)} for tree in (NAMES, SHAPES))
    last = ("embed", "mlp"), (8, 8)
    names, shapes = ({"text": stacks[at], "proj": {"kernel": last[at]}} for at in range(2))
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=_is_tuple)
    return SimpleNamespace(abstract_params=lambda: (shapes, names), layout=Layout.of(mesh))


def _state(section: TrainSection, model: Any, params: Any) -> tuple[TrainState, TrainState]:
    """The state after a step, and its shapes."""
    rule = optimizer(section, model)
    shapes = state_shapes(model, rule, keeps_ema=True)

    @jax.jit
    def step(params: Any) -> Any:
        updates, opt_state = rule.update(jax.tree.map(jnp.sin, params), rule.init(params), params)
        return jax.tree.map(jnp.add, params, updates), opt_state

    with jax.default_matmul_precision("highest"):
        new, opt_state = step(params)
    parts = {"params": new, "opt_state": opt_state, "ema": params}
    placed = {name: jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, getattr(shapes, name)))
              for name, tree in parts.items()}  # fmt: skip
    key = jax.device_put(jax.random.key(0), shapes.key.sharding)  # type: ignore[attr-defined]
    return TrainState(step=jnp.asarray(1, jnp.int32), key=key, **placed), shapes


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_a_state_is_read_into_the_other_form(
    name: str, scanned: bool, devices: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the optimizer keeps for a stack is what it keeps for its layers one by one: that is the oracle."""
    monkeypatch.setattr(optim, "FACTORED_FROM", 8)
    section = TrainSection(optimizer=name, learning_rate=0.1, warmup_steps=0)
    meshes = Mesh(devices[:2], ("fsdp",)), Mesh(devices.reshape(4, 2), ("stage", "fsdp"))
    draw = np.random.default_rng(0)
    plain = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32),
        _model(meshes[0], scanned=False).abstract_params()[0],
    )
    states = [
        _state(section, _model(mesh, scanned=stacked), stack_params(plain, "blocks") if stacked else plain)
        for stacked, mesh in enumerate(meshes)
    ]
    saved, (wanted, shapes) = states[not scanned][0], states[scanned]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved)
    checkpoints.close()
    read = checkpoints.restore(1, shapes)
    assert jax.tree.structure(read) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, read.ema, wanted.ema)
    for got, want, like in zip(*map(jax.tree.leaves, (read, wanted, shapes)), strict=True):
        assert got.sharding.is_equivalent_to(like.sharding, got.ndim)
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            # The gradient's norm is a sum in another order; Muon's five iterations stretch what is small.
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4 if name == "muon" else 1e-6)


def test_another_number_of_layers_is_refused(devices: np.ndarray, tmp_path: Path) -> None:
    mesh = Mesh(devices[:1], ("data",))
    plain = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), _model(mesh, scanned=False).abstract_params()[0])
    del plain["text"][f"blocks_{LAYERS - 1}"]
    state = TrainState(
        step=jnp.asarray(1, jnp.int32),
        params=plain,
        opt_state={"count": jnp.zeros(())},
        ema=None,
        key=jax.random.key(0),
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.close()
    shapes = state_shapes(_model(mesh, scanned=True), optimizer(TrainSection(optimizer="lion")), keeps_ema=False)
    with pytest.raises(UsageError, match=r"of another model: text/blocks_3/dense/bias is missing there"):
        checkpoints.restore(1, shapes)
