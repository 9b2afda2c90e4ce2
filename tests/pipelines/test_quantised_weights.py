"""Weights that become quantised while they are read are those that are quantised afterwards, and never whole."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxdiffusion.config.load import load_run
from maxdiffusion.config.schema import Recipe
from maxdiffusion.errors import UsageError
from maxdiffusion.nn.quantisation import stored_bytes
from maxdiffusion.pipelines import packed, quantised_weights
from maxdiffusion.pipelines.packed import pack
from maxdiffusion.pipelines.run_folder import read_weights, weight_shapes
from maxdiffusion.pipelines.trained import TrainedRun, open_trained
from maxdiffusion.train.run import TrainResult


def _recipe(run: Path, **changes: Any) -> Recipe:
    return dataclasses.replace(load_run(run).recipe, quantization="int8", **changes)


def _same(got: Any, wanted: Any) -> None:
    def check(a: Any, b: Any) -> None:
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)

    jax.tree.map(check, got, wanted)


@pytest.mark.parametrize(("mode", "scanned"), [("int8", False), ("int4", True)])
def test_a_run_is_read_quantised(trained: TrainResult, mode: str, scanned: bool) -> None:
    """Also into a model that scans its layers, which the run did not."""
    recipe = dataclasses.replace(_recipe(trained.run), quantization=mode, scan_layers=scanned)
    opened = open_trained(trained.run, recipe)
    model = opened.text_to_image.model
    params, step = read_weights(trained.run, weight_shapes(model))
    assert opened.step == step
    _same(opened.params, model.quantize_weights(params))


def test_a_layer_is_chosen_from_a_stack_and_quantised_in_one_program(trained: TrainResult) -> None:
    """As a run that scans is read into a model that does not."""
    model = open_trained(trained.run, _recipe(trained.run)).text_to_image.model
    shapes = weight_shapes(model)
    params, _ = read_weights(trained.run, shapes)
    name = "text/blocks_0/self_attention/to_q/kernel"
    name = next(name for name in model.storages() if name.startswith("text/") and "_0/" in name)
    node, like = params, shapes
    for part in name.split("/"):
        node, like = node[part], like[part]
    stack = jax.numpy.stack([node * 0, node])
    storage = model.storages()[name]
    assert quantised_weights._sources(name, {name.replace("_0/", "/", 1): None}) == ((name.replace("_0/", "/", 1),), 0)
    _same(quantised_weights.kept([stack], like, storage, index=1), quantised_weights.kept([node], like, storage))


def test_a_packed_model_is_read_quantised_and_kept_so(trained: TrainResult, tmp_path: Path) -> None:
    """What was packed quantised is read to the bit, on a mesh of its own; another mode is refused."""
    for mode in ("fp8", "int4"):
        recipe = dataclasses.replace(_recipe(trained.run), quantization=mode)
        opened = open_trained(trained.run, recipe)
        folder = _packed(tmp_path / mode, opened, recipe)
        again = open_trained(folder, dataclasses.replace(recipe, quantization=None if mode == "int4" else mode))
        _same(again.params, opened.params)
    with pytest.raises(UsageError, match="are stored in int4: leave quantization=int8 out"):
        open_trained(tmp_path / "int4", _recipe(trained.run))
    other = dataclasses.replace(recipe, weight_quantization_calibration_method="absmax,0.9")
    with pytest.raises(UsageError, match=r"is stored in int4 \(weight_.*=absmax\) .*, and would be in int4 \(.*0.9\)"):
        open_trained(tmp_path / "int4", other)
    with pytest.raises(UsageError, match=r"is stored in int4 .*, and would be in int8 .*quantization_exclude"):
        open_trained(tmp_path / "int4", dataclasses.replace(recipe, quantization_exclude=(".*to_q",)))
    with pytest.raises(UsageError, match=r"is missing there and .* here; keep model, scan_layers \(kernels are read"):
        open_trained(tmp_path / "int4", dataclasses.replace(recipe, scan_layers=True))
    half = _packed(tmp_path / "half", open_trained(trained.run, load_run(trained.run).recipe), recipe)
    mesh = {"fsdp": 4, "tensor": 2}
    cut = open_trained(half, _recipe(trained.run, mesh=mesh))
    whole = open_trained(half, dataclasses.replace(load_run(trained.run).recipe, mesh=mesh))
    _same(cut.params, cut.text_to_image.model.quantize_weights(whole.params))


def _packed(folder: Path, opened: TrainedRun, recipe: Recipe) -> Path:
    return pack(
        folder,
        recipe=dataclasses.replace(recipe, run=None),
        tokenizer=opened.tokenizer,
        params=jax.tree.map(np.asarray, opened.params),
        step=opened.step,
        figures={},
    )


@pytest.mark.parametrize("kind", ["run", "packed"])
def test_the_whole_is_never_there(
    kind: str, trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read, the devices hold what is quantised already, and 1.2 times the largest tensor at most."""
    recipe = _recipe(trained.run)
    opened = open_trained(trained.run, recipe)
    final = stored_bytes(opened.params).model_bytes
    shapes = jax.tree.leaves(weight_shapes(opened.text_to_image.model))
    largest = max(leaf.size for leaf in shapes) * 4
    place = (
        trained.run
        if kind == "run"
        else _packed(tmp_path / "p", open_trained(trained.run, load_run(trained.run).recipe), recipe)
    )
    del opened
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    most = 0
    kept = quantised_weights.kept

    def watched(*args: Any, **keywords: Any) -> Any:
        nonlocal most
        made = kept(*args, **keywords)
        most = max(most, sum(array.nbytes for array in jax.live_arrays() if id(array) not in before))
        return made

    for module in (quantised_weights, packed):
        monkeypatch.setattr(module, "kept", watched)
    open_trained(place, recipe)
    assert 0 < most <= final + 1.2 * largest < sum(leaf.size for leaf in shapes) * 4


_TEMPORARIES = """
import jax, json, math, numpy
from maxdiffusion.nn.quantisation import Storage, storing
for how in ("int8", "fp8", "int4"):
    for shape, inputs, features in (((256, 8, 64), 1, 2), ((4, 256, 8, 64), 1, 2), ((3, 3, 64, 128), 3, 1)):
        storage = Storage(how=how, calibration="absmax", inputs=inputs, features=features)
        lowered = storing(storage, shape, None).lower(jax.ShapeDtypeStruct(shape, numpy.float32))
        memory = lowered.compile().memory_analysis()
        assert memory.argument_size_in_bytes == 4 * math.prod(shape)
        print(json.dumps([how, shape, memory.temp_size_in_bytes / memory.argument_size_in_bytes]))
"""


def test_storing_a_kernel_takes_no_second_copy_of_it() -> None:
    """What the program holds beside the kernel and what becomes of it is the rest of 1.2 times the largest tensor. In a
    process of its own, as users' XLA compiles it: the flags of the tests turn the fusion off that does it."""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _TEMPORARIES]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == 9 and [row for row in found if row[-1] > 0.2] == []
