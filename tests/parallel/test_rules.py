"""The resolver follows flax's rule order, knows the mesh, and never drops a wish in silence."""

from __future__ import annotations

import flax.linen as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxdiffusion.errors import RuleError
from maxdiffusion.parallel.rules import (
    DEFAULT_RULES,
    LOGICAL_AXES,
    PRESETS,
    STORAGE_RULES,
    check_rules,
    complete,
    resolve,
)

_NAMES = ("embed", "heads", "kv", "mlp", "activation_batch")
_MESH = {"data": 2, "fsdp": 2, "tensor": 2}
_axes = st.one_of(
    st.none(),
    st.sampled_from(tuple(_MESH)),
    st.lists(st.sampled_from(tuple(_MESH)), min_size=2, max_size=3, unique=True).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(st.one_of(st.none(), st.sampled_from(_NAMES)), min_size=1, max_size=4),
    rules=st.lists(st.tuples(st.sampled_from(_NAMES), _axes), max_size=8),
)
def test_equals_flax_wherever_flax_defines_an_answer(names, rules):
    named = [name for name in names if name is not None]
    if len(set(named)) < len(named):
        with pytest.raises(RuleError, match="stands twice"):
            resolve(names, rules, _MESH)
        with pytest.raises(ValueError):
            nn.logical_to_mesh_axes(names, rules)
        return
    wanted = nn.logical_to_mesh_axes(names, rules)
    got = resolve(names, rules, _MESH).axes
    as_tuples = tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in wanted)
    assert got == as_tuples


@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True),
    rules=st.lists(st.tuples(st.sampled_from(_NAMES), _axes), max_size=8),
    shape=st.lists(st.integers(1, 24), min_size=4, max_size=4),
)
def test_no_mesh_axis_twice_and_every_dimension_divides(names, rules, shape):
    resolution = resolve(names, rules, _MESH, shape=shape[: len(names)], storage=STORAGE_RULES)
    used = [axis for dim in resolution.axes for axis in dim]
    assert len(used) == len(set(used))
    for size, dim in zip(shape, resolution.axes, strict=False):
        assert size % (2 ** len(dim)) == 0


def test_first_free_rule_wins():
    rules = [("embed", "tensor"), ("embed", "data")]
    assert resolve(("activation_batch", "length", "embed"), [("activation_batch", "data"), *rules], _MESH).axes == (
        ("data",),
        (),
        ("tensor",),
    )
    taken = [("mlp", "tensor"), *rules]
    assert resolve(("embed", "mlp"), taken, _MESH).axes == (("data",), ("tensor",))


def test_absent_and_size_one_axes_are_skipped():
    rules = [("heads", "tensor"), ("heads", "model"), ("activation_batch", ("data", "fsdp"))]
    assert resolve(("heads",), rules, {"data": 4, "model": 2}).axes == (("model",),)
    assert resolve(("activation_batch",), rules, {"data": 4, "model": 2}).axes == (("data",),)
    assert resolve(("heads",), rules, {"tensor": 1, "model": 2}).axes == (("model",),)


def test_conflicts_are_told():
    notes = resolve(("embed", "heads", "kv"), [("embed", "model"), ("heads", "model")], {"model": 2}).notes
    assert [note.text for note in notes] == ["heads wanted `model`, taken by embed"]


def test_indivisible_dimensions_are_told_with_the_legal_sizes():
    resolution = resolve(("activation_batch",), [("activation_batch", "data")], {"data": 4}, shape=(6,))
    assert resolution.axes == ((),)
    assert "6 does not divide by data=4 (nearest sizes that do: 4 or 8)" in resolution.notes[0].text


def test_a_tuple_keeps_the_leading_axes_that_divide():
    resolution = resolve(
        ("activation_batch",), [("activation_batch", ("data", "fsdp"))], {"data": 2, "fsdp": 4}, shape=(6,)
    )
    assert resolution.axes == (("data",),)
    assert len(resolution.notes) == 1


def test_heads_that_do_not_divide_are_stored_on_another_dimension():
    resolution = resolve(
        ("embed", "heads", "kv"), DEFAULT_RULES, {"tensor": 8}, shape=(640, 10, 64), storage=STORAGE_RULES
    )
    assert resolution.axes == (("tensor",), (), ())
    assert "heads of 10 does not divide by tensor=8" in resolution.notes[0].text
    both = resolve(
        ("embed", "heads", "kv"), DEFAULT_RULES, {"fsdp": 2, "tensor": 4}, shape=(640, 10, 64), storage=STORAGE_RULES
    )
    assert both.axes == (("fsdp", "tensor"), (), ())


def test_a_rule_of_none_keeps_the_storage_whole():
    rules = complete([("conv_in", None), ("conv_out", None)], ("data", "model"))
    resolution = resolve(
        (None, None, "conv_in", "conv_out"), rules, {"model": 2}, shape=(3, 3, 8, 8), storage=STORAGE_RULES
    )
    assert resolution.axes == ((), (), (), ())


def test_users_rules_come_first_and_defaults_fill():
    rules = complete([("embed", "model"), ("kv", None)], ("data", "model"))
    assert rules[:2] == (("embed", "model"), ("kv", None))
    assert [axes for name, axes in rules if name == "embed"] == ["model"]
    assert ("heads", "model") in rules


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("activation_btach", "data")], "did you mean 'activation_batch'"),
        ([("heads", "modle")], "did you mean 'model'"),
        ([("heads", ("data", "data"))], "names a mesh axis twice"),
        ([("activation_width", "data")], "exchange border rows, not columns: cut the rows instead"),
        ([("activation_width", ("data", "model"))], r"\('activation_height', \('data', 'model'\)\)"),
        (["heads"], "is no pair"),
        ([("heads", "model", "data")], "is no pair"),
        ([("heads", 0)], r"'heads', 0\) names no mesh axis"),
        ([("heads", ("model", 1))], "names no mesh axis"),
    ],
)
def test_wrong_rules_are_refused_with_the_nearest_name(rules, message):
    with pytest.raises(RuleError, match=message):
        check_rules(rules, ("data", "model"))


def test_the_nearest_axis_is_one_that_the_mesh_has():
    """`model` is nearer, and known, but a rule that names it would do nothing on the first mesh."""
    with pytest.raises(RuleError, match=r"mesh axis 'modle' is unknown: valid: data, fsdp, tensor$"):
        check_rules([("embed", "modle")], ("data", "fsdp", "tensor"))
    with pytest.raises(RuleError, match="did you mean 'model'"):
        check_rules([("embed", "modle")], None)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(RuleError, match="did you mean 'fsdp_tp'"):
        complete("fsdptp", None)


def test_rows_of_feature_maps_are_cut_where_the_mesh_has_a_context():
    names = ("activation_batch", "activation_height", "activation_width", "activation_channels")
    for rules in (DEFAULT_RULES, PRESETS["context"]):
        assert resolve(names, rules, {"data": 2, "context": 4}).axes == (("data",), ("context",), (), ())
        assert resolve(names, rules, {"data": 8}).axes == (("data",), (), (), ())
    own = complete([("activation_height", ("rings", "swaps")), ("activation_width", None)], ("rings", "swaps"))
    assert resolve(names, own, {"rings": 2, "swaps": 2}).axes == ((), ("rings", "swaps"), (), ())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_answer_for_every_activation(preset):
    named = {name for name, _ in check_rules(PRESETS[preset], None)}
    assert named >= {name for name in LOGICAL_AXES if name.startswith("activation_")}
