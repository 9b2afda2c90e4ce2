"""The flat keywords: folded once, refused by name, hashable, and parameters that lie where the rules say."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import LayoutWarning, RuleError, UsageError
from maxdiffusion.log import say_once
from maxdiffusion.nn.linear import Dense
from maxdiffusion.nn.model import EXECUTION, DiffusionModel, keyword_names
from maxdiffusion.specs import PipelineSpec, RematSpec


class Line(DiffusionModel, kw_only=True):
    """One product."""

    width: int = 16
    sizes: Any = (1, 2)

    def dummy_inputs(self) -> dict[str, Any]:
        return {"x": jax.ShapeDtypeStruct((1, 8), jnp.float32)}

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.layout.constrain(x, "activation_batch", "activation_embed")
        y = Dense(features=(self.width,), names=("embed", "mlp"), runtime=self.runtime, name="proj")(x)
        return self.layout.constrain(y, "activation_batch", "activation_mlp")


@pytest.fixture
def tensor(devices: np.ndarray) -> Mesh:
    return Mesh(devices, ("tensor",))


def test_keywords_are_fields_without_flax_s_own() -> None:
    assert keyword_names(Line) == (*EXECUTION, "width", "sizes")
    assert {"mesh", "remat_save", "pipeline_patches"} < set(EXECUTION) and not {"parent", "name"} & set(EXECUTION)


def test_keywords_become_one_runtime(data_model: Mesh) -> None:
    blocks = BlockSizes(block_q=128, block_k=64)
    model = Line(
        mesh=data_model,
        attention_kernel="flash",
        flash_min_seq_length=77,
        flash_block_sizes=blocks,
        context_attention="hybrid",
        ulysses_degree=2,
        dtype="bfloat16",
        weights_dtype=jnp.bfloat16,
        remat_policy="minimal",
        remat_save=["hidden", "attention"],
        scan_layers=True,
        pipeline_schedule="circular",
        pipeline_microbatches=4,
        pipeline_repeats=2,
        precision="highest",
    )
    runtime = model.runtime
    assert (runtime.attention.kernel, runtime.attention.flash_min_seq_length) == ("flash", 77)
    assert runtime.attention.block_sizes == blocks
    assert (runtime.attention.context, runtime.attention.ulysses) == ("hybrid", 2)
    assert runtime.dtype == runtime.weights_dtype == jnp.dtype(jnp.bfloat16)
    assert runtime.precision is jax.lax.Precision.HIGHEST
    assert runtime.remat == RematSpec(policy="minimal", save=("attention", "hidden")) and runtime.scan_layers
    assert runtime.pipeline == PipelineSpec(schedule="circular", microbatches=4, repeats=2)
    assert runtime.layout.mesh == data_model


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"attention_kernel": "flash"}, 'attention_kernel="flash" needs a mesh: give mesh='),
        ({"attention_kernel": "flsh"}, "did you mean 'flash'"),
        ({"remat_policy": "ful"}, "did you mean 'full'"),
        ({"remat_policy": "full", "remat_save": "atention,hidden"}, "did you mean 'attention'"),
        ({"remat_save": "hidden"}, "write remat_policy='full', or leave remat_save out"),
        ({"pipeline_schedule": "circlar"}, "did you mean 'circular'"),
        ({"pipeline_microbatches": 0}, "pipeline_microbatches=0: write a whole number, 1 or more"),
        ({"pipeline_repeats": 2}, 'only pipeline_schedule="circular" repeats'),
        ({"pipeline_patches": 4}, "pipeline_patches=4: Line has no sequence that all its blocks share"),
        ({"pipeline_warmup_steps": 4}, "pipeline_warmup_steps=4 is of no use without pipeline_patches"),
        ({"precision": "hihgest"}, "did you mean 'highest'"),
        ({"quantization": "int"}, "did you mean 'int8'"),
        ({"use_qwix_quantization": True}, "use_qwix_quantization=True says too little"),
        ({"flash_block_sizes": {"block_q": 128}}, "write BlockSizes"),
        ({"context_attention": "rings"}, "did you mean 'ring'"),
        ({"ulysses_degree": 4}, "context_attention='auto': write context_attention='hybrid'"),
        ({"flash_min_seq_length": -1}, "flash_min_seq_length=-1"),
        ({"flash_min_seq_length": "1024"}, "flash_min_seq_length=1024: write 0 or more tokens"),
        ({"flash_min_seq_length": 10.5}, "flash_min_seq_length=10.5"),
        ({"scan_layers": "false"}, "scan_layers='false': write True or False"),
        ({"strict": 1}, "strict=1: write True or False"),
        ({"mesh": "data=8"}, "mesh='data=8' is no mesh of devices: give a jax.sharding.Mesh"),
        ({"dtype": "bflat16"}, "dtype='bflat16' is no dtype"),
        ({"weights_dtype": jnp.int32}, "weights_dtype=int32 is no floating dtype"),
        ({"dtype": "float64"}, "dtype=float64 would become float32: write 'float32', or set JAX_ENABLE_X64=1"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_construction(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Line(**keywords)
    assert message in str(caught.value)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    sizes: dict[str, Any] = {"block_q": np.int64(8), "block_k": np.int32(16)}
    blocks = BlockSizes(**sizes)
    model = Line(pipeline_microbatches=np.int64(2), flash_min_seq_length=np.int64(3), flash_block_sizes=blocks)
    assert model == Line(
        pipeline_microbatches=2, flash_min_seq_length=3, flash_block_sizes=BlockSizes(block_q=8, block_k=16)
    )


def test_rules_that_can_be_gone_through_once_stay(tensor: Mesh) -> None:
    """Flax copies a model when it is applied."""
    rules = {"embed": "tensor", "heads": None}
    wanted = Line(mesh=tensor, logical_axis_rules=list(rules.items()))
    once: tuple[Any, ...] = (zip(rules, rules.values(), strict=True), rules.items(), iter(rules.items()))
    for given in once:
        model = Line(mesh=tensor, logical_axis_rules=given)
        assert model.clone() == model == wanted
        assert model.clone().layout.rules == wanted.layout.rules


@pytest.mark.parametrize(
    "wish",
    [
        {"pipeline_schedule": "circular"},
        {"context_attention": "ring"},
        {"context_attention": "hybrid", "ulysses_degree": 2},
    ],
)
def test_other_wishes_that_do_nothing_on_the_mesh_are_said(
    wish: dict[str, Any], tensor: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    with caplog.at_level("WARNING"):
        Line(mesh=tensor, **wish)
    (said,) = caplog.messages
    assert said.startswith(", ".join(f"{name}={value}" for name, value in wish.items())) and "of no use on" in said
    with pytest.raises(UsageError, match="of no use on the mesh"):
        Line(mesh=tensor, strict=True, **wish)


def test_microbatches_without_stages_are_said_to_do_nothing(tensor: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        Line(pipeline_microbatches=3)
        assert not caplog.records  # one device: what a model is cloned to, to be looked at
        for _ in range(2):
            Line(mesh=tensor, pipeline_microbatches=3)
    (said,) = caplog.messages
    assert said.startswith("pipeline_microbatches=3 is of no use on the mesh ") and "give the mesh an axis" in said
    with pytest.raises(UsageError, match=r"pipeline_microbatches=3 is of no use .* \(strict\)"):
        Line(mesh=tensor, pipeline_microbatches=3, strict=True)


def test_a_misspelt_rule_is_refused_at_construction(data_model: Mesh) -> None:
    with pytest.raises(RuleError, match="did you mean 'embed'"):
        Line(mesh=data_model, logical_axis_rules=[("embd", "model")])


def test_models_with_lists_are_hashable_and_equal_by_value() -> None:
    a, b = (Line(sizes=[1, [2, 3]], logical_axis_rules=[("embed", "model")]) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != Line(sizes=[1, [2, 4]])


def test_other_rules_never_meet_an_old_executable(tensor: Mesh) -> None:
    traces: list[Any] = []

    def forward(model: Line, params: Any, x: jax.Array) -> jax.Array:
        traces.append(model.logical_axis_rules)
        return model.apply({"params": params}, x)

    jitted = jax.jit(forward, static_argnums=0)
    shard = Line(mesh=tensor, logical_axis_rules=[("activation_mlp", "tensor")])
    whole = Line(mesh=tensor, logical_axis_rules=[("activation_mlp", None)])
    params = shard.init_weights(jax.random.key(0))
    first, second = (jitted(model, params, jnp.ones((2, 8))).sharding.spec for model in (shard, whole))
    assert first == jax.P(None, "tensor")
    assert "tensor" not in second
    jitted(Line(mesh=tensor, logical_axis_rules=[("activation_mlp", "tensor")]), params, jnp.ones((2, 8)))
    assert len(traces) == 2


def test_jitting_the_bound_apply_of_another_model_traces_again(tensor: Mesh) -> None:
    shard = Line(mesh=tensor, logical_axis_rules=[("activation_mlp", "tensor")])
    whole = Line(mesh=tensor, logical_axis_rules=[("activation_mlp", None)])
    params = shard.init_weights(jax.random.key(0))
    specs = [jax.jit(model.apply)({"params": params}, jnp.ones((2, 8))).sharding.spec for model in (shard, whole)]
    assert specs[0] != specs[1]


def test_parameters_lie_where_the_plan_says(fsdp_tensor: Mesh) -> None:
    model = Line(mesh=fsdp_tensor, weights_dtype=jnp.bfloat16)
    shapes, names = model.abstract_params()
    assert names == {"proj": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}
    params = model.init_weights(jax.random.key(0))
    plan = model.layout.shardings(shapes, names)
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)), params, plan)
    assert params["proj"]["kernel"].sharding.spec == jax.P("fsdp", "tensor")
    assert params["proj"]["kernel"].dtype == jnp.bfloat16


def test_values_are_the_same_bits_on_every_mesh(fsdp_tensor: Mesh, tensor: Mesh) -> None:
    trees = [Line(mesh=mesh).init_weights(jax.random.key(0)) for mesh in (None, fsdp_tensor, tensor)]
    for tree in trees[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), trees[0], tree)


def test_nothing_is_allocated_for_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, _ = Line(width=10**9).abstract_params()
    assert shapes["proj"]["kernel"].shape == (8, 10**9)


def test_a_batch_that_does_not_divide_is_reported(data_model: Mesh) -> None:
    model = Line(mesh=data_model)
    params = model.init_weights(jax.random.key(0))
    with pytest.warns(LayoutWarning, match="activation_batch of 3 does not divide by data=4"):
        jax.jit(model.apply).lower({"params": params}, jnp.ones((3, 8)))


def test_a_committed_key_is_moved_to_the_mesh(fsdp_tensor: Mesh, devices: np.ndarray) -> None:
    key = jax.device_put(jax.random.key(0), devices[3])
    params = Line(mesh=fsdp_tensor).init_weights(key)
    assert params["proj"]["bias"].sharding.mesh == fsdp_tensor


def test_stages_without_stacked_blocks_are_told(devices: np.ndarray) -> None:
    mesh = Mesh(devices.reshape(2, 4), ("stage", "data"))
    with pytest.warns(LayoutWarning, match="2 stages of mesh axis 'stage' repeat the same work: .* scan_layers=True"):
        Line(mesh=mesh)
    with pytest.raises(UsageError, match="scan_layers=True"):
        Line(mesh=mesh, strict=True)
    Line(mesh=mesh, scan_layers=True, strict=True)
