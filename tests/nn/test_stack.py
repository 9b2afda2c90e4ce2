"""Stacks: unrolled, scanned, pipelined and rematerialised give one answer, values and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.parameters import parameter_names
from maxdiffusion.nn.stack import apply_stack, remat, stack_params, unstack_params
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import PipelineSpec, QuantSpec, RematSpec
from maxdiffusion.tools.traffic import traffic

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
    num_layers: int = 3

    @nn.compact
    def __call__(self, x: dict[str, jax.Array], shift: jax.Array) -> dict[str, jax.Array]:
        return apply_stack(
            Pair,
            x,
            (shift, None),
            num_layers=self.num_layers,
            name="blocks",
            runtime=self.runtime,
            attributes={"runtime": self.runtime},
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


KEYS = jax.random.split(jax.random.key(5), 3)
WIDE = {"a": jax.random.normal(KEYS[0], (8, 16)), "b": jax.random.normal(KEYS[1], (8, 8))}
DEEP_SHIFT = jax.random.normal(KEYS[2], (8, 8))


def deep_loss(model: Pairs, params: dict) -> tuple[jax.Array, Any]:
    def loss(params: dict, x: Any, shift: jax.Array) -> jax.Array:
        out = model.apply({"params": params}, x, shift)
        return jnp.sum(jnp.square(out["a"])) + jnp.sum(out["b"])

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(params, WIDE, DEEP_SHIFT)


PIPELINES = {
    "gpipe": ({"stage": 2}, "none", PipelineSpec()),
    "gpipe x data, minimal": ({"stage": 2, "data": 2}, "minimal", PipelineSpec(microbatches=1)),
    "gpipe x tensor, full": ({"stage": 4, "tensor": 2}, "full", PipelineSpec(microbatches=2)),
    "circular, none": ({"stage": 2}, "none", PipelineSpec(schedule="circular")),
    "circular x fsdp, full": ({"stage": 2, "fsdp": 2}, "full", PipelineSpec(schedule="circular", microbatches=2)),
}


@pytest.fixture(scope="module")
def scanned_pairs() -> tuple[dict, Any, Any]:
    """Parameters of a scanned stack of four blocks, and its value and gradients on one device."""
    model = Pairs(runtime("none", True), num_layers=4)
    params = nn.unbox(model.init(jax.random.key(0), WIDE, DEEP_SHIFT))["params"]
    return params, *deep_loss(model, params)


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_has_the_parameters_and_numbers_of_the_scan(
    case: str, devices: np.ndarray, scanned_pairs: tuple[dict, Any, Any]
) -> None:
    """Parts of the batch add gradients in another order: 1e-5; values differ by the order of products only."""
    sizes, policy, spec = PIPELINES[case]
    mesh = Mesh(devices[: np.prod([*sizes.values()])].reshape(*sizes.values()), tuple(sizes))
    layout = Layout.of(mesh)
    model = Pairs(dataclasses.replace(runtime(policy, True), layout=layout, pipeline=spec), num_layers=4)
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), WIDE, DEEP_SHIFT)["params"])
    params, expected, grads = scanned_pairs
    assert jax.tree.map(lambda leaf: leaf.shape, nn.unbox(boxed)) == jax.tree.map(lambda leaf: leaf.shape, params)
    placed = jax.device_put(params, layout.shardings(nn.unbox(boxed), parameter_names(boxed)))
    assert placed["blocks"]["dense"]["kernel"].sharding.spec[0] == "stage"
    value, got = deep_loss(model, placed)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(grads), strict=True):
        assert np.abs(leaf - other).max() <= 1e-5 * np.abs(other).max()


def piped(layout: Layout, policy: str, spec: PipelineSpec) -> tuple[Any, Any]:
    """The outputs as a function of the parameters, and the parameters' shapes."""
    model = Pairs(dataclasses.replace(runtime(policy, True), layout=layout, pipeline=spec), num_layers=4)
    params = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), WIDE, DEEP_SHIFT))["params"])
    return (lambda params: model.apply({"params": params}, WIDE, DEEP_SHIFT)), params


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_in_a_pipeline_is_rematerialised_once(policy: str, schedule: Any, devices: np.ndarray) -> None:
    """The traced program has as many products as that of the scan."""

    def products(layout: Layout) -> int:
        apply, params = piped(layout, policy, PipelineSpec(schedule=schedule))
        return str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(apply(params)["a"])))(params)).count("dot_general")

    assert products(Layout.of(Mesh(devices[:2], ("stage",)))) == products(Layout())


@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pipeline_keeps_no_copy_of_its_weights_for_each_tick(policy: str, schedule: Any, devices: np.ndarray) -> None:
    layout = Layout.of(Mesh(devices[:2], ("stage",)))
    apply, params = piped(layout, policy, PipelineSpec(schedule=schedule, microbatches=8))
    kept = jax.make_jaxpr(lambda params: jax.vjp(apply, params)[1])(params).out_avals
    kernels = sum(leaf.size for leaf in kept if leaf.ndim > 2 and leaf.shape[-2:] == (8, 8))
    assert kernels <= params["blocks"]["dense"]["kernel"].size


def test_modules_in_a_pipeline_know_their_place(devices: np.ndarray) -> None:
    layout = Layout.of(Mesh(devices[:2], ("stage",)))
    paths = set()

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        paths.add("/".join(context.module.path))
        return call(*args, **kwargs)

    model = Pairs(dataclasses.replace(runtime("none", True), layout=layout), num_layers=4)
    params = nn.unbox(model.init(jax.random.key(0), WIDE, DEEP_SHIFT))
    with nn.intercept_methods(note):
        jax.eval_shape(lambda: model.apply(params, WIDE, DEEP_SHIFT))
    assert paths == {"", "blocks", "blocks/dense"}


@pytest.mark.parametrize(("scanned", "mode"), [(False, None), (True, None), (False, "fp8_full"), (True, "fp8_full")])
def test_the_backward_pass_gathers_the_weights_of_blocks_again(devices: np.ndarray, scanned: bool, mode: Any) -> None:
    """Kept, the gathered weights of all blocks would be the whole model on each device."""
    layout = Layout.of(Mesh(devices.reshape(8), ("fsdp",)), None)
    model = Model(Runtime(layout=layout, scan_layers=scanned, quant=QuantSpec(mode=mode)))
    x = jnp.ones((8, 64))
    boxed = jax.eval_shape(model.init, jax.random.key(0), x, x)["params"]
    shardings = layout.shardings(nn.unbox(boxed), parameter_names(boxed))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({"params": params}, x, x))

    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings,
    )
    compiled = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), out_shardings=(None, (shardings, None)))
        .lower(params, x)
        .compile()
    )
    kernels = [one for one in traffic(compiled.as_text(), layout.mesh).collectives if one.kind == "all-gather"]
    assert sum(one.count for one in kernels if 64 * 64 * 4 in one.tensors) == 2 * 3, kernels
