"""Which checkpoints a run has and which are whole is read from files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.pipelines.checkpoint_folder import (
    broken_steps,
    checkpoint_steps,
    chosen_step,
    flaw,
    newest_whole,
    read_manifest,
    recipe_folder,
    split_place,
    unfinished_steps,
)


def make(run: Path, step: int, *, manifest: bool = True) -> Path:
    """A checkpoint as small as one can be."""
    folder = run / "checkpoints" / str(step)
    (folder / "params").mkdir(parents=True)
    for name in ("_METADATA", "manifest.ocdbt"):
        (folder / "params" / name).write_text("12345")
    if manifest:
        files = {"params/_METADATA": 5, "params/manifest.ocdbt": 5}
        (folder / "checkpoint.json").write_text(json.dumps({"format": 1, "step": step, "files": files}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (3, 6, 12):
        make(tmp_path, step)
    (tmp_path / "checkpoints" / "15.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "checkpoints" / "9.broken").mkdir()
    return tmp_path


def test_only_those_that_have_their_name_count(run: Path) -> None:
    assert checkpoint_steps(run) == [3, 6, 12]
    assert unfinished_steps(run) == [15]
    assert newest_whole(run) == chosen_step(str(run)) == 12


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert (checkpoint_steps(tmp_path), unfinished_steps(tmp_path), newest_whole(tmp_path)) == ([], [], None)
    with pytest.raises(UsageError, match=r"has no checkpoint yet: .*train.checkpoint_every"):
        chosen_step(tmp_path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "params" / "_METADATA").unlink(), "params/_METADATA is missing"),
        (lambda folder: (folder / "params" / "_METADATA").write_text("12"), "params/_METADATA has 2 bytes of 5"),
        (lambda folder: (folder / "checkpoint.json").write_text('{"format": 1, '), "checkpoint.json cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("[]"), "checkpoint.json does not say what"),
    ],
)
def test_a_flaw_is_named_and_the_one_before_is_used(damage: Callable[[Path], object], told: str, run: Path) -> None:
    damage(run / "checkpoints" / "12")
    why = flaw(run, 12)
    assert why is not None and why.startswith(told)
    assert list(broken_steps(run)) == [12]
    with pytest.warns(MaxDiffusionWarning, match=f"checkpoints/12 is not whole: {told}.*: step 6 is used instead"):
        assert chosen_step(run) == 6


def test_where_none_is_whole_nothing_is_used(run: Path) -> None:
    for step in (3, 6, 12):
        (run / "checkpoints" / str(step) / "params" / "_METADATA").unlink()
    with pytest.raises(UsageError, match=r"checkpoints/12 is not whole: .*checkpoints/3 is not whole: .*none is left"):
        newest_whole(run)


def test_an_older_one_says_nothing_and_must_have_its_parts(tmp_path: Path) -> None:
    folder = make(tmp_path, 4, manifest=False)
    assert read_manifest(folder) is None and flaw(tmp_path, 4) is None
    (folder / "params" / "manifest.ocdbt").unlink()
    assert flaw(tmp_path, 4) == "params/manifest.ocdbt is missing"


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    (folder / "checkpoint.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="has format 2, and this version reads 1: install a newer maxdiffusion"):
        read_manifest(folder)


def test_a_place_names_a_run_and_perhaps_a_step(run: Path, tmp_path: Path) -> None:
    assert split_place(run) == split_place(str(run)) == (run, None)
    assert split_place(f"{run}@6") == (run, 6)
    assert chosen_step(run, 6) == 6
    for text, near in (("5", "3 and 6"), ("100", "6 and 12"), ("0", "3 and 6")):
        with pytest.raises(UsageError, match=rf"of step {text}: it has those of {near} \(of 3: maxdiffusion ckpt ls"):
            split_place(f"{run}@{text}")
    with pytest.raises(UsageError, match=r"'newest' in .* is no step: write a number, such as 12"):
        split_place(f"{run}@newest")
    (tmp_path / "a@3").mkdir()
    assert split_place(tmp_path / "a@3") == (tmp_path / "a@3", None)
    with pytest.raises(UsageError, match="no checkpoint of step 3: it has none"):
        split_place(f"{tmp_path / 'a@3'}@3")
    assert split_place(tmp_path / "none@3") == (tmp_path / "none@3", None)


def test_a_step_that_is_asked_for_must_be_whole(run: Path) -> None:
    (run / "checkpoints" / "6" / "params" / "_METADATA").unlink()
    with pytest.raises(UsageError, match="checkpoints/6 is not whole: params/_METADATA is missing: take another step"):
        chosen_step(run, 6)
    assert chosen_step(run) == 12


def test_the_recipe_of_a_step_is_its_own(run: Path) -> None:
    assert recipe_folder(run, None) == recipe_folder(run, 6) == run
    (run / "checkpoints" / "6" / "recipe.yaml").touch()
    assert recipe_folder(run, 6) == run / "checkpoints" / "6"
