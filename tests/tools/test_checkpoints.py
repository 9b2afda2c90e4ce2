"""A checkpoint is described from its files: what its arrays are, where they lay, and whether it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.errors import UsageError
from maxdiffusion.tools.checkpoints import OLD, describe_folder, find_checkpoint, list_checkpoints
from maxdiffusion.train.feed import training_source
from maxdiffusion.train.run import TrainResult
from tests.train.conftest import one_device, trained
from tests.train.runs import read_bits, run_recipe

__all__ = ["one_device", "trained"]


def test_a_description_agrees_with_the_arrays(trained: TrainResult) -> None:
    found, unfinished = list_checkpoints(trained.run)
    assert [one.step for one in found] == [3, 6] and unfinished == []
    newest, arrays = found[-1], read_bits(trained.run, 6)
    assert (newest.flaw, newest.note, newest.mesh) == (None, "", "data=4,tensor=2 (8 x cpu)")
    for part in newest.parts:
        stored = {name: array for name, array in arrays.items() if name.startswith(f"{part.name}/")}
        assert part.arrays == len(stored)
        assert part.elements == sum(array.size for array in stored.values())
        assert sum(part.dtypes.values()) == len(stored)
        assert newest.manifest is not None
        told = {f"{part.name}/{name}": leaf for name, leaf in newest.manifest["parts"][part.name].items()}
        assert {name: (leaf["dtype"], tuple(leaf["shape"])) for name, leaf in told.items()} == {
            name: (str(array.dtype), array.shape) for name, array in stored.items()
        }
    sizes = [path.stat().st_size for path in newest.folder.rglob("*") if path.is_file()]
    assert newest.bytes == sum(sizes)


def test_one_folder_has_it_all(trained: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(trained.run / "checkpoints" / "6", folder)
    found = describe_folder(find_checkpoint(str(folder)))
    assert found.flaw is None and found.step == 6 and found.manifest is not None
    told = found.manifest
    assert told["model"] == "pictures" and told["recipe"]["train.steps"] == 6
    samples = Fingerprint.of(training_source(run_recipe(trained.run).data))
    number = samples.number
    assert told["data"] == {
        "seed": 0,
        "batch_size": 8,
        "num_samples": number,
        "samples": samples.as_dict(),
        "next_sample": 48,
        "epoch": 48 // number,
        "buckets": [{"size": [8, 8], "samples": number, "epoch": 48 // number, "place": 48 % number}],
    }
    assert told["mesh"]["axes"]["tensor"] == 2 and told["mesh"]["platform"] == "cpu"
    assert dict(told["rules"])["heads"] == "tensor" or ["heads", "tensor"] in told["rules"]
    assert {"maxdiffusion", "jax", "orbax-checkpoint"} <= told["versions"].keys()
    assert (folder / "recipe.yaml").read_bytes() == (trained.run / "recipe.yaml").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == (trained.run / "tokenizer.json").read_bytes()


def test_an_older_checkpoint_is_described_as_far_as_it_goes(trained: TrainResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    (run / "checkpoints" / "6" / "checkpoint.json").unlink()
    found = list_checkpoints(run)[0][-1]
    assert (found.step, found.flaw, found.note, found.mesh, found.parameters) == (6, None, OLD, None, None)
    assert {part.name for part in found.parts} == {"params", "opt_state", "ema", "key"}


def test_names_of_checkpoints(trained: TrainResult, tmp_path: Path) -> None:
    run = str(trained.run)
    assert find_checkpoint(run).name == find_checkpoint(f"{run}@6").name == "6"
    assert find_checkpoint(f"{run}@3").name == "3"
    with pytest.raises(UsageError, match=r"no checkpoint of step 4: it has those of 3 and 6$"):
        find_checkpoint(f"{run}@4")
    with pytest.raises(UsageError, match="is no run with checkpoints and no checkpoint"):
        find_checkpoint(str(tmp_path))
    with pytest.raises(UsageError, match="there is no folder"):
        list_checkpoints(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no checkpoints"):
        list_checkpoints(tmp_path)
