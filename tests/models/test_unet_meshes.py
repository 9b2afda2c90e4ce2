"""The UNet on a mesh: the same numbers everywhere, parameters where the plan says, constraints that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import LayoutWarning
from maxdiffusion.kernels.halo import padded_rows
from maxdiffusion.models import FlaxUNet2DConditionModel
from maxdiffusion.models.registry import lookup
from maxdiffusion.tools.traffic import traffic

# Eight devices add float32 sums of up to 2304 terms in another order than one does; a gradient passes through some 40
# layers. The limits are those of `maxdiffusion verify`: predictions and losses, then gradients.
FORWARD, TOLERANCE = 1e-6, 1e-5

pytestmark = pytest.mark.whole

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "data=4,model=2": (("data", "model"), (4, 2)),
    "fsdp=4,tensor=2": (("fsdp", "tensor"), (4, 2)),
    "data=8": (("data",), (8,)),
    "fsdp=8": (("fsdp",), (8,)),
    "fsdp=2,context=2,tensor=2": (("fsdp", "context", "tensor"), (2, 2, 2)),
    "data=2,context=4": (("data", "context"), (2, 4)),
    "cfg=2,context=4": (("cfg", "context"), (2, 4)),
    "data=2,space=4": (("data", "space"), (2, 4)),
}
RULES = {"data=2,space=4": (("activation_height", "space"), ("activation_length", "space"))}
"""What the default table does not know of a mesh."""
FURTHER_MESHES = {"tensor=8": (("tensor",), (8,))}


def make_mesh(devices: np.ndarray, name: str) -> Mesh:
    axes, shape = {**MESHES, **FURTHER_MESHES}[name]
    return Mesh(devices.reshape(shape), axes)


def small(**keywords: Any) -> FlaxUNet2DConditionModel:
    """SDXL's kind with two levels and no middle, so that gradients compile soon."""
    return lookup("sdxl").build(
        "tiny", mid_block_type=None, transformer_layers_per_block=1, precision="highest", **keywords
    )


def call(batch: int = 8, size: int = 8) -> dict[str, Any]:
    """Inputs of a call of the tiny SDXL."""
    keys = jax.random.split(jax.random.key(7), 4)
    return {
        "sample": jax.random.normal(keys[0], (batch, 4, size, size)),
        "timesteps": jnp.linspace(1, 999, batch),
        "encoder_hidden_states": jax.random.normal(keys[1], (batch, 5, 32)),
        "added_cond_kwargs": {
            "text_embeds": jax.random.normal(keys[2], (batch, 32)),
            "time_ids": 100 * jax.random.uniform(keys[3], (batch, 6)),
        },
    }


