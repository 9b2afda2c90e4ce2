"""Convolutions in bands against the same convolution on one device: values, gradients, and what moves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import IndivisibleError
from maxdiffusion.kernels.halo import PICTURE, Window, convolution, padded_rows, plan_bands
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.tools.traffic import Traffic, traffic

# Float32 sums of up to 5 x 5 x 6 terms forward and 4 x 32 x 6 backward, in another order.
TOLERANCE = 1e-5

SAME, FIVE, ONE = Window(size=3, before=1, after=1), Window(size=5, before=2, after=2), Window(size=1)
HALVES, HALVES_AFTER = Window(size=3, stride=2, before=1, after=1), Window(size=3, stride=2, after=1)


def mesh_of(devices: np.ndarray, text: str) -> Mesh:
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    return Mesh(devices[: np.prod(list(sizes.values()))].reshape(*sizes.values()), tuple(sizes))


def arrays(height: int, size: int, features: int = 4, batch: int = 4) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(height), 3)
    x = jax.random.normal(keys[0], (batch, height, 6, 6))
    kernel = jax.random.normal(keys[1], (size, size, 6, features))
    return x, kernel, jax.random.normal(keys[2], (features,))


def run(window: Window, layout: Layout, *args: jax.Array) -> tuple[Any, Traffic | None]:
    """Result, gradients of feature map, kernel and bias, and what the program moves."""

    def loss(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = layout.constrain(x, *PICTURE)
        kernel = layout.use(kernel, None, None, "conv_in", "conv_out")
        y = convolution(x, kernel, rows=window, columns=window, layout=layout, precision=jax.lax.Precision.HIGHEST)
        y = layout.constrain(y + bias[None, None, None], *PICTURE)
        return jnp.sum(jnp.sin(y)), y

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(*args).compile()
    (_, y), grads = compiled(*args)
    moved = traffic(compiled.as_text() or "", layout.mesh) if isinstance(layout.mesh, Mesh) else None
    return (y, *grads), moved


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


RULES: dict[str, Any] = {
    "space=8": [("activation_height", "space")],
    "inner=2,outer=2": [("activation_height", ("outer", "inner"))],  # not the order of the mesh
}
CASES = [
    ("context=4", SAME, 16),
    ("context=4", HALVES, 16),
    ("context=4", HALVES_AFTER, 16),
    ("context=4", ONE, 8),
    ("context=8", FIVE, 8),  # bands of one row: two permutes a side
    ("context=8", HALVES, 8),  # the result has four rows: whole
    ("context=4", SAME, 7),  # whole
    ("data=2,context=2,tensor=2", SAME, 8),
    ("data=2,context=2,tensor=2", HALVES_AFTER, 8),
    ("fsdp=2,context=4", SAME, 8),
    ("cfg=2,context=4", HALVES, 8),
    ("space=8", SAME, 32),
    ("inner=2,outer=2", SAME, 8),
]


@pytest.mark.filterwarnings("ignore:.*does not divide:maxdiffusion.errors.LayoutWarning")
@pytest.mark.parametrize(("mesh", "window", "height"), CASES)
def test_values_and_gradients_are_those_of_one_device(
    mesh: str, window: Window, height: int, devices: np.ndarray
) -> None:
    args = arrays(height, window.size)
    expected, _ = run(window, Layout(), *args)
    layout = Layout.of(mesh_of(devices, mesh), RULES.get(mesh))
    found, _ = run(window, layout, *args)
    errors = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) <= TOLERANCE, errors


def test_only_border_rows_move(devices: np.ndarray) -> None:
    """Forward a permute a side, backward the same the other way; the gradient of the kernel is summed once."""
    layout = Layout.of(mesh_of(devices, "context=4"))
    _, moved = run(SAME, layout, *arrays(16, 3))
    assert moved is not None
    row = 4 * 6 * 4  # batch x width x bytes of float32, each channel
    assert moved.count("collective-permute") == 4
    assert moved.bytes("collective-permute") == 4 * row * 6
    assert moved.count("all-gather") == moved.count("all-to-all") == 0
    kernel, bias = 4 * 9 * 6 * 4, 4 * 4
    assert moved.bytes("all-reduce") == kernel + bias + 4  # and the loss
    _, halved = run(HALVES, layout, *arrays(16, 3))
    assert halved is not None and halved.bytes("collective-permute") == 2 * row * 6  # from above only


def test_a_height_that_does_not_divide_is_whole_and_strict_refuses_it(devices: np.ndarray) -> None:
    mesh = mesh_of(devices, "context=4")

    def plan(height: int, window: Window, *, strict: bool = False) -> Any:
        layout = Layout.of(mesh, strict=strict)
        return plan_bands((1, height, 8, 3), 3, rows=window, columns=window, layout=layout)

    assert plan(6, SAME).reason.startswith("whole: activation_height of 6 does not divide by context=4 (nearest sizes")
    odd = plan(7, HALVES)  # four rows of seven
    assert odd.axes == () and odd.reason.startswith("7 rows over context=4: whole, as 4 rows of the result")
    assert (plan(8, HALVES).above, plan(8, HALVES).below) == (1, 0)
    assert (plan(8, HALVES_AFTER).above, plan(8, HALVES_AFTER).below) == (0, 1)
    with pytest.raises(IndivisibleError, match="activation_height of 6"):
        plan(6, SAME, strict=True)


def test_an_axis_that_the_batch_cannot_use_cuts_rows(devices: np.ndarray) -> None:
    """The batch comes first for the axis; where it does not divide, the rows get it, and the convolution must know."""
    layout = Layout.of(mesh_of(devices, "context=4"), [("activation_batch", "context")])
    assert plan_bands((4, 8, 8, 3), 3, rows=SAME, columns=SAME, layout=layout).axes == ()
    assert plan_bands((2, 8, 8, 3), 3, rows=SAME, columns=SAME, layout=layout).axes == ("context",)


def test_without_a_rule_for_rows_nothing_is_said(devices: np.ndarray) -> None:
    layout = Layout.of(mesh_of(devices, "data=4,tensor=2"))
    assert plan_bands((4, 8, 8, 3), 3, rows=SAME, columns=SAME, layout=layout).reason == ""


@pytest.mark.parametrize(("window", "made"), [(SAME, 5), (HALVES, 3)])
def test_padding_counts_as_zeros(window: Window, made: int, devices: np.ndarray) -> None:
    """Five rows of eight: the result and the gradients of five rows alone, whatever the other three hold."""
    layout = Layout.of(mesh_of(devices, "context=4"))
    x, kernel, _ = arrays(8, 3)

    def values(x: jax.Array, layout: Layout, filled: int | None) -> Any:
        def loss(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = convolution(x, kernel, rows=window, columns=window, layout=layout, filled=filled)[:, :made]
            return jnp.sum(jnp.sin(y)), y

        (_, y), (dx, dk) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, kernel)
        return y, dx[:, :5], dk

    expected = values(x[:, :5], Layout(), None)
    for where in (layout, Layout(), Layout.of(mesh_of(devices, "context=8"))):
        errors = [distance(a, b) for a, b in zip(values(x, where, 5), expected, strict=True)]
        assert max(errors) <= TOLERANCE, errors


def test_rows_are_padded_where_that_saves_work(devices: np.ndarray) -> None:
    four, eight = (Layout.of(mesh_of(devices, f"context={size}")) for size in (4, 8))
    assert padded_rows(64, 4, eight) == 64  # 64, 32, 16 and 8 divide
    assert padded_rows(9, 2, four) == 16
    assert padded_rows(36, 3, eight) == 64  # of 36, 18 and 9 none divides
    assert padded_rows(5, 4, eight) == 5  # 64 rows, eight a device, would be more than all five
    assert padded_rows(9, 2, Layout()) == 9
    assert padded_rows(9, 2, Layout.of(mesh_of(devices, "data=8"))) == 9


def test_rows_are_padded_whatever_was_asked_inside_shard_map_before(devices: np.ndarray) -> None:
    """There, the rows of a device are all that it has; the answer is not kept for the same layout outside."""
    layout = Layout.of(mesh_of(devices, "context=4"))
    inside: list[int] = []

    def body(x: jax.Array) -> jax.Array:
        inside.append(padded_rows(11, 2, layout))
        return x

    assert isinstance(layout.mesh, Mesh)
    jax.eval_shape(jax.shard_map(body, mesh=layout.mesh, in_specs=P(), out_specs=P(), check_vma=False), jnp.zeros(4))
    assert inside == [11]
    assert padded_rows(11, 2, layout) == 16
