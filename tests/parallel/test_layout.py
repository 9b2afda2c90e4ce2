"""A layout acts under jit with no context, inside shard_map, on any mesh, and is never a silent no-op."""

from __future__ import annotations

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import IndivisibleError, LayoutWarning, MeshError, RuleError
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.specs import MeshSpec

STREAM = ("activation_batch", "activation_length", "activation_embed")
PAGE_RULES = [
    ("embed", "model"),
    ("heads", "model"),
    ("kv", None),
    ("mlp", "model"),
    ("activation_batch", "data"),
    ("activation_length", None),
    ("activation_embed", "model"),
    ("conv_in", None),
    ("conv_out", "model"),
]


def _sharding_ops(text: str) -> int:
    return text.count("sharding_constraint") + text.count("@Sharding")


def test_constrain_acts_under_jit_with_no_context(data_model):
    layout = Layout.of(data_model, PAGE_RULES)
    block = jax.jit(lambda x: layout.constrain(layout.constrain(x, *STREAM) * 2, *STREAM))
    lowered = block.lower(jnp.ones((8, 6, 4)))
    assert _sharding_ops(lowered.as_text()) == 2
    assert block(jnp.ones((8, 6, 4))).sharding.spec == P("data", None, "model")


def test_constrain_acts_outside_jit(data_model):
    y = Layout.of(data_model, PAGE_RULES).constrain(jnp.ones((8, 6, 4)), *STREAM)
    assert y.sharding.is_equivalent_to(NamedSharding(data_model, P("data", None, "model")), 3)


def test_without_a_mesh_it_is_the_identity_but_names_are_checked():
    x = jnp.ones((3, 2, 2))
    assert Layout.of(None).constrain(x, *STREAM) is x
    with pytest.raises(RuleError, match="did you mean 'activation_batch'"):
        Layout.of(None).constrain(x, "activation_btach", None, None)


def test_a_mesh_of_one_device_works(devices):
    layout = Layout.of(Mesh(devices[:1], ("data",)))
    y = jax.jit(lambda x: layout.constrain(x, *STREAM) + 1)(jnp.zeros((3, 2, 2)))
    np.testing.assert_array_equal(y, np.ones((3, 2, 2)))


def test_wrong_number_of_names(data_model):
    with pytest.raises(RuleError, match="2 dimensions, but 3 names"):
        Layout.of(data_model).constrain(jnp.ones((8, 6)), *STREAM)


def test_other_rules_never_reuse_a_stale_executable(data_model):
    import functools

    @functools.partial(jax.jit, static_argnums=0)
    def run(layout, x):
        return layout.constrain(x, *STREAM)

    x = jnp.ones((8, 6, 4))
    first = run(Layout.of(data_model, PAGE_RULES), x)
    second = run(Layout.of(data_model, [("activation_batch", "model"), ("activation_embed", "data")]), x)
    assert first.sharding.spec == P("data", None, "model")
    assert second.sharding.spec == P("model", None, "data")


def test_batch_that_does_not_divide_is_reported(data_model):
    layout = Layout.of(data_model, PAGE_RULES)
    with pytest.warns(LayoutWarning, match="activation_batch of 3 does not divide by data=4"):
        y = jax.jit(lambda x: layout.constrain(x, *STREAM))(jnp.ones((3, 6, 4)))
    assert y.sharding.spec == P(None, None, "model")


def test_under_strict_a_rule_of_one_s_own_that_does_nothing_is_told_once(devices, caplog):
    """Not one that stands beside a rule for another mesh, nor the defaults', of which most do nothing here."""
    mesh = Mesh(devices.reshape(2, 4), ("data", "tensor"))
    rules = [("embed", "model"), ("mlp", "model"), ("mlp", "tensor"), ("kv", None), ("conv_in", "fsdp")]
    Layout.of(mesh, rules)
    assert not caplog.messages
    for _ in range(2):
        Layout.of(mesh, rules, strict=True)
    Layout.of(mesh, "fsdp_tp", strict=True)
    (said,) = caplog.messages
    assert said.startswith("layout: the rule ('embed', 'model') does nothing: the mesh data=2") and "no such" in said


