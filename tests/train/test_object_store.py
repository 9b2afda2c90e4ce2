"""A run may live in an object store: trained there, gone on with there, read back from there."""

from __future__ import annotations

import json

import numpy as np
import pytest

from maxdiffusion.data.png import write_png
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.pipelines.run_files import grids_in
from maxdiffusion.tools.checkpoints import list_checkpoints
from maxdiffusion.train.evaluate import evaluate_run
from maxdiffusion.train.run import TrainResult, train
from tests.train.runs import read_bits, run_recipe


def test_the_newest_grid_of_a_run_in_an_object_store_is_found(bucket: str) -> None:
    samples = as_path(f"{bucket}/runs/tiny/samples")
    for step in (20, 3, 3):
        write_png(samples / f"step-{step:06}.png", np.zeros((2, 2, 3), np.uint8), {"step": step})
    assert [path.name for path in grids_in(samples)] == ["step-000003.png", "step-000003-2.png", "step-000020.png"]
    assert grids_in(as_path(f"{bucket}/runs/other/samples")) == []


@pytest.mark.slow
def test_a_run_lives_in_an_object_store(trained: TrainResult, bucket: str) -> None:
    run = f"{bucket}/runs/tiny"
    first = train(run_recipe(run, "train.steps=3"))
    assert (first.step, str(first.run)) == (3, run)
    assert checkpoint_steps(run) == [3]
    assert train(run_recipe(run, "resume=true")).step == 6
    found, unfinished = list_checkpoints(run)
    assert [(one.step, one.flaw) for one in found] == [(3, None), (6, None)] and unfinished == []
    here, there = read_bits(trained.run, 6), read_bits(run, 6)
    for name, array in here.items():
        np.testing.assert_array_equal(there[name], array)
    result = evaluate_run(run, num_seeds=1)
    assert str(result.samples) == f"{run}/samples/step-000006.png"
    assert json.loads(as_path(f"{run}/evaluation.json").read_text())["step"] == 6
    assert "times chance" in as_path(f"{run}/report.html").read_text()