def run(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` compiled without the back end's optimisations, which take a third of the time and change no number."""
    return jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def off(a: Any, b: Any) -> float:
    """Norm of the differences over the norm."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def loss_of(model: FlaxUNet2DConditionModel, inputs: Any = None) -> Callable[[Any], Any]:
    inputs = inputs or call()
    target = jnp.roll(inputs["sample"], 1, axis=3)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        out = model.apply({"params": params}, **inputs).sample
        return jnp.mean(jnp.square(out - target)), out

    return jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="module")
def single() -> tuple[Any, Any, Any]:
    model = small()
    (loss, out), grads = run(loss_of(model), model.init_weights(jax.random.key(0)))
    return loss, out, grads


# The slow ones repeat, one axis or policy at a time, what the others and the tests of stacks cover together.
SLOW = pytest.mark.slow
QUICK = ("data=4,model=2", "fsdp=2,context=2,tensor=2")
"""Meshes of every test run; the others are slow."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in MESHES])
def test_values_and_gradients_are_those_of_one_device(
    name: str, devices: np.ndarray, single: tuple[Any, Any, Any]
) -> None:
    loss, out, grads = single
    model = small(mesh=make_mesh(devices, name), logical_axis_rules=RULES.get(name))
    params = model.init_weights(jax.random.key(0))
    (our_loss, our_out), our_grads = run(loss_of(model), params)
    assert off(our_loss, loss) <= FORWARD
    assert off(our_out, out) <= FORWARD
    worst = jax.tree.map(distance, our_grads, grads)
    assert max(jax.tree.leaves(worst)) <= TOLERANCE, worst
    plan = model.layout.shardings(*model.abstract_params())
    jax.tree.map(
        lambda leaf, grad, sharding: (
            (leaf.sharding == sharding and grad.sharding.is_equivalent_to(sharding, grad.ndim))
            or pytest.fail(f"parameter {leaf.sharding}, gradient {grad.sharding}, plan {sharding}")
        ),
        params,
        our_grads,
        plan,
    )


@pytest.mark.parametrize("policy", [pytest.param("minimal", marks=SLOW), "full"])
def test_rematerialised_gradients_are_the_same(policy: str, single: tuple[Any, Any, Any]) -> None:
    model = small(remat_policy=policy)
    (loss, _), grads = run(loss_of(model), model.init_weights(jax.random.key(0)))
    assert off(loss, single[0]) <= FORWARD
    assert max(jax.tree.leaves(jax.tree.map(distance, grads, single[2]))) <= TOLERANCE


@pytest.fixture(scope="module")
def whole() -> tuple[Any, Any]:
    """The tiny SDXL on one device: parameters and output."""
    model = lookup("sdxl").build("tiny", precision="highest")
    params = model.init_weights(jax.random.key(0))
    return params, run(lambda p, x: model.apply({"params": p}, **x).sample, params, call())


@pytest.mark.filterwarnings("ignore:.*does not divide:maxdiffusion.errors.LayoutWarning")  # 2 and 4 heads on 8
@pytest.mark.parametrize(
    "name", ["fsdp=2,context=2,tensor=2", *(pytest.param(name, marks=SLOW) for name in ("data=4,model=2", "tensor=8"))]
)
def test_tiny_sdxl_is_that_of_one_device(name: str, devices: np.ndarray, whole: tuple[Any, Any]) -> None:
    """With flash attention from the first token on; heads that do not divide are gathered, rows are exchanged."""
    params, expected = whole
    model = lookup("sdxl").build(
        "tiny", mesh=make_mesh(devices, name), precision="highest", attention_kernel="flash", flash_min_seq_length=4
    )
    ours = model.init_weights(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, params)
    out = run(lambda p, x: model.apply({"params": p}, **x).sample, ours, call())
    assert off(out, expected) <= FORWARD


@pytest.mark.parametrize(
    ("model", "name", "most"),
    [
        ("sdxl", "fsdp=8", 0.13),
        ("sdxl", "tensor=8", 0.13),  # 2 and 4 heads do not divide: their projections are stored in parts all the same
        ("flux-dev", "fsdp=8", 0.13),
        pytest.param("flux-dev", "tensor=8", 0.13, marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not divide:maxdiffusion.errors.LayoutWarning")
def test_each_device_stores_the_share_that_explain_says(
    model: str, name: str, most: float, devices: np.ndarray
) -> None:
    """The bytes of real arrays' shards, device by device."""
    mesh = make_mesh(devices, name)
    made = small(mesh=mesh) if model == "sdxl" else lookup(model).build("tiny", mesh=mesh, num_attention_heads=8)
    params = made.init_weights(jax.random.key(0))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    stored = dict.fromkeys(devices, 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            stored[shard.device] += shard.data.nbytes
    assert total / 8 <= max(stored.values()) <= most * total
    report = made.layout.report(*made.abstract_params())
    assert list(stored.values()) == [report.bytes_per_device] * 8 and report.bytes == total


def test_constraints_stand_in_the_program_and_only_with_a_mesh(data_model: Mesh) -> None:
    def constraints(**keywords: Any) -> int:
        model = small(**keywords)
        shapes = model.abstract_params()[0]
        text = jax.jit(model.apply).lower({"params": shapes}, **call()).as_text()
        return text.count("sharding_constraint")

    num_parameters = len(jax.tree.leaves(small().abstract_params()[0]))
    assert constraints() == 0
    assert constraints(mesh=data_model) > num_parameters


def test_a_batch_that_does_not_divide_is_reported(data_model: Mesh) -> None:
    model = small(mesh=data_model)
    shapes = model.abstract_params()[0]
    with pytest.warns(LayoutWarning, match="activation_batch of 3 does not divide by data=4"):
        jax.jit(model.apply).lower({"params": shapes}, **call(batch=3))


@pytest.mark.parametrize(
    ("axes", "shape"), [(("data",), (8,)), pytest.param(("data", "context"), (2, 4), marks=SLOW)], ids=str
)
def test_latents_may_live_on_an_explicit_mesh(
    axes: tuple[str, ...], shape: tuple[int, ...], devices: np.ndarray, whole: tuple[Any, Any]
) -> None:
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)
    model = lookup("sdxl").build("tiny", mesh=mesh, precision="highest")
    params, inputs = model.init_weights(jax.random.key(0)), call()
    inputs["sample"] = jax.device_put(inputs["sample"], NamedSharding(mesh, P("data")))
    out = run(lambda p, x: model.apply({"params": p}, **x).sample, params, inputs)
    assert off(out, whole[1]) <= FORWARD
    assert out.sharding.spec[0] == "data"


@pytest.mark.parametrize("height", [9, *(pytest.param(height, marks=SLOW) for height in (4, 5, 6, 7, 22))])
def test_rows_that_do_not_divide_are_padded_and_never_seen(height: int, devices: np.ndarray) -> None:
    """Two levels over four devices: 9 rows and then 5 are padded to 16 and 8, two of them a device."""
    inputs = call(batch=2)
    inputs["sample"] = jax.random.normal(jax.random.key(height), (2, 4, height, 8))
    alone, ours = small(), small(mesh=make_mesh(devices, "data=2,context=4"), strict=True)
    assert padded_rows(height, 2, ours.layout) % 8 == 0 and padded_rows(height, 2, ours.layout) > height
    params = alone.init_weights(jax.random.key(0))
    (loss, out), grads = run(loss_of(alone, inputs), params)
    (our_loss, our_out), our_grads = run(loss_of(ours, inputs), jax.device_get(params))
    assert our_out.shape == out.shape
    assert off(our_loss, loss) <= FORWARD and off(our_out, out) <= FORWARD
    worst = jax.tree.map(distance, our_grads, grads)
    assert max(jax.tree.leaves(worst)) <= TOLERANCE, worst


def test_rows_over_context_move_borders_only_and_share_the_memory(devices: np.ndarray) -> None:
    """Forward: permutes of border rows, sums of the norms' statistics, the all-to-alls of attention; no gather."""
    shapes = jax.eval_shape(lambda: call(batch=2, size=32))

    def compiled(model: FlaxUNet2DConditionModel) -> Any:
        params = model.abstract_params()[0]
        return jax.jit(lambda p, x: model.apply({"params": p}, **x).sample).lower(params, shapes).compile()

    sizes = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    wide = {"attention_kernel": "flash", "flash_min_seq_length": 64, **sizes}
    mesh = Mesh(devices[:4], ("context",))
    ours = compiled(small(mesh=mesh, **wide))
    moved = traffic(ours.as_text(), mesh)
    # The widest feature map has 32 x 32 positions of 96 channels (a skip beside its level): at most a row of it moves.
    row = 2 * 32 * 96 * 4
    assert moved.count("all-gather") == 0, moved.table()
    assert moved.count("collective-permute", above=row) == 0 < moved.count("collective-permute"), moved.table()
    assert moved.count("all-reduce", above=2 * 8 * 4) == 0, moved.table()  # batch x groups
    alone = compiled(small(mesh=Mesh(devices[:1], ("context",)), **wide))
    # A quarter of every activation, and beside it gathered weights, borders and sums, of which a small model has many.
    assert ours.memory_analysis().temp_size_in_bytes <= 0.4 * alone.memory_analysis().temp_size_in_bytes
