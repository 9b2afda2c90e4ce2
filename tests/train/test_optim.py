"""The schedule counts optimizer steps; only kernels decay; every optimizer's state lies as its weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.train import optim
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.optim import learning_rate, optimizer
from tests.train.conftest import BATCH, losses_of, make_subject


def test_the_warm_up_is_a_straight_line_that_starts_above_zero() -> None:
    rate = learning_rate(TrainSection(steps=100, learning_rate=0.5, warmup_steps=4, schedule="constant"))
    np.testing.assert_allclose([rate(step) for step in range(6)], [0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rtol=1e-6)


def test_the_cosine_ends_at_zero_after_the_last_step() -> None:
    rate = learning_rate(TrainSection(steps=12, learning_rate=1.0, warmup_steps=2, schedule="cosine"))
    np.testing.assert_allclose(rate(2), 1.0, rtol=1e-6)
    np.testing.assert_allclose(rate(7), 0.5, rtol=1e-6)
    np.testing.assert_allclose(rate(11), 0.5 * (1 + np.cos(np.pi * 0.9)), rtol=1e-4)
    assert float(rate(12)) == pytest.approx(0.0, abs=1e-7)
    assert float(rate(11)) > 0


def test_the_fall_may_begin_late() -> None:
    rate = learning_rate(TrainSection(steps=12, learning_rate=1.0, warmup_steps=2, schedule="cosine", decay_steps=4))
    np.testing.assert_allclose([rate(step) for step in (2, 8)], [1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rate(10), 0.5, rtol=1e-6)
    assert float(rate(12)) == pytest.approx(0.0, abs=1e-7)


def test_no_warm_up_starts_at_the_full_rate() -> None:
    rate = learning_rate(TrainSection(steps=10, learning_rate=1.0, warmup_steps=0, schedule="constant"))
    assert float(rate(0)) == 1.0


def test_only_kernels_decay() -> None:
    params = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2, 2))}, "positions": jnp.ones((3, 2))}
    rule = optimizer(TrainSection(learning_rate=0.1, warmup_steps=0, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = rule.update(zero, rule.init(params), params)
    np.testing.assert_allclose(updates["layer"]["kernel"], np.full((2, 2), -0.05), rtol=1e-6)
    np.testing.assert_array_equal(updates["layer"]["bias"], np.zeros((2, 2)))
    np.testing.assert_array_equal(updates["positions"], np.zeros((3, 2)))


@pytest.mark.parametrize(("clip", "same"), [(1.0, True), (None, False)])
def test_gradients_are_clipped_by_their_global_norm(clip: float | None, same: bool) -> None:
    """Beyond the limit only the direction counts; AdamW's first step hides sizes, so two steps are made."""
    params = {"kernel": jnp.ones(2)}
    rule = optimizer(TrainSection(learning_rate=0.1, warmup_steps=0, weight_decay=0.0, grad_clip=clip))
    seen = []
    for second in (10.0, 100.0):
        state = rule.init(params)
        _, state = rule.update({"kernel": jnp.array([3.0, 4.0])}, state, params)
        updates, _ = rule.update({"kernel": jnp.array([second, 0.0])}, state, params)
        seen.append(np.asarray(updates["kernel"]))
    assert np.allclose(*seen, rtol=1e-5) is same


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_a_limit_of_gradients_may_come_and_go_and_change(name: str) -> None:
    """A checkpoint names states by their places, which are the same with a limit and without."""
    params = {"kernel": jnp.ones((2, 2))}
    states = [optimizer(TrainSection(optimizer=name, grad_clip=clip)).init(params) for clip in (1.0, 2.0, None)]
    places = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)] for state in states
    ]
    assert places[0] == places[1] == places[2]
    assert places[0] and all(place.startswith("[1]") for place in places[0])


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_the_decay_follows_the_schedule(name: str) -> None:
    """A zero gradient leaves the decay alone: the learning rate of the step times `weight_decay`, of kernels only."""
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    rule = optimizer(TrainSection(optimizer=name, learning_rate=0.1, warmup_steps=2, weight_decay=0.5))
    zero, state = jax.tree.map(jnp.zeros_like, params), rule.init(params)
    for rate in (0.05, 0.1):
        updates, state = rule.update(zero, state, params)
        np.testing.assert_allclose(updates["kernel"], np.full((2, 2), -0.5 * rate), rtol=1e-6)
        np.testing.assert_array_equal(updates["bias"], np.zeros(2))