def test_what_does_not_divide_is_said_once_and_how_far_it_is_cut(devices):
    """6 samples on 2 x 2 devices, as three arrays of other names, from two places."""
    layout = Layout.of(Mesh(devices.reshape(2, 2, 2), ("data", "fsdp", "tensor")))
    x = jnp.ones((6, 4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        y = layout.constrain(x, *STREAM)
        layout.constrain(x, "activation_batch", "activation_kv_length", None)
        layout.constrain(x[..., 0], "activation_batch", "activation_length")
    assert y.sharding.spec == P("data", None, None)
    assert [str(one.message) for one in caught] == [
        "activation_batch of 6 does not divide by data x fsdp=4 (nearest sizes that do: 4 or 8); "
        "it is cut by data=2 only"
    ]


def test_strict_makes_reports_errors(data_model):
    layout = Layout.of(data_model, PAGE_RULES, strict=True)
    with pytest.raises(IndivisibleError, match="3 does not divide by data=4"):
        layout.constrain(jnp.ones((3, 6, 4)), *STREAM)
    with pytest.raises(RuleError, match="heads wanted `model`, taken by embed"):
        layout.spec("embed", "heads", "kv")


def test_inside_shard_map_manual_axes_are_stripped(data_model):
    layout = Layout.of(data_model, PAGE_RULES)
    x = jnp.arange(8 * 6 * 4.0).reshape(8, 6, 4)

    def body(part):
        return layout.constrain(part * 2, *STREAM)

    partly = jax.jit(jax.shard_map(body, mesh=data_model, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
    assert _sharding_ops(partly.lower(x).as_text()) > 0
    assert partly(x).sharding.spec == P("data", None, "model")
    fully = jax.jit(jax.shard_map(body, mesh=data_model, in_specs=P("data"), out_specs=P("data")))
    np.testing.assert_array_equal(partly(x), x * 2)
    np.testing.assert_array_equal(fully(x), x * 2)


def test_what_a_dimension_must_divide_by_is_the_same_inside_shard_map(data_model):
    """What is padded on one side may be read on the other."""
    layout, inside = Layout.of(data_model, PAGE_RULES), []

    def body(part):
        inside.append(layout.batch_divisor)
        return part

    jax.eval_shape(jax.shard_map(body, mesh=data_model, in_specs=P("data"), out_specs=P("data")), jnp.ones((8, 2)))
    assert inside == [layout.batch_divisor] == [4]


@pytest.mark.parametrize("set_mesh", ["no context", "set_mesh"])
def test_explicit_meshes_are_first_class(set_mesh):
    import contextlib

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    layout = Layout.of(mesh, PAGE_RULES)
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("data", None)))
    w = jnp.arange(16.0).reshape(4, 4) / 16

    def model(x, w):
        with layout.scope():
            inside = layout.constrain(x, "activation_batch", "activation_embed")
            y = layout.constrain(inside @ layout.use(w, "embed", "mlp"), "activation_batch", "activation_mlp")
        return layout.leave(y, like=x)

    def loss(x, w):
        return ((model(x, w) - x) ** 2).mean()

    with jax.set_mesh(mesh) if set_mesh == "set_mesh" else contextlib.nullcontext():
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    plain, wanted = jax.value_and_grad(lambda x, w: ((x @ w - x) ** 2).mean(), (0, 1))(np.asarray(x), np.asarray(w))
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-4)


def test_meshes_of_different_sizes_are_both_named(devices, data_model):
    layout = Layout.of(data_model)
    small = Mesh(devices[:4], ("data",))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(small, P("data")))
    with pytest.raises(MeshError, match=r"data=4 \(4 devices\).*data=4,model=2 \(8 devices\)"):
        jax.jit(lambda x: layout.constrain(x, "activation_batch", None))(x)


