"""The UNet against PyTorch diffusers, its inputs and refusals, its dtypes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.models import FlaxUNet2DConditionModel
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.stack import stack_params
from tests.models.torch_names import from_torch

GOLDENS = pathlib.Path(__file__).parent / "goldens"
CASES = ("sd1", "sd2", "sdxl", "classes")
# Both sides are float32: the golden's own distance to float64 is 6e-7 to 9e-7 (printed below).
GOLDEN_TOLERANCE = 1e-5


def golden(case: str, **keywords: Any) -> tuple[FlaxUNet2DConditionModel, dict, dict, Any]:
    """The model, its weights, the inputs of a call, and the file."""
    file = np.load(GOLDENS / f"unet_{case}.npz")
    model = FlaxUNet2DConditionModel.from_config(json.loads(str(file["config"])), precision="highest", **keywords)
    names = {name: tuple(shape) for name, shape in json.loads(str(file["parameters"])).items()}
    params = from_torch(names, model.clone(scan_layers=False).abstract_params()[0])
    inputs = {name.removeprefix("input_"): file[name] for name in file.files if name.startswith("input_")}
    added = {name: inputs.pop(name) for name in ("text_embeds", "time_ids") if name in inputs}
    return model, params, inputs | ({"added_cond_kwargs": added} if added else {}), file


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("case", CASES)
def test_golden_of_pytorch(case: str, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, params, inputs, file = golden(case)
    ours = jax.jit(model.apply)({"params": params}, **inputs).sample
    figures = {
        "to the original": distance(ours, file["float32"]),
        "ours to float64": distance(ours, file["float64"]),
        "the original to float64": distance(file["float32"], file["float64"]),
    }
    for name, value in figures.items():
        record_property(name, value)
    with capsys.disabled():
        line = ", ".join(f"{name} {value:.1e}" for name, value in figures.items())
        print(f"\n{case}: {line} ({json.loads(str(file['versions']))})")  # noqa: T201
    assert figures["to the original"] <= GOLDEN_TOLERANCE
    assert figures["ours to float64"] <= GOLDEN_TOLERANCE


def test_the_goldens_see_a_swap_of_heads_and_gates() -> None:
    """The tolerance means something only if mistakes are far above it."""
    model, params, inputs, file = golden("sd1")
    apply = jax.jit(model.apply)
    attention = params["down_blocks_0"]["attentions_0"]["transformer_blocks_0"]
    query, gates = attention["attn1"]["to_q"], attention["ff"]["net_0"]["proj"]
    for layer, axis in ((query, 1), (gates, 1)):
        right = layer["kernel"]
        layer["kernel"] = np.flip(right, axis)
        assert distance(apply({"params": params}, **inputs).sample, file["float32"]) > 100 * GOLDEN_TOLERANCE
        layer["kernel"] = right


def test_scanned_blocks_give_the_same_numbers() -> None:
    model, params, inputs, file = golden("sdxl", scan_layers=True)
    stacked = stack_params(params, "transformer_blocks")
    shapes = model.abstract_params()[0]
    assert jax.tree.map(lambda leaf: leaf.shape, stacked) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    ours = jax.jit(model.apply)({"params": stacked}, **inputs).sample
    assert distance(ours, file["float32"]) <= GOLDEN_TOLERANCE


def tiny(**keywords: Any) -> FlaxUNet2DConditionModel:
    """A model of one level without attention, which compiles at once."""
    config = {
        "block_out_channels": (8,),
        "down_block_types": ("DownBlock2D",),
        "mid_block_type": None,
        "up_block_types": ("UpBlock2D",),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return FlaxUNet2DConditionModel(**{**config, **keywords})


def test_one_time_serves_the_batch_and_integers_equal_floats() -> None:
    model = tiny()
    params = {"params": model.init_weights(jax.random.key(0))}
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, 4))
    apply = jax.jit(model.apply)
    one = apply(params, x, 7).sample
    for times in (7.0, jnp.array([7, 7]), np.array([7.0, 7.0], np.float32)):
        np.testing.assert_allclose(apply(params, x, times).sample, one, rtol=0, atol=1e-6)
    each = apply(params, x, jnp.array([7, 500])).sample
    np.testing.assert_allclose(each[0], one[0], rtol=0, atol=1e-6)
    assert np.abs(each[1] - one[1]).max() > 1e-3


def test_output_passes_through_jit_and_names_its_sample() -> None:
    model = tiny(out_channels=6)
    params = {"params": model.init_weights(jax.random.key(0))}
    out = jax.eval_shape(model.apply, params, jnp.ones((1, 4, 3, 5)), 1)
    assert out.sample.shape == (1, 6, 3, 5)


def test_bfloat16_under_strict_promotion() -> None:
    model, params, inputs, file = golden("sdxl", dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    with jax.numpy_dtype_promotion("strict"):
        ours = jax.jit(model.apply)({"params": params}, **inputs).sample
    assert ours.dtype == jnp.bfloat16
    # Each of about 50 roundings in a row is off by at most 2**-9: 2**-9 * sqrt(50) = 1.4 %, and the worst of 432
    # values lies some three times further out.
    assert distance(ours, file["float32"]) < 5e-2


TEXT = jnp.ones((2, 5, 32))
POOLED = {"text_embeds": jnp.ones((2, 32)), "time_ids": jnp.ones((2, 6))}


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("sd15", {"sample": jnp.ones((2, 8, 8, 4))}, "this model takes (batch, 4, height, width)"),
        ("sd15", {"timesteps": jnp.ones((3,))}, "give one time, or one for each of 2 examples"),
        ("sd15", {"encoder_hidden_states": None}, "encoder_hidden_states is missing"),
        ("sd15", {"sample": jnp.ones((2, 4, 0, 8))}, "has shape (2, 4, 0, 8), but this model takes"),
        ("sd15", {"encoder_hidden_states": jnp.ones((2, 5, 31))}, "this model takes (batch 2, tokens, 32)"),
        ("sd15", {"encoder_hidden_states": jnp.ones((2, 0, 32))}, "(batch 2, tokens, 32), 1 token or more"),
        ("sd15", {"class_labels": jnp.ones((2,))}, "class_labels is of no use"),
        ("sd15", {"added_cond_kwargs": POOLED}, "added_cond_kwargs (text_embeds, time_ids) is of no use"),
        ("sd15", {"encoder_attention_mask": jnp.ones((2, 4), bool)}, "a mask of shape (2, 5)"),
        ("sd15", {"encoder_attention_mask": jnp.ones((2, 5))}, "give booleans"),
        ("sdxl", {}, "lacks text_embeds and time_ids"),
        ("sdxl", {"added_cond_kwargs": {"text_embeds": jnp.ones((2, 32))}}, "lacks time_ids"),
        ("sdxl", {"added_cond_kwargs": {**POOLED, "time_ids": jnp.ones((2, 5))}}, "make 72, but this model takes 80"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(model: str, change: dict[str, Any], message: str) -> None:
    call = {"sample": jnp.ones((2, 4, 8, 8)), "timesteps": 1, "encoder_hidden_states": TEXT, **change}
    unet = lookup(model).build("tiny")
    with pytest.raises(UsageError) as caught:
        jax.eval_shape(lambda: unet.init(jax.random.key(0), **call))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("timestep", jnp.array([3.0, 5.0])),
        ("identity", jnp.ones((2, 32))),
        ("projection", jnp.ones((2, 12))),
        ("simple_projection", jnp.ones((2, 12))),
    ],
)
def test_class_embeddings_have_the_originals_parameters(kind: str, labels: jax.Array) -> None:
    model = tiny(class_embed_type=kind, projection_class_embeddings_input_dim=12)
    shapes = model.abstract_params()[0]
    found = jax.tree.map(lambda leaf: leaf.shape, shapes.get("class_embedding", {}))
    two_layers = {"linear_2": {"kernel": (32, 32), "bias": (32,)}}
    expected = {
        "timestep": {"linear_1": {"kernel": (8, 32), "bias": (32,)}, **two_layers},
        "identity": {},
        "projection": {"linear_1": {"kernel": (12, 32), "bias": (32,)}, **two_layers},
        "simple_projection": {"kernel": (12, 32), "bias": (32,)},
    }
    assert found == expected[kind]
    x = jnp.ones((2, 4, 4, 4))
    assert jax.eval_shape(model.apply, {"params": shapes}, x, 1, class_labels=labels).sample.shape == x.shape
    with pytest.raises(UsageError, match="class_labels is missing"):
        jax.eval_shape(model.apply, {"params": shapes}, x, 1)
