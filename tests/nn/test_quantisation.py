"""What the ledger says is what the program multiplies, and expressions that do nothing are refused."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.stored import is_stored
from maxdiffusion.log import say_once
from maxdiffusion.models.registry import MODELS, lookup
from maxdiffusion.nn.quantisation import QuantRow, checked, stored_bytes
from maxdiffusion.parallel.report import path_name
from maxdiffusion.specs import QuantSpec

SMALL = {"int8": "i8", "fp8": "f8E4M3FN", "fp8_full": "f8E4M3FN"}
"""Operands of the forward pass, as StableHLO calls them."""


def _lowered(model: Any, gradients: bool = False) -> Any:
    """A call of a model, or the gradients of one, lowered; nothing is compiled."""
    shapes, _ = model.abstract_params()
    inputs = model.call_shapes(2, height=8, width=8, text=4)

    def call(params: Any, inputs: Any) -> Any:
        return jnp.sum(jax.tree.leaves(model.apply({"params": params}, **inputs))[0])

    return jax.jit(jax.grad(call) if gradients else call).lower(shapes, inputs)


def _products(text: str, dtype: str) -> int:
    """Products and convolutions of StableHLO with two operands of a dtype."""
    return len(re.findall(rf"(?:dot_general|convolution).*\(tensor<[0-9x]*x{dtype}>, tensor<[0-9x]*x{dtype}>\)", text))


@pytest.mark.parametrize("name", ["flux-dev", "pictures"])
@pytest.mark.parametrize("mode", list(SMALL))
def test_the_program_multiplies_what_the_ledger_says(name: str, mode: str) -> None:
    model = lookup(name).build("tiny", quantization=mode)
    rows = model.ledger()
    done = sum(row.mode == mode for row in rows)
    assert len(rows) // 2 < done < len(rows)
    assert _products(_lowered(model).as_text(), SMALL[mode]) == done


def test_the_gradients_of_fp8_full_have_two_small_products_a_layer() -> None:
    model = lookup("flux-dev").build("tiny", quantization="fp8_full")
    done = sum(row.mode is not None for row in model.ledger())
    text = _lowered(model, gradients=True).as_text()
    assert len(re.findall(r"dot_general.*\(tensor<[0-9x]*xf8E\w+>, tensor<[0-9x]*xf8E\w+>\)", text)) == 3 * done
    assert text.count("f8E5M2>") and not _lowered(model).as_text().count("f8E5M2>")


_PRODUCTS = """
import json
from maxdiffusion.models.registry import lookup
from maxdiffusion.tools.flops import products
from tests.nn.test_quantisation import _lowered
for how in ({}, {"quantization": "int8"}):
    for name in ("flux-dev", "pictures"):
        text = _lowered(lookup(name).build("tiny", **how)).compile().as_text()
        print(json.dumps([[*operands, flops] for operands, flops in products(text).items()]))
