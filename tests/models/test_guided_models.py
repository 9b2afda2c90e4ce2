"""Guidance around whole models: both halves at once, one after the other, or parted along `cfg`: the same samples.

Guidance by a second call, beside the scale that FLUX.1 [dev] knows by distillation: that is an input like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.diffusion.grid import Spacing, make_grid
from maxdiffusion.diffusion.guidance import CondPair, classifier_free
from maxdiffusion.diffusion.prediction import Prediction
from maxdiffusion.diffusion.process import FlowMatching, Process, VariancePreserving
from maxdiffusion.diffusion.sample import sample
from maxdiffusion.diffusion.solvers import get_solver
from maxdiffusion.kernels.flops import flops_of_gradients
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel

pytestmark = pytest.mark.whole

SCALE, STEPS, SAMPLES, TEXT = 3.0, 2, 2, 8
# A prediction is held to 1e-6 elsewhere; guidance adds the errors of 3 positive and 2 negative ones, and each of two
# steps makes such a prediction, the second from what the first one made. Norm of the differences over the norm; found
# are at most 1.0e-6 for the UNet and 5.0e-7 for FLUX.1.
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, what its samples are, and how it is asked: `(noisy, timestep, condition) -> keywords of its call`."""

    name: str
    process: Process
    spacing: Spacing
    prediction: Prediction
    shape: tuple[int, ...]
    call: Callable[[Any, Any, Any], dict[str, Any]]
    cond: Callable[[Any], dict[str, Any]]


def flux_cond(key: Any) -> dict[str, Any]:
    """Text of another length in each half and sample: what is padded is hidden."""
    keys = jax.random.split(key, 3)
    return {
        "encoder_hidden_states": jax.random.normal(keys[0], (SAMPLES, TEXT, 24)),
        "pooled_projections": jax.random.normal(keys[1], (SAMPLES, 16)),
        "encoder_attention_mask": jnp.arange(TEXT)[None] < jax.random.randint(keys[2], (SAMPLES, 1), 1, TEXT + 1),
        "guidance": jnp.full((SAMPLES,), 3.5),
    }


def flux_call(x: Any, timestep: Any, cond: Any) -> dict[str, Any]:
    rows, columns = np.meshgrid(np.arange(4.0), np.arange(2.0), indexing="ij")
    ids = np.stack([np.zeros_like(rows), rows, columns], axis=-1).reshape(8, 3).astype(np.float32)
    return {"hidden_states": x, "timestep": timestep, "img_ids": ids, "txt_ids": np.zeros((TEXT, 3), np.float32)} | cond


KINDS = {
    "sd15": Kind(
        name="sd15",
        process=VariancePreserving(),
        spacing="trailing",
        prediction="epsilon",
        shape=(4, 8, 8),
        call=lambda x, timestep, cond: {"sample": x, "timesteps": timestep} | cond,
        cond=lambda key: {"encoder_hidden_states": jax.random.normal(key, (SAMPLES, TEXT, 32))},
    ),
    "flux-dev": Kind(
        name="flux-dev",
        process=FlowMatching(timestep_scale=1),
        spacing="uniform",
        prediction="velocity",
        shape=(8, 16),
        call=flux_call,
        cond=flux_cond,
    ),
}


class Drawing:
    """Samples of a kind on a mesh, and what it took to make them."""

    def __init__(self, kind: Kind, mesh: Mesh | None, *, mode: Any = "batched", scale: float = SCALE) -> None:
        self.model: DiffusionModel = lookup(kind.name).build("tiny", precision="highest", mesh=mesh)
        self.rows: list[int] = []
        self._kind, self._mode, self._scale = kind, mode, scale
        self._compiled: Callable[..., Any] | None = None

    def draw(self, params: Any, x: Any, cond: CondPair) -> Any:
        """Samples from noise, by `STEPS` steps."""
        kind, grid = self._kind, make_grid(self._kind.process, STEPS, self._kind.spacing)

        def denoise(cache: Any, x: Any, timestep: Any, cond: Any) -> Any:
            self.rows.append(x.shape[0])
            out: Any = self.model.apply({"params": params}, **kind.call(x, timestep, cond))
            return cache, out.sample

        guided = classifier_free(denoise, scale=self._scale, mode=self._mode)
        return sample(guided, x, grid, cond, solver=get_solver("euler"), prediction=kind.prediction).x

    def __call__(self, params: Any, x: Any, cond: CondPair) -> Any:
        if self._compiled is None:
            options = {"xla_backend_optimization_level": 0}
            self._compiled = jax.jit(self.draw).lower(params, x, cond).compile(compiler_options=options)
        return self._compiled(params, x, cond)


