"""FLUX.1's transformer against PyTorch diffusers, its size, its inputs and refusals, its dtypes, its stacks."""

from __future__ import annotations

import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.models import FlaxFluxTransformer2DModel
from maxdiffusion.models.flux import DOUBLE_BLOCKS, FLUX_DEV, FLUX_SCHNELL, SINGLE_BLOCKS
from maxdiffusion.models.spec import ModelSpec
from maxdiffusion.nn.stack import stack_params
from tests.models.torch_names import from_torch

GOLDENS = pathlib.Path(__file__).parent / "goldens"
CASES = ("dev", "schnell")
# Both sides are float32: the golden's own distance to float64 is printed below.
GOLDEN_TOLERANCE = 1e-5


def golden(case: str, **keywords: Any) -> tuple[FlaxFluxTransformer2DModel, dict, dict, Any]:
    """The model, its weights (unrolled), the inputs of a call, and the file."""
    file = np.load(GOLDENS / f"flux_{case}.npz")
    model = FlaxFluxTransformer2DModel.from_config(json.loads(str(file["config"])), precision="highest", **keywords)
    names = {name: tuple(shape) for name, shape in json.loads(str(file["parameters"])).items()}
    params = from_torch(names, model.clone(scan_layers=False).abstract_params()[0])
    inputs = {name.removeprefix("input_"): file[name] for name in file.files if name.startswith("input_")}
    return model, params, inputs, file


def stacked(params: dict) -> dict:
    return stack_params(stack_params(params, DOUBLE_BLOCKS), SINGLE_BLOCKS)


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("case", CASES)
def test_golden_of_pytorch(case: str, scanned: bool, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, params, inputs, file = golden(case, scan_layers=scanned)
    ours = jax.jit(model.apply)({"params": stacked(params) if scanned else params}, **inputs).sample
    figures = {
        "to the original": distance(ours, file["float32"]),
        "ours to float64": distance(ours, file["float64"]),
        "the original to float64": distance(file["float32"], file["float64"]),
    }
    for name, value in figures.items():
        record_property(name, value)
    with capsys.disabled():
        line = ", ".join(f"{name} {value:.1e}" for name, value in figures.items())
        print(f"\nflux {case}: {line} ({json.loads(str(file['versions']))})")  # noqa: T201
    assert figures["to the original"] <= GOLDEN_TOLERANCE
    assert figures["ours to float64"] <= GOLDEN_TOLERANCE


@pytest.fixture(scope="module")
def schnell() -> tuple[Any, dict, dict, np.ndarray]:
    """A compiled call, weights and inputs of the case with a mask, and its output."""
    model, params, inputs, _ = golden("schnell")
    apply = jax.jit(lambda params, inputs: model.apply({"params": params}, **inputs).sample)
    return apply, params, inputs, np.asarray(apply(params, inputs))


def test_the_goldens_see_a_swap_of_heads_parts_and_axes(schnell: tuple[Any, dict, dict, np.ndarray]) -> None:
    """The tolerance means something only if mistakes are far above it."""
    apply, params, inputs, expected = schnell
    double, single = params["transformer_blocks_0"], params["single_transformer_blocks_0"]
    swaps = [
        (double["attn"]["add_q_proj"], 1),
        (double["norm1_context"]["linear"], 1),
        (single["attn"]["to_k"], 2),
        (single["proj_out_attn"], 0),
        (params["norm_out"]["linear"], 1),
    ]
    for layer, axis in swaps:
        right = layer["kernel"]
        layer["kernel"] = np.flip(right, axis)
        assert distance(apply(params, inputs), expected) > 100 * GOLDEN_TOLERANCE
        layer["kernel"] = right
    turned = {**inputs, "img_ids": inputs["img_ids"][:, [0, 2, 1]]}
    assert distance(apply(params, turned), expected) > 100 * GOLDEN_TOLERANCE


def test_hidden_text_tokens_change_nothing(schnell: tuple[Any, dict, dict, np.ndarray]) -> None:
    apply, params, inputs, expected = schnell
    hidden = ~inputs["encoder_attention_mask"][:, :, None]
    text = np.where(hidden, 7 - inputs["encoder_hidden_states"], inputs["encoder_hidden_states"])
    np.testing.assert_array_equal(apply(params, {**inputs, "encoder_hidden_states": text}), expected)
    text = np.where(hidden, inputs["encoder_hidden_states"], 7 - inputs["encoder_hidden_states"])
    assert distance(apply(params, {**inputs, "encoder_hidden_states": text}), expected) > 1e-2


def test_ids_of_each_example_are_those_of_all(schnell: tuple[Any, dict, dict, np.ndarray]) -> None:
    apply, params, inputs, expected = schnell
    ids = np.broadcast_to(inputs["img_ids"], (2, *inputs["img_ids"].shape)).astype(np.int32)
    assert distance(apply(params, {**inputs, "img_ids": ids}), expected) <= 1e-6


@pytest.mark.parametrize(("spec", "parameters"), [(FLUX_DEV, 11_901_408_320), (FLUX_SCHNELL, 11_891_178_560)])
def test_parameter_count_is_the_originals(spec: ModelSpec, parameters: int) -> None:
    """Counted by diffusers 0.42.1 on PyTorch's meta device."""
    shapes = spec.build(scan_layers=True).abstract_params()[0]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters


DEEP = (19, 38)
"""Double and single blocks of FLUX.1."""


def step(depths: tuple[int, int], **keywords: Any) -> Any:
    """The lowered gradient of a tiny Flux of scanned blocks."""
    model = FLUX_DEV.build(
        "tiny",
        num_layers=depths[0],
        num_single_layers=depths[1],
        scan_layers=True,
        remat_policy="full",
        **keywords,
    )
    shapes, inputs = model.abstract_params()[0], model.dummy_inputs()

    def loss(params: Any, inputs: Any) -> jax.Array:
        return jnp.sum(model.apply({"params": params}, **inputs).sample)  # type: ignore[union-attr]

    return jax.jit(jax.grad(loss)).lower(shapes, inputs)


def test_a_scanned_program_does_not_grow_with_depth() -> None:
    """Neither what is handed to the compiler, nor what it makes of it."""
    # Two stacks of one depth would share a few of their functions.
    shallow, deep = step((2, 3)), step(DEEP)
    assert len(deep.as_text().splitlines()) == len(shallow.as_text().splitlines())

    def instructions(lowered: Any) -> int:
        return sum(" = " in line for line in lowered.compile().as_text().splitlines())

    # They are as many here; another compiler may treat arrays of another length a little differently.
    assert instructions(deep) <= 1.02 * instructions(shallow)


@pytest.mark.slow
def test_time_to_compile_does_not_grow_with_depth() -> None:
    """57 blocks at most 1.3 times 4, traced and compiled: the best of three each, by turns, none from a cache."""
    shallow = (2, 2)
    kept = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    times: dict[tuple[int, int], list[float]] = {shallow: [], DEEP: []}
    try:
        for depths in (shallow, DEEP) * 3:
            began = time.perf_counter()
            step(depths).compile()
            times[depths].append(time.perf_counter() - began)
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        reset_cache()
    assert min(times[DEEP]) <= 1.3 * min(times[shallow]), times


def test_bfloat16_under_strict_promotion() -> None:
    model, params, inputs, file = golden("schnell", dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16, scan_layers=True)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), stacked(params))
    with jax.numpy_dtype_promotion("strict"):
        ours = jax.jit(model.apply)({"params": params}, **inputs).sample
    assert ours.dtype == jnp.bfloat16
    # About 40 roundings in a row, each off by at most 2**-9: 2**-9 * sqrt(40) = 1.2 %, and the worst of 192 values lies
    # some three times further out.
    assert distance(ours, file["float32"]) < 5e-2