"""


def test_the_compiled_program_multiplies_integers() -> None:
    """As users' XLA compiles it for CPUs, in a process without the flags of the tests: dense products read int8, what
    most convolutions read is widened to int32 first, which holds the same numbers; nothing quantised becomes floats."""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", _PRODUCTS], capture_output=True, text=True, check=True, env=environment)
    found = [{tuple(operands): flops for *operands, flops in json.loads(line)} for line in ran.stdout.splitlines()]
    floats, int8, int32 = ("f32", "f32"), ("s8", "s8"), ("s32", "s32")
    flux, pictures, quantised_flux, quantised_pictures = found
    assert flux.keys() == pictures.keys() == {floats}
    assert quantised_flux.keys() == {floats, int8} and quantised_pictures.keys() == {floats, int8, int32}
    for exact, small in ((flux, quantised_flux), (pictures, quantised_pictures)):
        assert sum(small.values()) == exact[floats]


def test_a_scanned_stack_is_quantised_as_its_blocks_are() -> None:
    model = lookup("flux-dev").build("tiny", quantization="int8", scan_layers=True)
    rows = {row.module: row for row in model.ledger()}
    assert rows["transformer_blocks/attn/to_q"].mode == "int8"
    assert rows["transformer_blocks/norm1/linear"].reason == "excluded by '(.*/)?norm[^/]*/linear'"
    assert _products(_lowered(model).as_text(), "i8") == sum(row.mode is not None for row in rows.values())


@pytest.mark.parametrize("name", MODELS)
def test_each_expression_that_a_model_excludes_by_itself_matches_its_layers(name: str) -> None:
    """At both sizes; a layer renamed would else be quantised without a word."""
    sizes: tuple[Literal["full", "tiny"], ...] = ("full", "tiny")
    for size in sizes:
        model = lookup(name).build(size, quantization="int8")
        rows = model.ledger()
        reasons = {row.reason for row in rows}
        assert reasons == {
            "",
            *(f"excluded by {pattern!r}" for pattern in (*model.keeps_precision, *model.modulations)),
        }


def test_layers_are_chosen_by_expressions(caplog: pytest.LogCaptureFixture) -> None:
    chosen = {"qwix_module_path": ".*ff.*", "quantization_exclude": [".*ff_context.*"]}
    model = lookup("flux-dev").build("tiny", quantization="int8", **chosen)
    with caplog.at_level(logging.INFO):
        rows = model.ledger()
    assert {row.module for row in rows if row.mode} == {
        f"transformer_blocks_{block}/ff/{layer}" for block in (0, 1) for layer in ("net_0/proj", "net_2")
    }
    assert "quantization=int8: 4 of 52 kernels" in caplog.text


def test_stored_kernels_are_not_stored_again() -> None:
    model = lookup("flux-dev").build("tiny", quantization="int8")
    stored = model.quantize_weights(model.init_weights(jax.random.key(0)))
    with pytest.raises(UsageError, match="stored quantised already"):
        model.quantize_weights(stored)


@pytest.mark.parametrize(
    ("mode", "kind", "emulated"),
    [
        ("fp8", "cpu", True),
        ("fp8_full", "TPU v6 lite", True),
        ("fp8", "NVIDIA A100-SXM4-80GB", True),
        ("fp8", "NVIDIA RTX A6000", True),
        ("fp8", "NVIDIA GeForce RTX 3090", True),
        ("fp8", "Tesla V100-SXM2-16GB", True),
        ("fp8", "something new", True),
        ("fp8", "NVIDIA GeForce RTX 4090", False),
        ("fp8", "NVIDIA RTX 6000 Ada Generation", False),
        ("fp8", "NVIDIA L40S", False),
        ("fp8", "NVIDIA B200", False),
        ("fp8", "TPU7x", False),
        ("fp8", "NVIDIA H100 80GB HBM3", False),
        ("int8", "cpu", False),
    ],
)
def test_float8_that_devices_emulate_is_said(
    mode: Any, kind: str, emulated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    spec = QuantSpec(mode=mode)
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        checked([QuantRow(module="a", shape=(4, 4), mode=mode, stored="", reason="")], spec, device_kind=kind)
    assert ("float8 products are emulated" in caplog.text) == emulated


def test_a_model_says_what_its_devices_emulate(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        lookup("flux-dev").build("tiny", quantization="fp8", mesh=Mesh(jax.devices()[:2], ("data",))).abstract_params()
    assert "quantization=fp8: float8 products are emulated on 'cpu'" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"qwix_module_path": "transformer_blocks_0/atn/to_q"},
            r"qwix_module_path: no layer's path is matched by .* did you mean 'transformer_blocks_0/attn/to_q'",
        ),
        ({"quantization_exclude": ["proj_ouk"]}, "quantization_exclude: no layer's path is matched by 'proj_ouk'"),
        ({"quantization_exclude": [".*"]}, "quantization_exclude leaves no layer to quantise"),
    ],
)
def test_an_expression_that_does_nothing_is_refused(keywords: dict[str, Any], message: str) -> None:
    model = lookup("flux-dev").build("tiny", quantization="int8", **keywords)
    with pytest.raises(UsageError, match=message):
        model.init_weights(jax.random.key(0))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"quantization": "int9"}, "quantization='int9' is unknown"),
        ({"use_qwix_quantization": True}, "use_qwix_quantization=True says too little"),
        (
            {"quantization": "int8", "quantization_exclude": ".*attn.*"},
            r"write a list of regular expressions, such as \['\.\*attn\.\*'\]",
        ),
        ({"qwix_module_path": ".*attn.*"}, "qwix_module_path='.*attn.*' is of no use without quantization"),
        ({"quantization": "int8", "qwix_module_path": "("}, r"qwix_module_path='\(' is no regular expression"),
        (
            {"quantization": "fp8", "bwd_quantization_calibration_method": "rms,7"},
            "bwd_quantization_calibration_method='rms,7' is of no use with quantization='fp8'",
        ),
        (
            {"quantization": "fp8_full", "bwd_quantization_calibration_method": "fixed,10"},
            "gradients have no fixed size",
        ),
        (
            {"quantization": "int8", "act_quantization_calibration_method": "minmax"},
            "act_quantization_calibration_method='minmax' is unknown: write absmax",
        ),
        (
            {"quantization": "int8", "weight_quantization_calibration_method": "rms"},
            "weight_quantization_calibration_method='rms' needs one number",
        ),
        *(
            (
                {"quantization": "int8", "weight_quantization_calibration_method": value},
                f"weight_quantization_calibration_method='{value}' needs one number",
            )
            for value in ("fixed,inf", "fixed,nan", "fixed,1e-30", "absmax,1e39", "absmax,", "rms,-1", "absmax,0.9,2")
        ),
    ],
)
def test_values_that_cannot_work_are_refused_at_construction(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lookup("flux-dev").build("tiny", **keywords)


@pytest.mark.parametrize("name", ["flux-dev", "pictures"])
def test_numbers_do_not_depend_on_the_mesh(name: str, fsdp_tensor: Mesh) -> None:
    """Float32 sums in another order reach a border between two int8 values now and then: then one of 254 steps of an
    element differs, of which all but few are equal. Scales of a device's own part would differ by 5e-3."""
    results = []
    for mesh in (None, fsdp_tensor):
        model = lookup(name).build("tiny", quantization="int8", mesh=mesh)
        random = np.random.default_rng(0)

        def values(leaf: jax.ShapeDtypeStruct, random: np.random.Generator = random) -> np.ndarray:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return random.standard_normal(leaf.shape, np.float32)
            return np.ones(leaf.shape, leaf.dtype)

        inputs = jax.tree.map(values, model.call_shapes(8, height=8, width=8, text=4))
        params = model.init_weights(jax.random.key(0))
        out = jax.jit(lambda params, inputs, model=model: model.apply({"params": params}, **inputs))(params, inputs)
        results.append(np.asarray(jax.tree.leaves(out)[0], np.float64))
    assert np.linalg.norm(results[1] - results[0]) <= 1.5e-3 * np.linalg.norm(results[0])


