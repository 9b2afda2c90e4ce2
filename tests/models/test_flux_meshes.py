"""FLUX.1's transformer on meshes: the same numbers everywhere, parameters where the plan says, heads never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec

# Devices add float32 sums of at most 128 terms in another order than one does, through two blocks; gradients pass them
# twice and sum over all tokens.
TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5

pytestmark = pytest.mark.whole

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "data=4,model=2": (("data", "model"), (4, 2)),
    "fsdp=8": (("fsdp",), (8,)),
    "fsdp=4,tensor=2": (("fsdp", "tensor"), (4, 2)),
    "data=2,fsdp=2,tensor=2": (("data", "fsdp", "tensor"), (2, 2, 2)),
    "tensor=2": (("tensor",), (2,)),
    "fsdp=2,context=2,tensor=2": (("fsdp", "context", "tensor"), (2, 2, 2)),
    # Neither 6 text tokens nor 10 of the image divide by 4: both are padded at the entry, without a warning.
    "data=2,context=4": (("data", "context"), (2, 4)),
    "fsdp=2,context=4": (("fsdp", "context"), (2, 4)),
    "cfg=2,context=4": (("cfg", "context"), (2, 4)),
}
SLICES = "dcn.data=2,fsdp=4"
"""Parameters sharded in each of two slices; the axes of this mesh are the usual ones, four of them of size 1."""


def small(**keywords: Any) -> DiffusionModel:
    return lookup("flux-dev").build(
        "tiny", **{"num_layers": 1, "num_single_layers": 1, "precision": "highest", **keywords}
    )


def call() -> dict[str, Any]:
    """Inputs of a call: 8 examples of 6 text tokens, some hidden, and 2 x 5 image tokens."""
    keys = jax.random.split(jax.random.key(7), 3)
    rows, columns = np.meshgrid(np.arange(2.0), np.arange(5.0), indexing="ij")
    return {
        "hidden_states": jax.random.normal(keys[0], (8, 10, 16)),
        "encoder_hidden_states": jax.random.normal(keys[1], (8, 6, 24)),
        "pooled_projections": jax.random.normal(keys[2], (8, 16)),
        "timestep": jnp.linspace(0.125, 1, 8),
        "img_ids": np.stack([np.zeros_like(rows), rows, columns], axis=-1).reshape(10, 3).astype(np.float32),
        "txt_ids": np.zeros((6, 3), np.float32),
        "guidance": 3.5,
        "encoder_attention_mask": jnp.arange(6)[None] < jnp.arange(8)[:, None],
    }


def run(model: DiffusionModel) -> tuple[Any, Any, Any]:
    """Parameters, output and gradients, compiled without the back end's optimisations, which change no number."""
    inputs, params = call(), model.init_weights(jax.random.key(0))

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        out: Any = model.apply({"params": params}, **inputs)
        return jnp.mean(jnp.square(out.sample - jnp.roll(inputs["hidden_states"], 1, axis=1))), out.sample

    fn: Callable[..., Any] = jax.value_and_grad(loss, has_aux=True)
    compiled = jax.jit(fn).lower(params).compile(compiler_options={"xla_backend_optimization_level": 0})
    (_, out), grads = compiled(params)
    return params, out, grads


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture(scope="module")
def single() -> tuple[Any, Any, Any]:
    return run(small())


# The slow ones repeat what the others cover. Every promised combination is quick here, but for those with stages, which
# `tests/tools/test_verify.py` has (data=2,stage=2,tensor=2).
SLOW = pytest.mark.slow
REPEATED = ("tensor=2", "fsdp=8", "fsdp=4,tensor=2", "data=2,context=4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in REPEATED else ()) for name in (*MESHES, SLICES)]
)
def test_values_and_gradients_are_those_of_one_device(
    name: str, devices: np.ndarray, single: tuple[Any, Any, Any]
) -> None:
    if name == SLICES:
        mesh = build_mesh(MeshSpec.parse(name), devices)
    else:
        axes, shape = MESHES[name]
        mesh = Mesh(devices[: np.prod(shape)].reshape(shape), axes)
    flash = {"attention_kernel": "flash", "flash_min_seq_length": 0} if "context" in name else {}
    model = small(mesh=mesh, **flash)
    params, out, grads = run(model)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, single[0])
    worst = jax.tree.map(distance, grads, single[2])
    assert distance(out, single[1]) <= TOLERANCE
    assert max(jax.tree.leaves(worst)) <= GRADIENT_TOLERANCE, worst
    plan = model.layout.shardings(*model.abstract_params())
    jax.tree.map(
        lambda leaf, grad, sharding: (
            (leaf.sharding == sharding and grad.sharding.is_equivalent_to(sharding, grad.ndim))
            or pytest.fail(f"parameter {leaf.sharding}, gradient {grad.sharding}, plan {sharding}")
        ),
        params,
        grads,
        plan,
    )


@pytest.mark.slow
def test_stages_hand_on_both_streams(devices: np.ndarray) -> None:
    """A pipeline of stacked double blocks, whose carry is a pair, and of single blocks."""
    stacked = {"num_layers": 2, "num_single_layers": 2, "scan_layers": True}
    mesh = Mesh(devices.reshape(2, 2, 2), ("stage", "data", "tensor"))
    _, wanted, wanted_grads = run(small(**stacked))
    _, out, grads = run(small(mesh=mesh, **stacked))
    assert distance(out, wanted) <= 2 * TOLERANCE
    worst = jax.tree.map(distance, grads, wanted_grads)
    assert max(jax.tree.leaves(worst)) <= 2 * GRADIENT_TOLERANCE, worst