def test_adafactor_has_the_learning_rate_of_its_step_and_keeps_rows_and_columns() -> None:
    """A gradient whose size is an outer product is what rows and columns hold exactly: its steps are its signs."""
    rows, columns = jnp.arange(1.0, 129.0), jnp.arange(1.0, 131.0)
    params = {"kernel": jnp.ones((128, 130))}
    signs = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (128, 130)), 1.0, -1.0)
    rule = optimizer(
        TrainSection(optimizer="adafactor", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, grad_clip=None)
    )
    state = rule.init(params)
    updates, state = rule.update({"kernel": signs * rows[:, None] * columns[None]}, state, params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * signs, rtol=1e-4)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 128 + 130 + 10


def test_adafactor_limits_each_layer_of_a_stack_as_if_it_were_alone() -> None:
    """The second gradient of one layer leaps, that of the other does not."""
    section = TrainSection(optimizer="adafactor", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, grad_clip=None)
    stack, layers = {"kernel": ("layers", "embed", "mlp")}, {"kernel_0": ("embed", "mlp"), "kernel_1": ("embed", "mlp")}

    def second(names: dict[str, Any], cut: Callable[[jax.Array], dict[str, jax.Array]]) -> np.ndarray:
        rule = optimizer(section, SimpleNamespace(abstract_params=lambda: (None, names)))  # type: ignore[arg-type]
        params = cut(jnp.ones((2, 3, 4)))
        gradient = jax.random.normal(jax.random.key(0), (2, 3, 4))
        _, state = rule.update(cut(gradient), rule.init(params), params)
        updates, _ = rule.update(cut(gradient * jnp.array([1.0, 50.0])[:, None, None]), state, params)
        return np.concatenate([np.asarray(leaf).reshape(-1, 3, 4) for leaf in updates.values()])

    together = second(stack, lambda leaf: {"kernel": leaf})
    alone = second(layers, lambda leaf: {"kernel_0": leaf[0], "kernel_1": leaf[1]})
    np.testing.assert_allclose(together, alone, rtol=1e-6)  # a mean of twelve numbers, summed in another order
    np.testing.assert_allclose(np.sqrt(np.square(together[1]).mean()), 0.1, rtol=1e-5)  # it was limited


NAMES = {
    "conv_in": {"kernel": (None, None, "conv_in", "conv_out"), "bias": ("conv_out",)},
    "conv1": {"kernel": (None, None, "conv_in", "conv_out")},
    "to_q": {"kernel": ("embed", "heads", "kv")},
    "to_out_0": {"kernel": ("heads", "kv", "embed")},
    "proj": {"kernel": ("layers", "embed", None, "mlp")},
    "block": {"proj_out": {"kernel": ("embed", "conv_out")}},
    "proj_out": {"kernel": ("embed", "conv_out")},
    "norm": {"scale": ("norm",)},
    "words": {"embedding": ("vocab", "embed")},
}
"""Logical names of every kind of weight."""

SHAPES = {
    ("conv1", "kernel"): ((3, 3, 4, 8), [(36, 8)]),
    ("to_q", "kernel"): ((16, 2, 4), [(16, 8)]),
    ("to_out_0", "kernel"): ((2, 4, 16), [(8, 16)]),
    ("proj", "kernel"): ((3, 8, 2, 12), [(8, 12)] * 6),
    ("block", "proj_out", "kernel"): ((8, 4), [(8, 4)]),
}
"""Shape of each hidden matrix, and the matrices it is made of."""


class _Named:
    """What Muon asks a model."""

    @staticmethod
    def abstract_params() -> tuple[None, Any]:
        return None, NAMES


def _weights() -> dict[str, Any]:
    """A weight of every kind."""
    random = np.random.default_rng(0)
    shapes = {("conv_in", "kernel"): (3, 3, 4, 8), ("conv_in", "bias"): (8,), ("proj_out", "kernel"): (8, 4)}
    shapes |= {("norm", "scale"): (8,), ("words", "embedding"): (9, 8)} | {
        at: shape for at, (shape, _) in SHAPES.items()
    }
    params: dict[str, Any] = {}
    for path, shape in shapes.items():
        inner = params
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = jnp.asarray(random.normal(size=shape), jnp.float32)
    return params


