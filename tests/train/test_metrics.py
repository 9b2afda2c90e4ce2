"""A line of metrics is one JSON object; a resumed run keeps the lines up to where it starts."""

from __future__ import annotations

import json
from pathlib import Path

from maxdiffusion.train.metrics import MetricsFile


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_json_objects_and_nan_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(1, {"loss": 0.5})
    metrics.write(2, {"loss": float("nan")})
    assert _read(metrics.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]


def test_a_resumed_run_drops_lines_of_later_steps_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    MetricsFile(path, resume_step=2).write(3, {"loss": 9.0})
    assert _read(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0}]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path)
    assert path.read_text() == ""
