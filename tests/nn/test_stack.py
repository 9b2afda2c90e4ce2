"""Stacks: unrolled, scanned and rematerialised give one answer, values and gradients."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.parameters import parameter_names
from maxdiffusion.nn.stack import apply_stack, remat, stack_params, unstack_params
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import RematSpec

POLICIES = ("none", "minimal", "full")


class Block(nn.Module):
    runtime: Runtime

    @nn.compact
    def __call__(self, x: jax.Array, shift: jax.Array, nothing: None) -> jax.Array:
        dense = Dense(features=(x.shape[-1],), names=("embed", "mlp"), runtime=self.runtime, name="dense")
        return x + jnp.sin(jnp.cos(jnp.sin(jnp.cos(dense(x) + shift))))


class Model(nn.Module):
    runtime: Runtime

    @nn.compact
    def __call__(self, x: jax.Array, shift: jax.Array) -> jax.Array:
        return apply_stack(
            Block,
            x,
            shift,
            None,
            num_layers=3,
            name="blocks",
            runtime=self.runtime,
            attributes={"runtime": self.runtime},
        )


def runtime(policy: Any, scanned: bool) -> Runtime:
    return Runtime(precision=jax.lax.Precision.HIGHEST, remat=RematSpec(policy=policy), scan_layers=scanned)


X = jax.random.normal(jax.random.key(1), (2, 8))
SHIFT = jax.random.normal(jax.random.key(2), (2, 8))


def unrolled_params() -> dict:
    return nn.unbox(Model(runtime("none", False)).init(jax.random.key(0), X, SHIFT))["params"]


def loss(params: dict, shift: jax.Array, policy: str, scanned: bool) -> jax.Array:
    return jnp.sum(jnp.square(Model(runtime(policy, scanned)).apply({"params": params}, X, shift)))


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_are_the_same(policy: str, scanned: bool) -> None:
    params = unrolled_params()
    expected, (grads, shift_grad) = jax.value_and_grad(loss, (0, 1))(params, SHIFT, "none", False)
    given = stack_params(params, "blocks") if scanned else params
    value, (got, got_shift) = jax.value_and_grad(loss, (0, 1))(given, SHIFT, policy, scanned)
    got = unstack_params(got, "blocks") if scanned else got
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(got_shift, shift_grad, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, grads)


def test_scanned_parameters_are_stacked_and_named() -> None:
    boxed = Model(runtime("full", True)).init(jax.random.key(0), X, SHIFT)["params"]
    assert parameter_names(boxed)["blocks"]["dense"] == {
        "kernel": ("layers", "embed", "mlp"),
        "bias": ("layers", "mlp"),
    }
    kernel = nn.unbox(boxed)["blocks"]["dense"]["kernel"]
    assert kernel.shape == (3, 8, 8)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1


def test_stacking_and_unstacking_undo_each_other() -> None:
    params = {"outer": {f"blocks_{i}": {"kernel": jnp.full((2,), i)} for i in range(12)}, "blocks_tail": {"a": X}}
    params["outer"]["other"] = {"b": X}
    stacked = stack_params({"outer": params["outer"]}, "blocks")
    assert stacked["outer"]["blocks"]["kernel"][:, 0].tolist() == list(range(12))
    back = unstack_params(stacked, "blocks")
    assert jax.tree.structure(back) == jax.tree.structure({"outer": params["outer"]})
    jax.tree.map(np.testing.assert_array_equal, back, {"outer": params["outer"]})


class Pair(nn.Module):
    """Two streams that read one another, each block with a tree of further inputs."""

    runtime: Runtime

    @nn.compact
    def __call__(self, x: dict[str, jax.Array], shifts: tuple[jax.Array, None]) -> dict[str, jax.Array]:
        dense = Dense(features=(8,), names=("embed", "mlp"), runtime=self.runtime, name="dense")
        mixed = jnp.tanh(dense(x["a"][:, :8] + x["b"]) + shifts[0])
        return {"a": x["a"] + jnp.concatenate([mixed, mixed], axis=1), "b": x["b"] - mixed}


class Pairs(nn.Module):
    runtime: Runtime

    @nn.compact
    def __call__(self, x: dict[str, jax.Array], shift: jax.Array) -> dict[str, jax.Array]:
        attributes = {"runtime": self.runtime}
        return apply_stack(
            Pair, x, (shift, None), num_layers=3, name="blocks", runtime=self.runtime, attributes=attributes
        )


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_tree_is_handed_on_like_an_array(policy: str) -> None:
    x = {"a": jnp.concatenate([X, SHIFT], axis=1), "b": X}
    params = nn.unbox(Pairs(runtime("none", False)).init(jax.random.key(0), x, SHIFT))["params"]

    def loss(params: dict, policy: str, scanned: bool) -> jax.Array:
        out = Pairs(runtime(policy, scanned)).apply({"params": params}, x, SHIFT)
        return jnp.sum(jnp.square(out["a"])) + jnp.sum(out["b"])

    value, grads = jax.value_and_grad(loss)(params, "none", False)
    ours, our_grads = jax.value_and_grad(loss)(stack_params(params, "blocks"), policy, True)
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    # float32 sums of three blocks in another order
    near = jax.tree.map(
        lambda a, b: np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), unstack_params(our_grads, "blocks"), grads
    )
    assert all(jax.tree.leaves(near))


def test_each_policy_recomputes_what_it_says() -> None:
    """Products in the backward program: kept by `minimal`, done again by `full`."""

    def products(policy: str) -> int:
        text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=(2, 3))(unrolled_params(), SHIFT, policy, False))
        return text.count("dot_general")

    none, minimal, full = (products(policy) for policy in POLICIES)
    assert none == minimal
    assert full > none


def test_each_policy_keeps_less_than_the_one_before() -> None:
    def kept(policy: str) -> int:
        """Activations that the backward pass reads."""
        _, pullback = jax.vjp(lambda params, shift: loss(params, shift, policy, False), unrolled_params(), SHIFT)
        return sum(leaf.shape == X.shape for leaf in jax.tree.leaves(pullback))

    none, minimal, full = (kept(policy) for policy in POLICIES)
    assert none > minimal > full


def test_without_rematerialisation_a_block_stays_itself() -> None:
    assert remat(Block, runtime("none", False)) is Block