def test_a_mesh_axis_that_no_rule_names_is_told(devices):
    mesh = Mesh(devices.reshape(4, 2), ("data", "rows"))
    with pytest.warns(LayoutWarning, match="'rows' \\(2\\) is named by no rule"):
        Layout.of(mesh)
    with pytest.raises(RuleError, match="'rows'"):
        Layout.of(mesh, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Layout.of(mesh, [("activation_batch", ("data", "rows"))])


def test_use_gathers_storage_axes_and_shards_the_gradient(devices):
    layout = Layout.of(Mesh(devices.reshape(4, 2), ("fsdp", "tensor")))
    names = ("embed", "mlp")
    shapes, trees = {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32)}, {"w": names}
    sharding = layout.shardings(shapes, trees)["w"]
    assert sharding.spec == P("fsdp", "tensor")
    w = jax.device_put(jnp.arange(48.0).reshape(8, 6), sharding)
    x = jnp.ones((8, 8))

    def loss(w):
        y = layout.constrain(x, "activation_batch", "activation_embed") @ layout.use(w, *names)
        return (y**2).sum()

    gradient = jax.jit(jax.grad(loss))
    text = gradient.lower(w).compile().as_text()
    assert "all-gather" in text
    got = gradient(w)
    assert got.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(got, jax.grad(lambda w: ((x @ w) ** 2).sum())(np.asarray(w)), rtol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "rules", "gathers"),
    [
        ({"fsdp": 8}, None, True),
        ({"data": 8}, None, False),
        ({"tensor": 8}, None, False),
        ({"fsdp": 4, "tensor": 2}, [("embed", "tensor"), ("mlp", None)], True),  # a storage rule adds fsdp to embed
        ({"fsdp": 8}, "dp", False),
    ],
)
def test_matrices_are_gathered_where_only_their_storage_is_cut(sizes, rules, gathers):
    assert Layout.of(abstract_mesh(MeshSpec(**{"data": 1, **sizes})), rules).gathers == gathers


def test_storage_of_heads_that_do_not_divide_is_whole_in_use():
    layout = Layout.of(abstract_mesh(MeshSpec(tensor=8)))
    shapes = {"q": jax.ShapeDtypeStruct((640, 10, 64), jnp.float32)}
    row = layout.report(shapes, {"q": ("embed", "heads", "kv")}).rows[0]
    assert row.spec == (("tensor",), (), ())
    assert row.bytes_per_device * 8 == row.bytes
    assert "heads of 10 does not divide by tensor=8" in row.why
    assert "gathered on use" in row.why
    assert layout.spec("embed", "heads", "kv", shape=(640, 10, 64)) == P(None, None, None)


def test_report_adds_up():
    layout = Layout.of(abstract_mesh(MeshSpec(fsdp=8)))
    shapes = {
        "kernel": jax.ShapeDtypeStruct((3, 3, 16, 32), jnp.float32),
        "odd": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    }
    report = layout.report(shapes, {"kernel": (None, None, "conv_in", "conv_out"), "odd": ("conv_out",)})
    assert report.parameters == 9 * 16 * 32 + 5
    assert report.bytes == 4 * 9 * 16 * 32 + 10
    assert report.bytes_per_device == 4 * 9 * 16 * 32 // 8 + 10
    assert report.rows[1].why == "no rule shards it here"
    assert report.share_per_device == pytest.approx(report.bytes_per_device / report.bytes)


def test_the_parameter_with_a_wrong_name_is_named(data_model):
    layout = Layout.of(data_model)
    shapes = {"block": {"kernel": jax.ShapeDtypeStruct((4, 4), jnp.float32)}}
    with pytest.raises(RuleError, match="parameter block/kernel: logical axis 'embed' stands twice"):
        layout.shardings(shapes, {"block": {"kernel": ("embed", "embed")}})
    with pytest.raises(RuleError, match=r"parameter block/kernel has shape \(4, 4\)"):
        layout.shardings(shapes, {"block": {"kernel": ("embed",)}})


