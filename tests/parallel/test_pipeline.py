"""Pipelines: every layer once and in order, one device's numbers and gradients, and moves between neighbours only."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.errors import LayoutWarning, UsageError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.pipeline import (
    applies,
    assignment,
    bubble_fraction,
    num_ticks,
    pipeline,
    plan,
    stage_axes,
)
from maxdiffusion.specs import PipelineSpec

# Microbatches and stages add float32 products and gradients in another order than one device; measured: 5e-7.
FORWARD, GRADIENT = 1e-6, 1e-5

WIDTH, HIDDEN = 4, 8
NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}


def layout_of(devices: np.ndarray, **sizes: int) -> Layout:
    mesh = Mesh(devices[: np.prod([*sizes.values()])].reshape(*sizes.values()), tuple(sizes))
    return Layout.of(mesh)


def run(fn: Any, *args: Any) -> tuple[Any, str]:
    """Result and compiled text, without the back end's optimisations, which change no number and no move."""
    compiled = jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled(*args), compiled.as_text()


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "expected"),
    [(4, 4, 1, 3 / 7), (2, 8, 1, 1 / 9), (4, 8, 2, 3 / 19), (4, 1, 1, 3 / 4), (1, 5, 1, 0), (4, 2, 2, 5 / 9)],
)
def test_bubble_is_the_idle_share(stages: int, microbatches: int, repeats: int, expected: float) -> None:
    """By hand: idle ticks of all; in the last case a round takes 4 ticks: 4 + 2 + 3 = 9, of which 4 are useful."""
    assert bubble_fraction(stages, microbatches, repeats) == pytest.approx(expected, abs=1e-12)


def test_bubble_refuses_no_microbatch() -> None:
    with pytest.raises(UsageError, match="microbatches=0"):
        bubble_fraction(2, 0)


