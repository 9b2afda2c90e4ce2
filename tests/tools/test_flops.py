"""FLOPs are read from compiled text: products, convolutions, loops by their trips; and what rematerialisation adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.stack import apply_stack
from maxdiffusion.parallel import pipeline
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.runtime import Runtime
from maxdiffusion.specs import PipelineSpec, RematSpec
from maxdiffusion.tools.flops import Flops, flops, products

# As TPUs write a batched product (a window whose taps meet one value each), loops that do not say their length, and
# one that does not even say where it ends.
TEXT = """HloModule test

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0:T(8,128)} constant({...})
  %d = f32[4,8]{1,0:T(8,128)} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %d)
}

%cond (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %l = pred[] constant(true)
}

%upto (p: (s32[], f32[4,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} constant(5)
  ROOT %l = pred[]{:T(128)} compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %q = bf16[16,5,6]{2,1,0} parameter(1)
  %k = bf16[16,6,7]{2,1,0} parameter(2)
  %w = (s32[], f32[4,8]{1,0}) while(%t0), condition=%cond, body=%body
  %u = (s32[], f32[4,8]{1,0}) while(%t0), condition=%upto, body=%body
  %b = bf16[16,5,7]{2,1,0} convolution(%q, %k), window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf
  %c = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %z = f32[4,8]{1,0} get-tuple-element(%w), index=1
}
"""


def of(run: Callable[..., Any], *arguments: Any) -> Flops:
    return flops(jax.jit(run).lower(*arguments).compile().as_text() or "")


def zeros(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_text_is_read() -> None:
    product = 2 * 4 * 8 * 8
    assert flops(TEXT) == Flops(
        dots=product + 5 * product,
        convolutions=2 * 16 * 5 * 6 * 7,
        in_loops_of_unknown_length=product,
        custom_calls={"tpu_custom_call": 1},
    )
    assert products(TEXT) == {("f32", "f32"): 6 * product, ("bf16", "bf16"): 2 * 16 * 5 * 6 * 7}


def test_products_cost_what_the_formula_says() -> None:
    assert of(jnp.matmul, zeros(24, 40), zeros(40, 56)).total == 2 * 24 * 40 * 56
    batched = of(lambda q, k: jnp.einsum("blhd,bkhd->bhlk", q, k), zeros(2, 16, 4, 8), zeros(2, 12, 4, 8))
    assert batched.total == 2 * 2 * 4 * 16 * 12 * 8
    grads = of(jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)), (0, 1)), zeros(40, 56), zeros(24, 40))
    assert grads.total == 3 * 2 * 24 * 40 * 56


@pytest.mark.parametrize(
    ("stride", "padding", "groups", "dilation"),
    [(1, "VALID", 1, 1), (1, "SAME", 1, 1), (2, "SAME", 1, 1), (1, "SAME", 4, 1), (1, ((2, 2), (2, 2)), 1, 2)],
)
def test_convolutions_cost_what_a_loop_counts(stride: int, padding: Any, groups: int, dilation: int) -> None:
    """Forward and both gradients, which XLA writes as convolutions of other shapes: every product of a value of the
    input with one of the kernel occurs once in each."""
    batch, size, features, out = 2, 9, 8, 12

    def run(x: Any, w: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            padding,
            rhs_dilation=(dilation, dilation),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    x, w = zeros(batch, size, size, features), zeros(3, 3, features // groups, out)
    ones = jax.eval_shape(run, x, w).shape[1]
    same = max((ones - 1) * stride + 3 - size, 0) // 2
    low = {"VALID": 0, "SAME": same}[padding] if isinstance(padding, str) else padding[0][0]
    meet = sum(0 <= o * stride + tap * dilation - low < size for o in range(ones) for tap in range(3))
    forward = 2 * batch * meet**2 * (features // groups) * out
    assert of(run, x, w).total == forward

    def gradients(x: Any, w: Any, d_out: Any) -> Any:
        return jax.vjp(run, x, w)[1](d_out)

    assert of(gradients, x, w, jax.eval_shape(run, x, w)).total == 2 * forward


class Block(nn.Module):
    """One product, whose result the backward pass needs."""

    runtime: Runtime

    @nn.compact
    def __call__(self, x: jax.Array, nothing: None) -> jax.Array:
        dense = Dense(features=(x.shape[-1],), names=("embed", "mlp"), runtime=self.runtime, name="dense")
        return x + jnp.sin(dense(x))


class Model(nn.Module):
    runtime: Runtime
    num_layers: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return apply_stack(
            Block,
            x,
            None,
            num_layers=self.num_layers,
            name="blocks",
            runtime=self.runtime,
            attributes={"runtime": self.runtime},
        )


BATCH, WIDTH = 16, 32
X = zeros(BATCH, WIDTH)
PRODUCT = 2 * BATCH * WIDTH * WIDTH


def stack_flops(layout: Layout, policy: Any, *, scanned: bool = True, backward: bool = True, spec: Any = None) -> int:
    """Of the stack of four blocks on one device: its value, or its gradients of parameters and input."""
    runtime = Runtime(
        layout=layout, remat=RematSpec(policy=policy), scan_layers=scanned, pipeline=spec or PipelineSpec()
    )
    model = Model(runtime)
    single = Model(dataclasses.replace(runtime, layout=Layout()))
    params = nn.unbox(jax.eval_shape(single.init, jax.random.key(0), X))["params"]

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(jnp.square(model.apply({"params": params}, x)))  # type: ignore[arg-type]

    found = of(jax.grad(loss, (0, 1)) if backward else loss, params, X)
    assert found.in_loops_of_unknown_length == 0 and not found.custom_calls
    return found.total


def test_scanned_layers_are_counted_each() -> None:
    for scanned in (False, True):
        assert stack_flops(Layout(), "none", scanned=scanned, backward=False) == 4 * PRODUCT
        # The gradient of a product is two products of its size.
        assert stack_flops(Layout(), "none", scanned=scanned) == 3 * 4 * PRODUCT


@pytest.mark.parametrize(("policy", "passes"), [("minimal", 3), ("full", 4), ("offload", 4)])
def test_rematerialisation_costs_one_more_forward_pass(policy: str, passes: int) -> None:
    """Exactly: `minimal` keeps the products."""
    assert stack_flops(Layout(), policy) == passes * 4 * PRODUCT


@pytest.mark.parametrize("policy", ["none", "minimal", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "circular"])
def test_a_pipeline_recomputes_once(schedule: Any, policy: str, devices: np.ndarray) -> None:
    """A device computes its layers at every tick, as often as a scan would: there is no second forward pass for the
    loop of ticks around the loop of layers."""
    layout, spec = Layout.of(Mesh(devices[:2], ("stage",))), PipelineSpec(schedule=schedule, microbatches=4)
    plan = pipeline.plan(layout, spec, num_layers=4, batch=BATCH, name="blocks")
    layers_a_tick = 4 // (plan.stages * plan.repeats)
    passes = 4 if policy == "full" else 3
    expected = passes * plan.ticks * layers_a_tick * PRODUCT // plan.microbatches
    assert stack_flops(layout, policy, spec=spec) == expected
