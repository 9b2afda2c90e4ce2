"""The first value that is not finite is named by the module that made it, in the order of the two passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.train.bad_tensor import Watched, first_bad_tensor
from tests.train.conftest import Subject, make_subject


def _first(fn: Callable[..., Any], *args: Any) -> str | None:
    watched = Watched(fn, *args)
    outputs, flags = jax.jit(watched)(*args)
    for got, wanted in zip(jax.tree.leaves(outputs), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    return watched.first(jax.device_get(flags))


def _net(x: Any) -> Any:
    """Two modules, of which the second divides by what the first makes."""
    with jax.named_scope("net"):
        with jax.named_scope("first"):
            y = jnp.log(x)
        with jax.named_scope("second"):
            return jnp.sum(1 / y)


def test_the_module_that_makes_it_is_named() -> None:
    assert _first(_net, jnp.array([2.0, 3.0])) is None
    assert _first(_net, jnp.array([2.0, 1.0])) == "activation net/second"
    assert _first(_net, jnp.array([2.0, -1.0])) == "activation net/first"
    # A mask's -inf is meant; its +inf or NaN is not.
    assert _first(_net, jnp.array([2.0, 0.0])) is None


def test_a_gradient_is_named_where_it_arises() -> None:
    def fn(x: Any) -> Any:
        with jax.named_scope("root"):
            y = jnp.sqrt(x)
        with jax.named_scope("after"):
            return jnp.sum(y * 2)

    found = _first(jax.grad(fn), jnp.array([0.0, 1.0]))
    assert found is not None and found.startswith("gradient that leaves") and found.endswith("root")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_layer_of_a_stack_is_named_by_its_number(reverse: bool) -> None:
    def fn(x: Any, scales: Any) -> Any:
        def turn(x: Any, scale: Any) -> tuple[Any, Any]:
            with jax.named_scope("block"):
                with jax.named_scope("a"):
                    y = x * scale
                with jax.named_scope("b"):
                    return y + 1, jnp.sum(y)

        with jax.named_scope("net"):
            return jax.lax.scan(turn, x, scales, reverse=reverse)

    # Layers 1 and 3 overflow: the first in the order of the loop is meant.
    scales = jnp.array([1.0, 1e30, 1.0, 1e30, 1.0])
    found = _first(fn, jnp.full((3,), 1e20), scales)
    assert found == f"activation net/block/a (layer {3 if reverse else 1} of its stack)"
    assert _first(fn, jnp.ones((3,)), jnp.ones((5,))) is None


def test_calls_and_recomputation_are_looked_into() -> None:
    @jax.custom_jvp
    def inverse(x: Any) -> Any:
        return 1 / x

    inverse.defjvp(lambda x, dx: (inverse(*x), -dx[0] / x[0] ** 2))

    def block(x: Any) -> Any:
        with jax.named_scope("in"):
            y = jax.jit(jnp.sin)(x)
        with jax.named_scope("out"):
            return inverse(y)

    def fn(x: Any) -> Any:
        with jax.named_scope("net"):
            return jnp.sum(jax.checkpoint(block)(x))

    assert _first(fn, jnp.array([0.0, 1.0])) == "activation net/out"
    found = _first(jax.grad(fn), jnp.array([0.0, 1.0]))
    assert found is not None and found.startswith("activation net")


@pytest.fixture(scope="module")
def subject(one_device: Mesh) -> Subject:
    return make_subject(one_device)


def test_states_and_batches_are_looked_at_first(subject: Subject) -> None:
    state, examples = subject.start(), subject.feed(subject.batches[0])
    images = np.array(examples.images)
    images[[2, 5], 0, 0, 0] = (np.nan, np.inf)
    broken = dataclasses.replace(examples, images=jnp.asarray(images))
    found = first_bad_tensor(subject.objective, state, broken)
    assert (found.name, found.kind, found.rows) == ("batch images", "batch", (2, 5))
    moments = jax.tree.map(lambda leaf: leaf * jnp.nan if leaf.dtype == jnp.float32 else leaf, state.opt_state)
    found = first_bad_tensor(subject.objective, state.replace(opt_state=moments), broken)  # type: ignore[attr-defined]
    assert found.kind == "state" and found.name.startswith("optimizer state ") and "(the first of " in found.name
    params = jax.tree.map(lambda leaf: leaf, state.params)
    params["unet"]["conv_in"]["bias"] = params["unet"]["conv_in"]["bias"].at[0].set(jnp.nan)
    found = first_bad_tensor(subject.objective, state.replace(params=params, opt_state=moments), broken)  # type: ignore[attr-defined]
    assert found.name == "parameter unet/conv_in/bias"


def test_a_sample_of_the_second_part_is_found(subject: Subject) -> None:
    """Of two parts, the second has the odd rows; the picture is finite, and what the network makes of it is not."""
    state, examples = subject.start(), subject.feed(subject.batches[0])
    images = np.array(examples.images)
    images[3] *= np.float32(1e38)
    spoilt = dataclasses.replace(examples, images=jnp.asarray(images))
    whole, halves = (first_bad_tensor(subject.objective, state, spoilt, parts=parts) for parts in (1, 2))
    assert halves.name.startswith("activation unet/") and halves.kind == "activation"
    assert halves.rows == (3,) and halves.gradients
    assert halves == whole
