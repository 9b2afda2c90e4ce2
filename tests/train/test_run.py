"""A training is the same on every mesh."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from tests.train.conftest import losses_of, make_subject

STEPS = 20
MESHES = {
    "data 8": lambda: build_mesh(MeshSpec(data=8)),
    "fsdp 8": lambda: build_mesh(MeshSpec(fsdp=8, data=1)),
    "data 4, tensor 2": lambda: build_mesh(MeshSpec(data=4, tensor=2)),
    "by hand (data, model)": lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")),
    "by hand, Explicit": lambda: jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    ),
}


@pytest.fixture(scope="module")
def alone(one_device: Mesh) -> np.ndarray:
    return losses_of(make_subject(one_device), STEPS)


def test_the_losses_fall(alone: np.ndarray) -> None:
    assert alone[-5:].mean() < 0.9 * alone[:5].mean()


@pytest.mark.parametrize("name", MESHES)
def test_loss_curves_are_equal_on_every_mesh(name: str, alone: np.ndarray) -> None:
    # The bound of the specification, in float32 over 20 steps.
    np.testing.assert_allclose(losses_of(make_subject(MESHES[name]()), STEPS), alone, rtol=1e-5)
