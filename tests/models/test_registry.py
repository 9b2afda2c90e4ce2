"""The registry: names, sizes, and what every model in it keeps to."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.errors import UsageError
from maxdiffusion.models.registry import MODELS, lookup


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'sdxl'"):
        lookup("sdxxl")


def test_names_are_those_of_the_registry() -> None:
    assert {"sd15", "sd21", "sdxl", "flux-dev", "flux-schnell"} <= set(MODELS)
    assert all(spec.name == name and spec.license for name, spec in MODELS.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_twin_is_tiny(name: str) -> None:
    shapes = jax.tree.leaves(lookup(name).build("tiny").abstract_params()[0])
    assert sum(math.prod(leaf.shape) for leaf in shapes) < 2_000_000


@pytest.mark.parametrize("name", MODELS)
def test_every_dimension_of_every_parameter_has_a_name(name: str) -> None:
    """Only kernel height and width, and the parts of a gated or modulating layer, have none."""
    shapes, names = lookup(name).build("tiny").abstract_params()

    def check(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> None:
        assert len(axes) == len(leaf.shape)
        assert all(axis is not None or size <= 6 for axis, size in zip(axes, leaf.shape, strict=True))
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
    "name", [pytest.param(name, marks=() if name in ("sdxl", "flux-dev") else pytest.mark.slow) for name in MODELS]
)
def test_arrays_of_an_explicit_mesh_are_taken_and_given(name: str, devices: np.ndarray) -> None:
    """In the caller's own types, under `jax.set_mesh` as well; with the numbers of one device."""
    spec = lookup(name)
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=devices)
    plain, model = spec.build("tiny", precision="highest"), spec.build("tiny", precision="highest", mesh=mesh)
    params = plain.init_weights(jax.random.key(0))
    draw = np.random.default_rng(0)

    def example(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (8, *leaf.shape[1:])
        if leaf.dtype == np.float32:
            return draw.standard_normal(shape, np.float32)
        return np.ones(shape, leaf.dtype)

    inputs = jax.tree.map(example, model.dummy_inputs())
    wanted = jax.tree.leaves(jax.jit(plain.apply)({"params": params}, **inputs))[0]
    placed = jax.device_put(inputs, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        got = jax.tree.leaves(jax.jit(model.apply)({"params": model.init_weights(jax.random.key(0))}, **placed))[0]
    assert AxisType.Explicit in got.sharding.mesh.axis_types
    # float32 sums in another order
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", MODELS)
def test_inputs_of_the_usual_size_are_taken(name: str) -> None:
    model = lookup(name).build("tiny")
    inputs, smallest = model.usual_inputs(), model.dummy_inputs()
    assert jax.tree.map(lambda leaf: leaf.ndim, inputs) == jax.tree.map(lambda leaf: leaf.ndim, smallest)
    params = {"params": model.abstract_params()[0]}
    jax.eval_shape(lambda params, inputs: model.apply(params, **inputs), params, inputs)