def test_float16_warns() -> None:
    with pytest.warns(MaxDiffusionWarning, match="write dtype=bfloat16"):
        FLUX_SCHNELL.build("tiny", dtype="float16")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layer": 3}, "'num_layer' is no keyword of FlaxFluxTransformer2DModel: did you mean 'num_layers'"),
        ({"num_layers": 0}, "num_layers=0: write a whole number, 1 or more"),
        ({"out_channels": 1.5}, "out_channels=1.5: write a whole number"),
        ({"axes_dims_rope": [2, 2, 2]}, "add up to attention_head_dim=8, but add up to 6"),
        ({"axes_dims_rope": [1, 3, 4]}, "must be even numbers"),
    ],
)
def test_a_keyword_that_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        FlaxFluxTransformer2DModel.from_config({**FLUX_DEV.tiny, "_class_name": "FluxTransformer2DModel", **config})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (
            FLUX_DEV,
            {"hidden_states": (2, 4, 15)},
            "hidden_states has shape (2, 4, 15), but this call takes (1 or more, 1 or more,",
        ),
        (FLUX_DEV, {"hidden_states": (4, 16)}, "(1 or more, 1 or more, 16): batch, image tokens, in_channels"),
        (FLUX_DEV, {"encoder_hidden_states": (3, 5, 24)}, "this call takes (2, 1 or more, 24)"),
        (FLUX_DEV, {"encoder_hidden_states": (2, 0, 24)}, "(2, 0, 24), but this call takes (2, 1 or more, 24)"),
        (FLUX_DEV, {"pooled_projections": (2, 5, 16)}, "this call takes (2, 16)"),
        (FLUX_DEV, {"timestep": (3,)}, "timestep has shape (3,): give one number, or one for each of 2"),
        (FLUX_DEV, {"guidance": (2, 1)}, "guidance has shape (2, 1)"),
        (FLUX_DEV, {"guidance": None}, "guidance is missing"),
        (FLUX_SCHNELL, {}, "guidance is of no use"),
        (FLUX_DEV, {"img_ids": (5, 3)}, "img_ids has shape (5, 3), but this call takes (4, 3): tokens, axes"),
        (FLUX_DEV, {"txt_ids": (1, 5, 3)}, "this call takes (2, 5, 3): batch, tokens, axes"),
        (FLUX_DEV, {"encoder_attention_mask": (2, 4)}, "this call takes (2, 5): batch, text tokens"),
        (FLUX_DEV, {"encoder_attention_mask": (2, 5)}, "encoder_attention_mask has dtype float32: give booleans"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(spec: ModelSpec, change: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {
        "hidden_states": (2, 4, 16),
        "encoder_hidden_states": (2, 5, 24),
        "pooled_projections": (2, 16),
        "timestep": (),
        "img_ids": (4, 3),
        "txt_ids": (5, 3),
        "guidance": (2,),
    }
    call = {k: None if shape is None else jnp.ones(shape) for k, shape in {**shapes, **change}.items()}
    model = spec.build("tiny")
    with pytest.raises(UsageError) as caught:
        jax.eval_shape(lambda: model.init(jax.random.key(0), **call))
    assert message in str(caught.value)