def test_local_runs_each_part_alone(data_model):
    layout = Layout.of(data_model, PAGE_RULES)
    seen = []

    def body(x, y):
        seen.append((x.shape, y.shape))
        return x + y

    names = ("activation_batch", "activation_length", "activation_heads")
    x = jnp.arange(8 * 3 * 2.0).reshape(8, 3, 2)
    out = jax.jit(layout.local(body, (names, names), names))(x, x)
    assert seen == [((2, 3, 1), (2, 3, 1))]
    np.testing.assert_array_equal(out, 2 * x)


def test_local_cuts_only_where_the_result_can_be_cut_too(data_model):
    """Four rows a device along `data` become one of two: the result, and so the argument, is whole there."""
    rules = [("activation_height", ("model", "data")), ("activation_batch", None)]
    layout, names, seen = Layout.of(data_model, rules), ("activation_batch", "activation_height"), []

    def halve(x):
        seen.append(x.shape)
        return x[:, ::4]

    x = jnp.arange(16.0).reshape(2, 8)
    out = jax.jit(layout.local(halve, [names], names, out_shape=(2, 2)))(x)
    assert seen == [(2, 4)]  # over model=2 alone, though 8 divides by model x data as well
    np.testing.assert_array_equal(out, x[:, ::4])


def test_context_gives_flax_constraints_mesh_and_rules(data_model):
    traces = []

    @jax.jit
    def block(x):
        traces.append(1)
        return nn.with_logical_constraint(x, STREAM) * 2

    x = jnp.ones((8, 6, 4))
    with Layout.of(data_model, PAGE_RULES).context():
        assert _sharding_ops(block.lower(x).as_text()) > 0
        assert block(x).sharding.spec == P("data", None, "model")
    with Layout.of(data_model, [("activation_batch", "model"), ("activation_embed", "data")]).context():
        assert block(x).sharding.spec == P("model", None, "data")
    with pytest.raises(MeshError, match="needs devices"), Layout.of(None).context():
        pass


def test_only_unmet_wishes_are_said(devices, caplog):
    shapes, names = {"w": jax.ShapeDtypeStruct((6, 6), jnp.float32)}, {"w": ("embed", "mlp")}
    Layout.of(Mesh(devices, ("data",))).shardings(shapes, names)
    assert not caplog.records
    Layout.of(Mesh(devices, ("fsdp",))).shardings(shapes, names)
    assert "1 of 1 parameters are not sharded as the rules wish" in caplog.text
    assert "w: embed of 6 does not divide by fsdp=8" in caplog.text


def test_parameters_on_an_explicit_mesh_get_their_gradients_there():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    layout = Layout.of(mesh)
    w = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("fsdp", "tensor")))

    def loss(w):
        with layout.scope():
            return (layout.use(w, "embed", "mlp") ** 2).sum()

    got = jax.jit(jax.grad(loss))(w)
    assert got.sharding.spec == P("fsdp", "tensor")
    np.testing.assert_array_equal(got, 2 * np.asarray(w))


def test_an_abstract_mesh_is_no_silent_no_op():
    layout = Layout.of(abstract_mesh(MeshSpec(data=4, tensor=2)))
    with pytest.raises(MeshError, match="can be planned with, not run on"):
        jax.jit(lambda x: layout.constrain(x, *STREAM)).lower(jnp.ones((8, 6, 4)))


def test_a_batch_is_shared_by_the_axes_of_its_rule(data_model: Mesh, fsdp_tensor: Mesh) -> None:
    assert Layout.of(None).batch_divisor == 1
    assert Layout.of(data_model).batch_divisor == 4
    assert Layout.of(data_model).divisor("activation_heads") == 2
    assert Layout.of(fsdp_tensor).batch_divisor == 4
    assert Layout.of(data_model, "dp").batch_divisor == 8
