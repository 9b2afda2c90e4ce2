"""A process that is killed while it writes a checkpoint costs nothing: the run ends with the bits of an unbroken one.

`make soak` kills at random moments, many times in a row (`tests/train/soak.py`).
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import jax
import pytest

from maxdiffusion.data.batches import batches
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps, unfinished_steps
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.feed import training_source
from maxdiffusion.train.loop import Loop
from maxdiffusion.train.run import TrainResult, train
from tests.train.flux_run import train_flux
from tests.train.runs import read_bits, run_recipe
from tests.train.soak import read_batches, start
from tests.train.victim import spy

pytestmark = pytest.mark.whole


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The samples of every batch that this process gives to a step."""
    found: dict[int, list[int]] = {}
    monkeypatch.setattr(Loop, "run", Loop.run)  # both are put back after the test
    monkeypatch.setattr(Checkpoints, "seal", Checkpoints.seal)
    spy(lambda batch: found.update({batch.step: batch.index.tolist()}))
    return found


def _killed(kind: str, folder: Path) -> None:
    """A training to step 6 that is killed while it writes the checkpoint of that step."""
    process = start(kind, folder, 6, cache=Path(jax.config.jax_compilation_cache_dir or ""), pause="write:6")
    try:
        deadline = time.monotonic() + 240
        while unfinished_steps(folder) != [6]:
            assert process.poll() is None and time.monotonic() < deadline, folder.with_suffix(".log").read_text()
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoint_steps(folder) == [3]


def _check_bits(one: Path, other: Path) -> None:
    first, second = read_bits(one, 6), read_bits(other, 6)
    assert first.keys() == second.keys() and {name.partition("/")[0] for name in first} >= {
        "params",
        "opt_state",
        "ema",
    }
    assert [name for name in first if first[name].tobytes() != second[name].tobytes()] == []


def test_a_run_killed_while_it_writes_ends_with_the_same_bits(
    trained: TrainResult, noted: dict[int, list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    _killed("unet", folder)
    recipe = run_recipe(folder, "resume=true")
    assert train(recipe).step == 6
    assert unfinished_steps(folder) == []
    _check_bits(trained.run, folder)
    stream = batches(training_source(recipe.data), batch_size=recipe.train.batch_size, seed=recipe.seed)
    wanted = {step: stream[step].index.tolist() for step in range(6)}
    assert read_batches(folder.with_suffix(".ids")) == wanted
    assert noted == {step: wanted[step] for step in (3, 4, 5)}


@pytest.mark.slow
def test_so_does_one_of_flux(noted: dict[int, list[int]], tmp_path: Path) -> None:
    train_flux(tmp_path / "whole", 6)
    whole = dict(noted)
    noted.clear()
    _killed("flux", tmp_path / "killed")
    assert int(train_flux(tmp_path / "killed", 6).state.step) == 6
    _check_bits(tmp_path / "whole", tmp_path / "killed")
    assert min(noted) == 3
    assert read_batches(tmp_path / "killed.ids") | noted == whole