def _whole(leaf: Any) -> Any:
    return leaf.whole(jnp.float32) if is_stored(leaf) else leaf


@pytest.mark.parametrize(
    ("mode", "devices"),
    [("int8", {}), ("fp8", {"fsdp": 4, "tensor": 2}), ("int8", {"stage": 2, "data": 2, "tensor": 2}), ("int4", {})],
)
def test_stored_weights_make_the_numbers_of_plain_ones(mode: str, devices: dict[str, int]) -> None:
    """Where the plain weights of layers that stay unquantised are rounded as they are stored, all that differs is the
    order of float32 sums, and for int4, which is rounded in every layer, nothing but that the scales are stored."""
    mesh = Mesh(np.array(jax.devices()).reshape(*devices.values()), tuple(devices)) if devices else None
    model = lookup("flux-dev").build("tiny", quantization=mode, mesh=mesh, scan_layers=True)
    plain = model.init_weights(jax.random.key(0))
    small = model.quantize_weights(plain)

    # As it is planned: every part is cut as the kernel that it stands for, if it divides.
    def check(got: Any, wanted: jax.ShapeDtypeStruct) -> None:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert wanted.sharding is None or got.sharding.is_equivalent_to(wanted.sharding, got.ndim)

    jax.tree.map(check, small, model.quantized_shapes())
    kernel = plain["transformer_blocks"]["attn"]["to_q"]["kernel"]
    kept = small["transformer_blocks"]["attn"]["to_q"]["kernel"]
    assert mesh is None or kept.qvalue.sharding.is_equivalent_to(kernel.sharding, kernel.ndim)
    assert mesh is None or (len(kept.scale.sharding.device_set) == 8 and not kept.scale.sharding.is_fully_replicated)

    quant = model.runtime.quant

    def rounded(path: Any, weight: jax.Array, leaf: Any) -> Any:
        module = path_name(path).rpartition("/")[0]
        return _whole(leaf) if quant.why_not(module) else weight

    mixed = jax.tree_util.tree_map_with_path(rounded, plain, small)
    random = np.random.default_rng(0)
    inputs = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype),
        model.call_shapes(8, height=8, width=8, text=4),
    )
    call = jax.jit(lambda params, inputs: jax.tree.leaves(model.apply({"params": params}, **inputs))[0])
    got, wanted = (np.asarray(call(params, inputs), np.float64) for params in (small, mixed))
    # A sum in another order may put an activation on the other side of a border between two values (see below).
    assert np.linalg.norm(got - wanted) <= 1.5e-3 * np.linalg.norm(wanted)
    assert np.linalg.norm(got - np.asarray(call(plain, inputs), np.float64)) > 0


