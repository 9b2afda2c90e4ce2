"""Whole models whose stacked blocks flow through stages: outputs and gradients of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.models.flux import FLUX_SCHNELL
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel

# As for the other meshes: devices and microbatches add float32 sums in another order, through some twenty layers. For
# the output (norm of the differences over the norm), and for gradients.
FORWARD, TOLERANCE = 1e-6, 1e-5
BATCH = 4
KEYS = jax.random.split(jax.random.key(11), 6)


pytestmark = pytest.mark.whole


def unet(**keywords: Any) -> tuple[DiffusionModel, dict[str, Any]]:
    """SDXL's kind with one stack of two transformer blocks, and a call of it."""
    model = lookup("sdxl").build(
        "tiny",
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        transformer_layers_per_block=2,
        attention_head_dim=4,
        scan_layers=True,
        precision="highest",
        **keywords,
    )
    return model, {
        "sample": jax.random.normal(KEYS[0], (BATCH, 4, 4, 4)),
        "timesteps": jnp.linspace(1, 999, BATCH),
        "encoder_hidden_states": jax.random.normal(KEYS[1], (BATCH, 5, 32)),
        "added_cond_kwargs": {
            "text_embeds": jax.random.normal(KEYS[2], (BATCH, 32)),
            "time_ids": 100 * jax.random.uniform(KEYS[3], (BATCH, 6)),
        },
    }


def flux(**keywords: Any) -> tuple[DiffusionModel, dict[str, Any]]:
    """The tiny Flux: two blocks that hand on two streams, three of one stream; a mask, positions shared by all."""
    model = FLUX_SCHNELL.build("tiny", num_single_layers=3, scan_layers=True, precision="highest", **keywords)
    return model, {
        "hidden_states": jax.random.normal(KEYS[0], (BATCH, 6, 16)),
        "encoder_hidden_states": jax.random.normal(KEYS[1], (BATCH, 5, 24)),
        "pooled_projections": jax.random.normal(KEYS[2], (BATCH, 16)),
        "timestep": jnp.linspace(0.1, 0.9, BATCH),
        "img_ids": jnp.arange(18.0).reshape(6, 3) % 5,
        "txt_ids": jnp.zeros((5, 3)),
        "encoder_attention_mask": jnp.arange(5)[None] < jnp.array([[5], [3], [1], [4]]),
    }


MODELS = {"unet": unet, "flux": flux}


def run(model: DiffusionModel, inputs: dict[str, Any]) -> tuple[Any, Any, str]:
    """Output, gradients of the parameters and the compiled text."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        out = model.apply({"params": params}, **inputs).sample  # type: ignore[union-attr]
        return jnp.mean(jnp.sin(out)), out

    params = model.init_weights(jax.random.key(0))
    lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params)
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    (_, out), grads = compiled(params)
    return out, grads, compiled.as_text()


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))


def off(a: Any, b: Any) -> float:
    """Norm of the differences over the norm."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def alone() -> Callable[[str], tuple[Any, Any]]:
    """Output and gradients of a model on one device, made once."""
    made: dict[str, tuple[Any, Any]] = {}

    def result(name: str) -> tuple[Any, Any]:
        if name not in made:
            made[name] = run(*MODELS[name]())[:2]
        return made[name]

    return result


@pytest.mark.parametrize(
    ("name", "sizes", "keywords", "streams"),
    [
        ("unet", {"stage": 2, "data": 2}, {}, 1),
        pytest.param(
            "flux",
            {"stage": 2},
            {"pipeline_microbatches": 4, "remat_policy": "full"},
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flux",
            {"stage": 2, "fsdp": 2, "tensor": 2},
            {"attention_kernel": "flash", "flash_min_seq_length": 4},
            3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "flux",
            {"stage": 3},
            {"pipeline_schedule": "circular", "remat_policy": "minimal"},
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pipeline_gives_the_numbers_of_one_device(
    name: str, sizes: dict[str, int], keywords: Any, streams: int, devices: np.ndarray, alone: Any
) -> None:
    mesh = Mesh(devices[: np.prod([*sizes.values()])].reshape(*sizes.values()), tuple(sizes))
    out, grads, text = run(*MODELS[name](mesh=mesh, **keywords))
    expected, expected_grads = alone(name)
    assert off(out, expected) <= FORWARD
    worst = jax.tree.map(distance, grads, expected_grads)
    assert max(jax.tree.leaves(worst)) <= TOLERANCE, worst
    if "tensor" not in sizes and "fsdp" not in sizes:
        assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == 2 * streams
        assert not re.findall(r" all-gather(?:-start)?\(", text)


@pytest.mark.filterwarnings("ignore:.*wanted `context`, taken by activation_batch:maxdiffusion.errors.LayoutWarning")
def test_text_and_image_are_joined_inside_the_stages_as_outside(devices: np.ndarray, alone: Any) -> None:
    """Where an axis shares batch or sequence, stages have it to themselves; the rotation is put in order outside."""
    mesh = Mesh(devices.reshape(2, 2, 2), ("stage", "data", "context"))
    model, inputs = flux(mesh=mesh, logical_axis_rules=(("activation_batch", ("data", "context")),))
    params = model.init_weights(jax.random.key(0))
    out = jax.jit(lambda params: model.apply({"params": params}, **inputs).sample)(params)  # type: ignore[union-attr]
    assert off(out, alone("flux")[0]) <= FORWARD
