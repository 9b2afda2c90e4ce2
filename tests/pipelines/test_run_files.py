"""Which grid of samples is the newest, wherever a run lives."""

from __future__ import annotations

from pathlib import Path

from maxdiffusion.pipelines.run_files import grids_in


def test_grids_are_ordered_by_step_and_not_by_their_times(tmp_path: Path) -> None:
    names = ["step-1000000.png", "step-000500-10.png", "step-000500-2.png", "step-000500.png", "step-000020.png"]
    for name in [*names, "notes.png"]:
        (tmp_path / name).touch()
    assert [path.name for path in grids_in(tmp_path)] == names[::-1]
    assert grids_in(tmp_path / "none") == []