@pytest.fixture(scope="module")
def given() -> Callable[[str], tuple[Any, Any, CondPair]]:
    """Weights, noise and both conditions of a kind."""

    @functools.cache
    def made(name: str) -> tuple[Any, Any, CondPair]:
        kind, keys = KINDS[name], jax.random.split(jax.random.key(5), 4)
        params = jax.device_get(Drawing(kind, None).model.init_weights(keys[0]))
        x = jax.random.normal(keys[1], (SAMPLES, *kind.shape)) * kind.process.prior_std
        return params, x, CondPair(positive=kind.cond(keys[2]), negative=kind.cond(keys[3]))

    return made


@pytest.fixture(scope="module")
def alone(given: Any) -> Callable[[str], np.ndarray]:
    """Samples of one device, by two calls a step."""
    return functools.cache(lambda name: np.asarray(Drawing(KINDS[name], None, mode="sequential")(*given(name))))


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "cfg=2": (("cfg",), (2,)),
    "cfg=2,context=2": (("cfg", "context"), (2, 2)),
    "cfg=2,context=4": (("cfg", "context"), (2, 4)),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("mesh", ["cfg=2", "cfg=2,context=2", pytest.param("cfg=2,context=4", marks=SLOW)])
@pytest.mark.parametrize(
    ("mode", "samples"),
    [
        # Two rows on two devices: the halves of the one sample part along `cfg`.
        ("batched", 1),
        # The halves come one after the other, each with both samples along `cfg`.
        ("sequential", 2),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_guided_samples_are_those_of_one_device_by_two_calls(
    name: str, mode: str, samples: int, mesh: str, devices: np.ndarray, given: Any, alone: Any
) -> None:
    params, x, cond = given(name)
    axes, shape = MESHES[mesh]
    drawing = Drawing(KINDS[name], Mesh(devices[: np.prod(shape)].reshape(shape), axes), mode=mode)
    assert drawing.model.layout.rows(2).spec == jax.P("cfg")  # type: ignore[union-attr]
    found = drawing(params, *jax.tree.map(lambda leaf: leaf[:samples], (x, cond)))
    assert drawing.rows == ([2] if mode == "batched" else [2, 2])
    assert distance(found, alone(name)[:samples]) <= TOLERANCE


@pytest.mark.parametrize("name", KINDS)
def test_both_halves_in_one_call_are_two_calls(name: str, given: Any, alone: Any) -> None:
    params, x, cond = given(name)
    drawing = Drawing(KINDS[name], None)
    assert distance(drawing(params, x, cond), alone(name)) <= TOLERANCE
    # The tolerance means something: the halves are far from one another.
    swapped = CondPair(positive=cond.negative, negative=cond.positive)
    assert distance(drawing(params, x, swapped), alone(name)) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", KINDS)
def test_a_scale_of_one_is_one_half(name: str, devices: np.ndarray, given: Any) -> None:
    """Nothing is compiled: the rows that the network is called on, and the FLOPs of its products."""
    params, x, cond = given(name)

    def work(scale: float, mode: str, cond: CondPair, mesh: Mesh | None = None) -> tuple[list[int], int]:
        drawing = Drawing(KINDS[name], mesh, mode=mode, scale=scale)
        flops = flops_of_gradients(lambda _, *args: drawing.draw(*args), (), params, x, cond)
        return drawing.rows, flops

    both, one_by_one = work(SCALE, "batched", cond), work(SCALE, "sequential", cond)
    assert (both[0], one_by_one[0]) == ([2 * SAMPLES], [SAMPLES, SAMPLES])
    for scale in (1, 1.0):
        for mode in ("batched", "sequential"):
            rows, flops = work(scale, mode, CondPair(positive=cond.positive, negative=None))
            assert rows == [SAMPLES]
            assert 2 * flops == both[1] == one_by_one[1]
    assert work(1, "batched", cond, Mesh(devices[:2], ("cfg",)))[0] == [SAMPLES]
