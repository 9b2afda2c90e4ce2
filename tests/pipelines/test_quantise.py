"""A quantised model is written and read; the report tries its layers alone; some steps may be precise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import UsageError
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.quantisation import QuantRow
from maxdiffusion.nn.switched import switched
from maxdiffusion.pipelines.generate import generate
from maxdiffusion.pipelines.quantise import grouped, quantise, quantised_recipe, report
from maxdiffusion.pipelines.text_to_image import sampler
from maxdiffusion.pipelines.trained import open_trained
from maxdiffusion.train.run import TrainResult

CAPTIONS = ["a fox, noto style", "a red apple, flat style"]


def test_a_quantised_model_paints_what_its_run_does_quantised(trained: TrainResult, tmp_path: Path) -> None:
    recipe = quantised_recipe(trained.run, ["quantization=int8", "sample.steps=2"])
    written = quantise(trained.run, recipe=recipe, out=tmp_path / "small")
    assert written.mode == "int8" and written.weights.kernels > 30
    results = [
        generate(CAPTIONS, place, recipe=recipe, out=tmp_path / "out") for place in (trained.run, written.folder)
    ]
    for files in zip(*(result.files for result in results), strict=True):
        first, second = (np.asarray(Image.open(file)) for file in files)
        np.testing.assert_array_equal(first, second)
    assert results[0].weights == results[1].weights == written.weights
    assert written.weights.ratio < 0.6 and results[1].quantization == "int8"
    with pytest.raises(UsageError, match="holds a model already"):
        quantise(trained.run, recipe=recipe, out=tmp_path / "small")
    before = {path: path.read_bytes() for path in Path(trained.run).iterdir() if path.is_file()}
    with pytest.raises(UsageError, match="is not empty: name another folder"):
        quantise(trained.run, recipe=recipe, out=trained.run)
    assert before == {path: path.read_bytes() for path in Path(trained.run).iterdir() if path.is_file()}
    with pytest.raises(UsageError, match="is a file: name a folder"):
        quantise(trained.run, recipe=recipe, out=results[0].files[0])
    with pytest.raises(UsageError, match="are stored in int8 already"):
        quantised_recipe(written.folder, ["quantization=int8"])


@pytest.mark.parametrize("mode", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_the_report_has_a_row_for_every_layer_the_worst_first(
    mode: str, trained: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quantised_recipe(trained.run, [f"quantization={mode}", "sample.steps=2", "sample.num_per_prompt=1"])
    monkeypatch.setattr("maxdiffusion.pipelines.quantise.MOST_ROWS", 8)
    found = report(trained.run, recipe=recipe, prompts=CAPTIONS)
    assert found.mode == mode and found.pictures == 2 and found.bytes_ratio < 0.6
    assert 10 < found.psnr < 90 and 0 < found.ssim <= 1 and found.features >= 0
    assert [row.psnr for row in found.modules] == sorted(row.psnr for row in found.modules)
    total = len(open_trained(trained.run, recipe).text_to_image.model.ledger())
    assert sum(row.kernels for row in found.modules) == total
    assert {row.excluded for row in found.modules} == {True, False}


def test_a_flag_quantises_its_layer_alone() -> None:
    """The numbers are those of a model whose other layers are excluded, in one program for all flags."""
    model = lookup("pictures").build("tiny", quantization="int8", quantization_exclude=[])
    modules = [row.module for row in model.ledger()]
    params = model.init_weights(jax.random.key(0))
    random = np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return random.standard_normal(leaf.shape, np.float32)
        return np.ones(leaf.shape, leaf.dtype)

    inputs = jax.tree.map(values, model.call_shapes(2, height=8, width=8, text=4))
    traced = 0

    @jax.jit
    def call(on: dict[str, Any]) -> Any:
        nonlocal traced
        traced += 1
        with switched(on):
            return model.apply({"params": params}, **inputs)

    def alone(some: set[str]) -> np.ndarray:
        return np.asarray(call({module: jnp.asarray(module in some) for module in modules}))

    plain = np.asarray(jax.jit(lambda: model.unquantized().apply({"params": params}, **inputs))())
    np.testing.assert_allclose(alone(set()), plain, atol=1e-5)  # float32 sums in another order
    chosen = next(module for module in modules if module.endswith("conv1"))
    one = model.clone(parent=None, qwix_module_path=chosen)
    wanted = np.asarray(jax.jit(lambda: one.apply({"params": params}, **inputs))())
    off = np.linalg.norm(wanted - plain)
    assert np.linalg.norm(alone({chosen}) - wanted) < 0.1 * off and off > 0
    assert np.linalg.norm(alone(set(modules)) - plain) > off and traced == 1


def test_precise_steps_are_those_of_the_plain_model(trained: TrainResult) -> None:
    """All steps precise, first or last, are the pictures of the plain model with the weights as they are stored; some
    leave the others quantised."""
    recipe = quantised_recipe(trained.run, ["quantization=int8", "sample.steps=3", "quantization_exclude=[text/.*]"])
    opened = open_trained(trained.run, recipe)
    words = opened.tokenizer
    texts, empty, indices = words.encode(CAPTIONS), words.encode([""]), np.arange(len(CAPTIONS))

    def paint(subject: Any = opened.text_to_image, **changes: int) -> np.ndarray:
        draw = sampler(subject, dataclasses.replace(recipe.sample, **changes))
        return draw(opened.params, texts, empty, seed=0, indices=indices)

    plain = dataclasses.replace(opened.text_to_image, model=opened.text_to_image.model.unquantized())
    whole, small = paint(plain), paint()
    for every in ({"precise_first_steps": 9}, {"precise_first_steps": 2, "precise_last_steps": 1}):
        np.testing.assert_allclose(paint(**every), whole, atol=1e-5)  # float32 sums in another order
    some = paint(precise_first_steps=1, precise_last_steps=1)
    assert min(np.abs(one - other).max() for one, other in ((small, whole), (some, whole), (some, small))) > 1e-3
    with pytest.raises(UsageError, match=r"sample\.precise_last_steps=1 is of no use: .*quantization=null has no"):
        sampler(plain, dataclasses.replace(recipe.sample, precise_last_steps=1))


def test_layers_are_grouped_by_the_beginnings_of_their_paths() -> None:
    rows = [
        QuantRow(module=module, shape=(2, 2), mode=None if "norm" in module else "int8", stored="int8", reason="")
        for module in ("a/x/q", "a/x/k", "a/x/norm", "b/y/q", "c")
    ]
    assert list(grouped(rows, 9)) == [row.module for row in rows]
    assert {name: len(members) for name, members in grouped(rows, 4).items()} == {
        "a/x/*": 2,
        "a/x/norm": 1,
        "b/y/q": 1,
        "c": 1,
    }