def test_layers_are_assigned_in_order_and_evenly() -> None:
    assert assignment(6, 2).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    assert assignment(8, 2, 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert assignment(5, 4).tolist() == [[[0, 1]], [[2, -1]], [[3, -1]], [[4, -1]]]
    assert assignment(2, 4).tolist() == [[[0]], [[1]], [[-1]], [[-1]]]


@pytest.mark.parametrize("microbatches", range(1, 10))
def test_each_sample_meets_each_layer_once_in_order(microbatches: int, devices: np.ndarray) -> None:
    """Exact: a layer writes its number behind the digits of a sample, and adds what it reads of that sample."""
    circular = microbatches % 2 == 0
    layout = layout_of(devices, stage=4 if microbatches < 6 else 2)
    num_layers, batch = 4 + microbatches % 3, 9 if microbatches in (3, 9) else microbatches + 1
    spec = PipelineSpec(schedule="circular" if circular else "gpipe", microbatches=microbatches, repeats=None)
    wanted = plan(layout, spec, num_layers=num_layers, batch=batch, name=f"digits{microbatches}")

    def layer(digit: jax.Array, x: jax.Array, read: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        own, shared, number = read
        return x * 10 + digit + own * shared[0] * number

    own = jnp.arange(batch) * 10**7
    out, _ = run(
        lambda digits, own: pipeline(layer, digits, own, (own, jnp.ones(1, int), 1), plan=wanted, layout=layout).astype(
            jnp.int32
        ),
        jnp.arange(num_layers),
        own,
    )
    expected = own
    for digit in range(num_layers):
        expected = expected * 10 + digit + own
    np.testing.assert_array_equal(out, expected)
    assert wanted.ticks == num_ticks(wanted.stages, microbatches, wanted.repeats)


def test_gradients_of_microbatches_are_summed_in_float32(devices: np.ndarray) -> None:
    """Exact: each of 512 microbatches gives 1 in bfloat16, in which a sum of ones ends at 256."""
    layout, batch = layout_of(devices, stage=2), 512
    wanted = plan(layout, PipelineSpec(microbatches=batch), num_layers=2, batch=batch, name="ones")

    def total(weights: jax.Array) -> jax.Array:
        ones = jnp.ones((batch, 1), jnp.bfloat16)
        out = pipeline(lambda w, x, _: x * w.astype(x.dtype), weights, ones, None, plan=wanted, layout=layout)
        return out.astype(jnp.float32).sum()

    gradient, _ = run(jax.grad(total), jnp.ones((2, 1, 1)))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, batch)


def inputs_of(num_layers: int, batch: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(3), 5)
    params = {
        "up": 0.5 * jax.random.normal(keys[0], (num_layers, WIDTH, HIDDEN)),
        "down": 0.5 * jax.random.normal(keys[1], (num_layers, HIDDEN, WIDTH)),
    }
    x = jax.random.normal(keys[2], (batch, 3, WIDTH))
    return params, x, jax.random.normal(keys[3], (batch, HIDDEN)), jax.random.normal(keys[4], (1, 3, WIDTH))


def layer_of(layout: Layout) -> Any:
    """A layer of two streams with a gathered weight, a constraint and a `shard_map` of its own inside."""

    def layer(params: Any, x: dict[str, jax.Array], read: tuple[jax.Array, jax.Array, None]) -> dict[str, jax.Array]:
        condition, places, _ = read
        names = ("activation_batch", "activation_length", "activation_mlp")
        up, down = (layout.use(params[name], *NAMES[name][1:]) for name in ("up", "down"))
        h = jnp.einsum("blw,wh->blh", x["a"] + places, up, precision="highest")
        h = layout.constrain(jnp.tanh(h + condition[:, None]), *names)
        h = layout.local(jnp.sin, [names], names)(h)
        a = x["a"] + jnp.einsum("blh,hw->blw", h, down, precision="highest")
        return {"a": layout.constrain(a, *names[:2], "activation_embed"), "b": x["b"] - a}

    return layer


def loss(out: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(jnp.sin(out["a"])) + jnp.sum(jnp.square(out["b"]))


def looped(layout: Layout, params: Any, x: jax.Array, condition: jax.Array, places: jax.Array) -> tuple[Any, Any]:
    layer, read = layer_of(layout), (condition, places, None)
    out = jax.lax.scan(lambda h, one: (layer(one, h, read), None), {"a": x, "b": x}, params)[0]
    return loss(out), out


def moves(text: str, kind: str) -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", text))


def permuted(text: str) -> list[set[tuple[int, int]]]:
    found = re.findall(r" collective-permute(?:-start)?\(.*?source_target_pairs=\{(\{.*?\})\}", text)
    return [{tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(.*?)\}", pairs)} for pairs in found]


CASES = {
    "gpipe": ({"stage": 2}, 4, 8, PipelineSpec(microbatches=4)),
    "gpipe, uneven layers": ({"stage": 4}, 6, 6, PipelineSpec(microbatches=3)),
    "gpipe x data": ({"stage": 2, "data": 4}, 4, 8, PipelineSpec(microbatches=2)),
    "gpipe x tensor": ({"stage": 4, "tensor": 2}, 3, 5, PipelineSpec()),
    "circular": ({"stage": 4}, 8, 6, PipelineSpec(schedule="circular", microbatches=3)),
    "circular, uneven runs, copies": (
        {"stage": 2},
        6,
        5,
        PipelineSpec(schedule="circular", microbatches=4, repeats=2),
    ),
    "circular x fsdp x tensor": (
        {"stage": 2, "fsdp": 2, "tensor": 2},
        4,
        8,
        PipelineSpec(schedule="circular"),
    ),
}


@pytest.mark.filterwarnings("ignore:.*does not divide:maxdiffusion.errors.LayoutWarning")
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_moves(case: str, devices: np.ndarray) -> None:
    sizes, num_layers, batch, spec = CASES[case]
    layout = layout_of(devices, **sizes)
    args = inputs_of(num_layers, batch)
    single = jax.value_and_grad(lambda *args: looped(Layout(), *args), (0, 1, 2, 3), has_aux=True)
    ((_, expected), grads), _ = run(single, *args)
    wanted = plan(layout, spec, num_layers=num_layers, batch=batch, name=case)

    def piped(params: Any, x: jax.Array, condition: jax.Array, places: jax.Array) -> tuple[Any, Any]:
        streams, read = {"a": x, "b": x}, (condition, places, None)
        out = pipeline(layer_of(layout), params, streams, read, plan=wanted, layout=layout)
        return loss(out), out

    params = jax.device_put(args[0], layout.shardings(args[0], NAMES))
    ((_, out), ours), text = run(jax.value_and_grad(piped, (0, 1, 2, 3), has_aux=True), params, *args[1:])
    assert max(jax.tree.leaves(jax.tree.map(distance, out, expected))) <= FORWARD
    assert max(jax.tree.leaves(jax.tree.map(distance, ours, grads))) <= GRADIENT

    # One permute a direction for each of the two streams, to the next stage and back; the last one's next is the first
    # in a circular schedule only.
    width = layout.num_devices // wanted.stages
    last = wanted.stages if wanted.repeats > 1 else wanted.stages - 1
    ahead = {
        (stage * width + i, (stage + 1) % wanted.stages * width + i) for stage in range(last) for i in range(width)
    }
    back = {(target, source) for source, target in ahead}
    along = [pairs for pairs in permuted(text) if any(a // width != b // width for a, b in pairs)]
    assert along.count(ahead) == (4 if ahead == back else 2)
    assert len(along) == 4 and along.count(back) == along.count(ahead)
    # Weights: none moves in GPipe; a circular schedule sends each to where it is applied, and its gradient back.
    exchanged = wanted.repeats > 1 and num_layers % wanted.stages == 0
    assert (moves(text, "all-to-all") > 0) == exchanged
    if "fsdp" not in sizes:
        assert moves(text, "all-gather") == 0


def test_the_count_is_chosen_and_said_once(devices: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    layout = layout_of(devices, stage=2, data=4)
    for _ in range(2):
        chosen = plan(layout, PipelineSpec(), num_layers=4, batch=48, name="chosen")
    # 8 microbatches of 6 do not share out over 4 devices, 6 of 8 do.
    assert (chosen.microbatches, chosen.samples) == (6, 8)
    assert [record.message for record in caplog.records] == [chosen.reason]
    assert "bubble 14%" in chosen.reason and "pipeline_microbatches pins it" in chosen.reason


def test_a_wish_is_met_and_its_cost_said(devices: np.ndarray) -> None:
    layout = layout_of(devices, stage=4)
    few = plan(layout, PipelineSpec(microbatches=2), num_layers=4, batch=8, name="few")
    assert few.microbatches == 2 and "fewer than the 4 stages" in few.reason and "bubble 60%" in few.reason
    odd = plan(layout, PipelineSpec(microbatches=5), num_layers=4, batch=8, name="odd")
    assert (odd.microbatches, odd.samples) == (5, 2)
    assert "2 copies" in odd.reason and "4 or 8 microbatches need none" in odd.reason


def test_stages_that_cannot_work_are_told(devices: np.ndarray) -> None:
    layout = layout_of(devices, stage=2)
    assert applies(layout, num_layers=2, name="blocks")
    assert not applies(Layout(), num_layers=2, name="blocks")
    with pytest.warns(LayoutWarning, match="2 stages of mesh axis 'stage' repeat the same work: the stack 'blocks'"):
        assert not applies(layout, num_layers=1, name="blocks")
    with pytest.raises(UsageError, match="give it more layers"):
        applies(Layout.of(layout.mesh, strict=True), num_layers=1, name="blocks")


def test_an_axis_that_shards_activations_only_stores_layers(devices: np.ndarray) -> None:
    mesh = Mesh(devices, ("fsdp",))
    assert stage_axes(Layout.of(mesh, [("layers", "fsdp")])) == ()
    assert stage_axes(Layout.of(Mesh(devices, ("pipe",)), [("layers", "pipe")])) == ("pipe",)


def test_an_input_of_another_batch_is_refused(devices: np.ndarray) -> None:
    layout = layout_of(devices, stage=2)
    wanted = plan(layout, PipelineSpec(), num_layers=2, batch=4, name="refused")
    with pytest.raises(UsageError, match=r"shape \(3, 8\), but the batch is 4"):
        pipeline(lambda w, x, y: x, jnp.ones(2), jnp.ones((4, 2)), jnp.ones((3, 8)), plan=wanted, layout=layout)


def test_it_runs_outside_of_jit(devices: np.ndarray) -> None:
    layout = layout_of(devices, stage=2, data=2)
    wanted = plan(layout, PipelineSpec(), num_layers=2, batch=4, name="eager")

    def layer(weight: jax.Array, x: jax.Array, read: jax.Array) -> jax.Array:
        return layout.constrain(x * weight + read, "activation_batch", "activation_embed")

    x = jnp.arange(8.0).reshape(4, 2)
    out = pipeline(layer, jnp.array([2.0, 3.0]), x, x, plan=wanted, layout=layout)
    np.testing.assert_array_equal(out, 10 * x)
