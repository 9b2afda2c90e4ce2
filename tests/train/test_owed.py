"""What a killed process left undone at its last checkpoint is made up for once; what it did is not done again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.train.owed import Owed, owed_at
from maxdiffusion.train.run import TrainResult, train
from tests.train.runs import read_lines, run_recipe


def _write(folder: Path, *lines: str, grids: tuple[str, ...] = ()) -> None:
    (folder / "samples").mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for name in grids:
        Image.new("RGB", (2, 2)).save(folder / "samples" / name)


MEASURED = '{"step": 6, "held_out_loss": 0.5}'


@pytest.mark.parametrize(
    ("step", "section", "owed"),
    [
        (6, {"steps": 9, "eval_every": 3, "sample_every": 2}, Owed(evaluation=True, samples=True)),
        (6, {"steps": 9, "eval_every": 4, "sample_every": 3}, Owed(samples=True)),
        (6, {"steps": 9, "eval_every": 0, "sample_every": 0}, Owed()),
        (6, {"steps": 6, "eval_every": 4, "sample_every": 4}, Owed(evaluation=True, samples=True)),
        (0, {"steps": 9, "eval_every": 3, "sample_every": 3}, Owed()),
    ],
)
def test_only_what_is_due_at_the_step_is_owed(step: int, section: dict[str, Any], owed: Owed, tmp_path: Path) -> None:
    _write(tmp_path, '{"step": 3, "held_out_loss": 0.5}', '{"step": 6, "loss": 0.5}', grids=("step-000003.png",))
    assert owed_at(step, TrainSection(**section), tmp_path) == owed


def test_what_is_there_is_not_owed_and_half_of_it_is(tmp_path: Path) -> None:
    section = TrainSection(steps=9, eval_every=3, sample_every=3)
    _write(tmp_path, '{"step": 6, "loss": 0.5}', MEASURED, grids=("step-000006.png",))
    assert owed_at(6, section, tmp_path) == Owed()
    (tmp_path / "metrics.jsonl").write_text(MEASURED[:-3])
    (tmp_path / "samples" / "step-000006.png").write_bytes(b"")
    assert owed_at(6, section, tmp_path) == Owed(evaluation=True, samples=True)


def test_a_run_makes_up_for_it_once(trained: TrainResult, tmp_path: Path) -> None:
    """As if the process had been killed after the checkpoint of its last step, before anything else of that step."""
    folder = tmp_path / "run"
    shutil.copytree(trained.run, folder)
    metrics, grid = folder / "metrics.jsonl", folder / "samples" / "step-000006.png"
    whole = read_lines(metrics)
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in whole if "held_out_loss" not in line))
    grid.unlink()
    for _ in range(2):
        assert train(run_recipe(folder, "train.eval_pictures=1", "resume=true")).step == 6
        # The same programs with the same weights.
        assert read_lines(metrics) == whole
        assert [path.name for path in (folder / "samples").iterdir()] == [grid.name]
        np.testing.assert_array_equal(
            np.asarray(Image.open(grid)), np.asarray(Image.open(trained.run / "samples" / grid.name))
        )
