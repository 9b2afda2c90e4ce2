"""The registry: names, sizes, and what every model in it keeps to."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import AbstractMesh

from maxdiffusion.errors import UsageError
from maxdiffusion.models.registry import MODELS, lookup
from maxdiffusion.parallel.layout import Layout


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'sdxl'"):
        lookup("sdxxl")


def test_names_are_those_of_the_registry() -> None:
    assert {"sd15", "sd21", "sdxl"} <= set(MODELS)
    assert all(spec.name == name and spec.license for name, spec in MODELS.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_twin_is_tiny(name: str) -> None:
    shapes = jax.tree.leaves(lookup(name).build("tiny").abstract_params()[0])
    assert sum(math.prod(leaf.shape) for leaf in shapes) < 2_000_000


@pytest.mark.parametrize("name", MODELS)
def test_every_dimension_of_every_parameter_has_a_name(name: str) -> None:
    """Only kernel height and width, and the pair of a gated layer, have none."""
    shapes, names = lookup(name).build("tiny").abstract_params()

    def check(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> None:
        assert len(axes) == len(leaf.shape)
        assert all(axis is not None or size <= 5 for axis, size in zip(axes, leaf.shape, strict=True))
        assert axes[-1] is not None

    jax.tree.map(check, shapes, names)


@pytest.mark.parametrize("name", MODELS)
def test_scanning_changes_the_stacking_and_not_the_number(name: str) -> None:
    shapes, names = lookup(name).build("tiny", scan_layers=True).abstract_params()
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    plain = lookup(name).build("tiny").abstract_params()[0]
    assert count == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda leaf, axes: len(axes) == len(leaf.shape) or pytest.fail(str(axes)), shapes, names)


@pytest.mark.parametrize(
    ("name", "axis", "most"),
    [("sdxl", "fsdp", 0.130), ("sdxl", "tensor", 0.20), ("sd15", "fsdp", 0.135), ("sd15", "tensor", 0.22)],
)
def test_share_of_parameter_bytes_on_each_device(name: str, axis: str, most: float) -> None:
    shapes, names = lookup(name).build().abstract_params()
    report = Layout.of(AbstractMesh((8,), (axis,))).report(shapes, names)
    assert 0.125 <= report.share_per_device <= most