def test_muon_orthogonalises_each_hidden_matrix_and_nothing_else() -> None:
    params = _weights()
    section = TrainSection(optimizer="muon", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, grad_clip=None)
    rule = optimizer(section, _Named())  # type: ignore[arg-type]
    updates, _ = jax.jit(rule.update)(params, rule.init(params), params)
    found = {tuple(entry.key for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(updates)}
    assert len(found) == 10
    for path, update in found.items():
        if path not in SHAPES:
            # Adam's first step is the sign of the gradient, the learning rate long.
            np.testing.assert_allclose(np.abs(update), 0.1, rtol=1e-3)
            continue
        _, matrices = SHAPES[path]
        parts = np.asarray(update)
        parts = parts.transpose(0, 2, 1, 3) if path[0] == "proj" else parts
        for matrix, sides in zip(parts.reshape(len(matrices), *matrices[0]), matrices, strict=True):
            # Five iterations bring every singular value near 1 (Jordan et al. 2024: 0.7 to 1.2), times the length.
            values = np.linalg.svd(matrix, compute_uv=False) / (0.1 * 0.2 * np.sqrt(max(sides)))
            assert values.min() > 0.5 and values.max() < 1.3


def test_settings_without_a_use_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta2.*adafactor averages second moments by 1 - step"):
        TrainSection(optimizer="adafactor", beta2=0.9)
    with pytest.raises(ValueError, match=r"rounding.*float32 weights are not rounded"):
        TrainSection(rounding="nearest")


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_states_are_laid_out_as_weights_and_what_is_whole_is_said(
    name: str, fsdp_tensor: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optim, "FACTORED_FROM", 8)
    say_once.cache_clear()
    with caplog.at_level("WARNING"):
        shapes = make_subject(fsdp_tensor, TrainSection(batch_size=BATCH, optimizer=name)).shapes
    weights = {keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.params)}
    factored = whole = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.opt_state):
        weight = next((weights[keys(path)[at:]] for at in range(len(path)) if keys(path)[at:] in weights), None)
        if weight is not None and leaf.shape == weight.shape:
            assert leaf.sharding.is_equivalent_to(weight.sharding, leaf.ndim)
        elif weight is not None and leaf.size > 1:
            factored += 1
            # Each dimension that is left is cut as it is in the weight.
            cut = [n // m for n, m in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True)]
            of_weight = [n // m for n, m in zip(weight.shape, weight.sharding.shard_shape(weight.shape), strict=True)]
            assert cut in [of_weight[:at] + of_weight[at + 1 :] for at in range(len(of_weight))]
            whole += leaf.sharding.is_fully_replicated and not weight.sharding.is_fully_replicated
    assert (factored > 0) is (name == "adafactor")
    assert ("are whole on every device" in caplog.text) is (whole > 0)


def keys(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_moves_weights_the_same_on_eight_devices(name: str, fsdp_tensor: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of rows, columns and products of matrices that are cut over devices; the others go by elements."""
    monkeypatch.setattr(optim, "FACTORED_FROM", 8)
    section = TrainSection(optimizer=name, learning_rate=1e-2, warmup_steps=0)
    rule, params = optimizer(section, _Named()), _weights()  # type: ignore[arg-type]

    @jax.jit
    def twice(params: Any) -> Any:
        new, state = params, rule.init(params)
        for _ in range(2):
            updates, state = rule.update(jax.tree.map(jnp.sin, new), state, new)
            new = optax.apply_updates(new, updates)
        return jax.tree.map(lambda new, old: new - old, new, params)

    with jax.default_matmul_precision("highest"):
        once = jax.device_get(twice(params))
        cut = jax.device_get(twice(jax.device_put(params, Layout.of(fsdp_tensor).shardings(params, NAMES))))
    difference = optax.tree.norm(jax.tree.map(lambda a, b: a - b, cut, once))
    # Sums in another order; each of Muon's five iterations stretches what is small by up to 3.4.
    assert difference < (1e-6 if name == "adafactor" else 1e-4) * optax.tree.norm(once)


def _losses(name: str, mesh: Mesh) -> np.ndarray:
    section = TrainSection(batch_size=BATCH, optimizer=name, learning_rate=1e-3, warmup_steps=2, ema_decay=0.0)
    return losses_of(make_subject(mesh, section), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon"])
def test_trains_the_same_on_any_mesh(
    name: str, devices: np.ndarray, one_device: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "FACTORED_FROM", 8)
    wanted = _losses(name, one_device)
    # Float32 sums in another order, over two steps of the optimizer.
    for shape, axes in (((8,), ("fsdp",)), ((4, 2), ("data", "tensor"))):
        np.testing.assert_allclose(_losses(name, Mesh(devices.reshape(shape), axes)), wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_states_are_saved_and_read_back(name: str, one_device: Mesh, tmp_path: Path) -> None:
    """Bit for bit, with the empty places that Muon's and AdamW's halves leave to one another."""
    subject = make_subject(one_device, TrainSection(batch_size=BATCH, optimizer=name))
    state = subject.start()
    state = state.replace(opt_state=jax.tree.map(lambda leaf: leaf + 1, state.opt_state))  # type: ignore[attr-defined]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.close()
    read = checkpoints.restore(0, subject.shapes)
    assert jax.tree.structure(read) == jax.tree.structure(state)
    for found, wanted in zip(jax.tree.leaves(read.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(found, wanted)
