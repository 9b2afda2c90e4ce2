"""Which exchange is chosen, with which degrees, and what is said of it."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.context import Plan, plan_context
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import AttentionSpec


def _plan(
    heads: int,
    spec: AttentionSpec | None = None,
    rules: list | None = None,
    *,
    lengths: tuple[int, int] = (64, 64),
    full_mask: bool = False,
    **sizes: int,
) -> Plan:
    layout = Layout.of(AbstractMesh(tuple(sizes.values()), tuple(sizes)), rules)
    q_shape, k_shape = ((8, length, heads, 16) for length in lengths)
    return plan_context(q_shape, k_shape, spec=spec or AttentionSpec(), layout=layout, full_mask=full_mask)


@pytest.mark.parametrize(
    ("heads", "sizes", "chosen", "why"),
    [
        (8, {"context": 8}, ("ulysses", 1, 8), "context=8: ulysses, as the heads of a device (8) divide by 8"),
        (10, {"context": 8}, ("hybrid", 4, 2), "ulysses 2 x ring 4, as the heads of a device (10) divide by 2 and not"),
        (5, {"context": 4}, ("ring", 4, 1), "the heads of a device (5) and the 4 devices share no divisor"),
        (56, {"context": 4, "tensor": 2}, ("ulysses", 1, 4), "(28 = 56 / tensor 2) divide by 4"),
        (56, {"context": 4, "tensor": 4}, ("hybrid", 2, 2), "(14 = 56 / tensor 4) divide by 2 and not by 4"),
        (6, {"context": 4, "model": 2}, ("ring", 4, 1), "(3 = 6 / model 2)"),
    ],
)
def test_auto_takes_the_largest_degree_that_the_heads_of_a_device_allow(
    heads: int, sizes: dict[str, int], chosen: tuple[str, int, int], why: str
) -> None:
    plan = _plan(heads, **sizes)
    assert (plan.strategy, plan.ring, plan.ulysses) == chosen
    assert why in plan.reason and plan.travels


def test_two_mesh_axes_are_a_grid_whose_inner_axis_swaps() -> None:
    rules = [("activation_length", ("rings", "swaps"))]
    plan = _plan(8, None, rules, rings=2, swaps=4)
    assert (plan.strategy, plan.ring, plan.ulysses, plan.axes) == ("hybrid", 2, 4, ("rings", "swaps"))
    assert "sequence over rings=2,swaps=4: ulysses 4 x ring 2" in plan.reason
    assert (_plan(6, None, rules, rings=2, swaps=4).ulysses) == 2  # 6 heads do not divide by 4


@pytest.mark.parametrize(
    ("spec", "sizes", "chosen"),
    [
        (AttentionSpec(context="ring"), {"context": 4}, ("ring", 4, 1)),
        (AttentionSpec(context="gather"), {"context": 4}, ("gather", 1, 1)),
        (AttentionSpec(context="ulysses"), {"context": 4}, ("ulysses", 1, 4)),
        (AttentionSpec(context="hybrid"), {"context": 4}, ("hybrid", 2, 2)),
        (AttentionSpec(context="hybrid"), {"context": 2}, ("ulysses", 1, 2)),
        (AttentionSpec(context="hybrid", ulysses=2), {"context": 8}, ("hybrid", 4, 2)),
        (AttentionSpec(context="hybrid", ulysses=1), {"context": 8}, ("ring", 8, 1)),
        (AttentionSpec(context="ring"), {"data": 8}, ("local", 1, 1)),
    ],
)
def test_a_wish_is_met(spec: AttentionSpec, sizes: dict[str, int], chosen: tuple[str, int, int]) -> None:
    plan = _plan(8, spec, **sizes)
    assert (plan.strategy, plan.ring, plan.ulysses) == chosen


@pytest.mark.parametrize(
    ("heads", "spec", "sizes", "line"),
    [
        (
            6,
            AttentionSpec(context="ulysses"),
            {"context": 4, "model": 2},
            r"^sequence over context=4: a Ulysses degree of 4 does not divide the heads of a device "
            r"\(3 = 6 / model 2\): 3 % 4 = 3; write context_attention='ring'",
        ),
        (
            6,
            AttentionSpec(context="ulysses"),
            {"context": 4},
            "6 % 4 = 2; the nearest legal degree is 2: write context_attention='hybrid' with ulysses_degree=2",
        ),
        (
            8,
            AttentionSpec(context="hybrid", ulysses=3),
            {"context": 4},
            "ulysses_degree=3 does not divide the 4 devices",
        ),
        (
            4,
            AttentionSpec(context="hybrid", ulysses=8),
            {"context": 8},
            "nearest legal degree is 4: .*ulysses_degree=4",
        ),
    ],
)
def test_a_degree_that_cannot_be_is_refused_with_the_nearest(
    heads: int, spec: AttentionSpec, sizes: dict[str, int], line: str
) -> None:
    with pytest.raises(UsageError, match=line) as error:
        _plan(heads, spec, **sizes)
    assert "\n" not in str(error.value)


def test_keys_of_another_sequence_stay_whole_unless_they_lie_beside_the_queries() -> None:
    plan = _plan(8, AttentionSpec(context="ring"), lengths=(64, 77), context=4)
    assert plan.strategy == "local" and "the 77 keys of another sequence are whole" in plan.reason
    beside = _plan(8, None, [("activation_kv_length", "context")], lengths=(64, 77), context=4)
    assert beside.strategy == "ulysses"


def test_keys_of_the_same_sequence_lie_where_the_queries_lie_whatever_the_rule_of_keys() -> None:
    assert _plan(8, None, [("activation_kv_length", None)], context=4).strategy == "ulysses"


def test_a_full_mask_gathers() -> None:
    plan = _plan(8, full_mask=True, context=4)
    assert plan.strategy == "gather" and "full mask" in plan.reason