def test_layers_that_stay_unquantised_multiply_no_small_numbers() -> None:
    """Their kernels are stored in int8 all the same."""
    model = lookup("flux-dev").build("tiny", quantization="int8")
    shapes = model.quantized_shapes()
    inputs = model.call_shapes(2, height=8, width=8, text=4)
    text = jax.jit(lambda params, inputs: model.apply({"params": params}, **inputs)).lower(shapes, inputs).as_text()
    rows = model.ledger()
    assert shapes["x_embedder"]["kernel"].dtype == jnp.int8
    assert _products(text, "i8") == sum(row.mode is not None for row in rows) < len(rows)


@pytest.mark.parametrize(
    ("mode", "most", "most_of_all"), [("int8", 0.53, 0.55), ("fp8", 0.53, 0.55), ("int4", 0.30, 0.30)]
)
def test_the_bytes_of_a_real_model(mode: str, most: float, most_of_all: float) -> None:
    """FLUX.1 [dev] as it is, scales included; nothing is allocated."""
    found = stored_bytes(lookup("flux-dev").build(quantization=mode, scan_layers=True).quantized_shapes())
    assert found.ratio <= most and found.model_ratio <= most_of_all
    assert found.kernels == len(lookup("flux-dev").build(scan_layers=True).ledger())


def test_a_kernel_of_another_shape_is_refused() -> None:
    model = lookup("flux-dev").build("tiny", quantization="int4")
    params = model.quantize_weights(model.init_weights(jax.random.key(0)))
    params["proj_out"]["kernel"] = params["x_embedder"]["kernel"]
    inputs = model.call_shapes(2, height=8, width=8, text=4)
    with pytest.raises(UsageError, match=r"proj_out/kernel is stored with shape \(.*\), and the model's is"):
        jax.eval_shape(lambda params, inputs: model.apply({"params": params}, **inputs), params, inputs)
    with pytest.raises(UsageError, match="a model without quantization stores no weights quantised"):
        lookup("flux-dev").build("tiny").quantize_weights(params)
