"""Sampling by patch pipelining: exact when all is warm-up, the solver's memory, steps that overlap; what is refused."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.diffusion.grid import Grid, make_grid
from maxdiffusion.diffusion.process import FlowMatching
from maxdiffusion.diffusion.sample import run, sample, start
from maxdiffusion.diffusion.solvers import get_solver
from maxdiffusion.errors import UsageError
from maxdiffusion.models.flux import FLUX_SCHNELL, FlaxFluxTransformer2DModel
from maxdiffusion.models.flux_patches import empty_stores, synchronous
from maxdiffusion.pipelines.patches import sample_patched
from maxdiffusion.tools.traffic import traffic
from tests.models.patched import patched

# float32 through the blocks of a few steps, whose velocities change what comes after them.
TOLERANCE = 1e-5
BATCH, IMAGE, TEXT, STEPS = 2, 6, 3, 4
KEYS = jax.random.split(jax.random.key(8), 3)
GRID = make_grid(FlowMatching(timestep_scale=1), STEPS, "uniform")


def flux(**keywords: Any) -> FlaxFluxTransformer2DModel:
    given = {"scan_layers": True, "precision": "highest", "pipeline_patches": 3, **keywords}
    model = FLUX_SCHNELL.build("tiny", **given)
    assert isinstance(model, FlaxFluxTransformer2DModel)
    return model


NOISE = jax.random.normal(KEYS[0], (BATCH, IMAGE, 16))
COND = {
    "encoder_hidden_states": jax.random.normal(KEYS[1], (BATCH, TEXT, 24)),
    "pooled_projections": jax.random.normal(KEYS[2], (BATCH, 16)),
    "img_ids": jnp.arange(3.0 * IMAGE).reshape(IMAGE, 3) % 5,
    "txt_ids": jnp.zeros((TEXT, 3)),
}


@pytest.fixture(scope="module")
def params() -> Any:
    return flux().init_weights(jax.random.key(0))


def walk(model: FlaxFluxTransformer2DModel, params: Any, solver: str = "euler", grid: Grid = GRID) -> Any:
    call = jax.jit(lambda p, x: sample_patched(model, p, x, grid, COND, solver=get_solver(solver)))
    return call(params, NOISE)


def exactly(params: Any, solver: str) -> Any:
    """The usual sampler with the usual model."""
    model = FLUX_SCHNELL.build("tiny", precision="highest", scan_layers=True)

    def denoise(cache: Any, x: Any, timestep: Any, cond: Any) -> Any:
        out: Any = model.apply({"params": params}, hidden_states=x, timestep=timestep, **cond)
        return cache, out.sample

    call = jax.jit(lambda x: sample(denoise, x, GRID, COND, solver=get_solver(solver), prediction="velocity").x)
    return call(NOISE)


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_when_all_steps_are_warm_up_it_is_exact(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        out = walk(flux(pipeline_warmup_steps=STEPS), params)
    assert distance(out, exactly(params, "euler")) <= TOLERANCE
    assert f"pipeline_warmup_steps covers all {STEPS} steps, so every one is exact" in caplog.text
    assert "approximate" not in caplog.text


def test_one_patch_is_exact_and_the_solver_s_memory_goes_with_it(params: Any) -> None:
    """DPM-Solver++ carries its last estimate from the warm-up into the pipeline, and its step size with it."""
    out = walk(flux(pipeline_patches=1, pipeline_warmup_steps=2), params, "dpmpp_2m")
    assert distance(out, exactly(params, "dpmpp_2m")) <= TOLERANCE


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_that_overlap_have_the_numbers_of_steps_one_by_one(
    stages: int, params: Any, devices: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = Mesh(devices[:2], ("stage",)) if stages == 2 else None
    model = flux(mesh=mesh, pipeline_warmup_steps=2)
    with caplog.at_level(logging.WARNING):
        out = walk(model, model.init_weights(jax.random.key(0)))
    assert "patch pipelining is approximate: after 2 exact of 4 steps" in caplog.text
    single = flux()

    def one_by_one(params: Any) -> Any:
        def exact(stores: Any, *call: Any) -> Any:
            return synchronous(single, params, stores, *call)

        def approximate(stores: Any, *call: Any) -> Any:
            return patched(single, params, stores, *call)

        rule: Any = {"solver": get_solver("euler"), "prediction": "velocity"}
        state = start(NOISE, solver=rule["solver"], cache=empty_stores(single, IMAGE, COND))
        state, _ = run(exact, state, GRID.part(0, 2), COND, **rule)
        return run(approximate, state, GRID.part(2), COND, **rule)[0].x

    expected = jax.jit(one_by_one)(params)
    assert distance(out, expected) <= TOLERANCE
    assert distance(out, exactly(params, "euler")) > 10 * TOLERANCE


def test_only_neighbours_talk(devices: np.ndarray) -> None:
    mesh = Mesh(devices[:2], ("stage",))
    model = flux(mesh=mesh)
    shapes, names = model.abstract_params()
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        model.layout.shardings(shapes, names),
    )
    call = jax.jit(lambda p, x: sample_patched(model, p, x, GRID, COND, solver=get_solver("euler")))
    moved = traffic(call.lower(shapes, NOISE).compile().as_text(), mesh)
    kinds = {kind: moved.count(kind) for kind in ("collective-permute", "all-reduce", "all-gather", "all-to-all")}
    # A tick of the warm-up for each stage and stack; 3 patches in rounds of 4 ticks, three steps, then drained.
    assert kinds["collective-permute"] == 2 * 2 + (2 * 4 + 3 + 4 - 1)
    # The first stage's results: of each stack of the warm-up, and of the rest.
    assert kinds["all-reduce"] == 3
    assert kinds["all-gather"] == kinds["all-to-all"] == 0


def test_refusals(params: Any) -> None:
    with pytest.raises(UsageError, match="EulerAncestral draws noise at every step"):
        walk(flux(), params, "euler_ancestral")
    with pytest.raises(UsageError, match="pipeline_patches=3 needs stacked blocks: write scan_layers=True"):
        flux(scan_layers=False)
    with pytest.raises(UsageError, match="the model has no patches: write pipeline_patches=8"):
        walk(flux(pipeline_patches=None), params)
    with pytest.raises(UsageError, match="pipeline_patches=7 are more than the 6 image tokens"):
        walk(flux(pipeline_patches=7), params)
    solver = get_solver("euler")
    less = {name: value for name, value in COND.items() if name != "txt_ids"}
    with pytest.raises(UsageError, match="cond lacks txt_ids"):
        sample_patched(flux(), params, NOISE, GRID, less, solver=solver)
    with pytest.raises(UsageError, match="is no keyword of the model's call: did you mean 'pooled_projections'"):
        sample_patched(flux(), params, NOISE, GRID, {**COND, "pooled_projection": 0}, solver=solver)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_error_falls_with_the_warm_up() -> None:
    """Mean over 16 prompts, on a network that has learnt something: the benchmark, with a compiler that optimises."""
    path = Path(__file__).parents[2] / "benchmarks" / "patches.py"
    command = [sys.executable, str(path), "--json", "--steps", "8", "--train-steps", "300"]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["losses"][1] < 0.5 * figures["losses"][0]
    means = {int(warmup): error["mean"] for warmup, error in figures["errors"].items()}
    assert list(means) == [1, 2, 4, 8] and figures["prompts"] == 16
    assert all(after < before for before, after in itertools.pairwise(means.values())), means
    assert means[1] > 1e-3, "an approximation that cannot be told from the exact pictures proves nothing"
    assert means[8] <= TOLERANCE
