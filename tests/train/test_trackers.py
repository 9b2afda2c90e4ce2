"""Trackers are told what `metrics.jsonl` is told; what they need is asked for before anything starts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.schema import flatten
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path
from maxdiffusion.train.diverged import DivergedError
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.run import TrainResult, train
from maxdiffusion.train.trackers import Audience, WeightsAndBiases, check_trackers, open_trackers, scalars
from tests.train.runs import run_recipe

LINE = {"loss": 0.5, "grad_norm": float("nan"), "loss_by_time": [1.0, float("nan")], "count_by_time": [3.0, 0.0]}


class _Wandb(ModuleType):
    """What is used of the package, written down."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.calls: list[tuple[str, Any]] = []
        self.refuses = ""

    def init(self, **settings: Any) -> Any:
        if self.refuses:
            raise self.Error(self.refuses)
        self.calls.append(("init", settings))
        return SimpleNamespace(
            define_metric=lambda *names, **how: self.calls.append(("define", (names, how))),
            log=lambda values: self.calls.append(("log", values)),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )

    def Image(self, pixels: np.ndarray, *, caption: str) -> Any:  # noqa: N802  as the package calls it
        return ("image", pixels.shape, caption)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> _Wandb:
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def _recipe(*words: str):
    return load_recipe("pictures-demo", list(words)).recipe


def _events(folder: Path) -> list[Any]:
    """The events of all files: length, checksum, bytes, checksum each."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_finite_numbers_of_a_line_become_scalars() -> None:
    assert scalars({**LINE, "note": "text"}) == {"loss": 0.5, "loss_by_time/0.0-0.5": 1.0}


def test_tensorboard_has_the_numbers_and_pictures_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    recipe = _recipe("track.tensorboard=true")
    for resume_step in (0, 2):  # a run, and its second part
        trackers = open_trackers(recipe, tmp_path, resume_step=resume_step)
        metrics = MetricsFile(tmp_path / "metrics.jsonl", resume_step=resume_step, trackers=trackers)
        metrics.write(resume_step + 1, LINE)
        for name in ("samples/00-fox", "samples/01-key"):
            trackers[0].picture(name, resume_step + 1, np.zeros((4, 6, 3), np.uint8), "fox")
        for tracker in trackers:
            tracker.close(0)
    told = {
        (value.tag, event.step): value for event in _events(tmp_path / "tensorboard") for value in event.summary.value
    }
    tags = ("loss", "loss_by_time/0.0-0.5", "samples/00-fox", "samples/01-key")
    assert set(told) == {(tag, step) for tag in tags for step in (1, 3)}
    assert told["loss", 3].simple_value == 0.5
    assert (told["samples/01-key", 1].image.height, told["samples/01-key", 1].image.width) == (4, 6)
    # From there on, TensorBoard hides what earlier parts wrote; the first part may have begun anew.
    assert [event.step for event in _events(tmp_path / "tensorboard") if event.session_log.status] == [1, 3]


def test_wandb_goes_on_with_its_run(tmp_path: Path, wandb: _Wandb) -> None:
    recipe = _recipe("track.wandb=pictures", "track.wandb_mode=offline")
    for resume_step in (0, 2):
        (tracker,) = open_trackers(recipe, tmp_path, resume_step=resume_step)
        tracker.write(resume_step + 1, LINE)
        tracker.picture("samples/00-fox", resume_step + 1, np.zeros((4, 6, 3), np.uint8), "a fox")
        tracker.close(0)
    (first, second) = (settings for name, settings in wandb.calls if name == "init")
    assert first == second and first["resume"] == "allow"
    assert (first["project"], first["mode"], first["dir"]) == ("pictures", "offline", str(tmp_path))
    assert first["config"]["train.steps"] == 360
    logged = [values for name, values in wandb.calls if name == "log"]
    assert logged[2] == {"step": 3, "loss": 0.5, "loss_by_time/0.0-0.5": 1.0}
    assert logged[3] == {"step": 3, "samples/00-fox": ("image", (4, 6, 3), "a fox")}
    assert ("define", (("*",), {"step_metric": "step"})) in wandb.calls and wandb.calls[-1][0] == "finish"
    open_trackers(recipe, tmp_path, resume_step=0)  # a new run in the same folder
    assert wandb.calls[-2][1]["id"] != first["id"]


@pytest.mark.parametrize(
    ("error", "status", "told"), [(None, 0, 0), (None, 130, 130), (DivergedError("a loss"), 0, 1), (OSError(), 0, 1)]
)
def test_trackers_are_told_how_the_run_ended(
    error: Exception | None, status: int, told: int, tmp_path: Path, wandb: _Wandb
) -> None:
    class Broken(WeightsAndBiases):
        def __init__(self) -> None:
            pass

        def close(self, status: int) -> None:
            raise RuntimeError(f"no answer to {status}")

    (tracker,) = open_trackers(_recipe("track.wandb=p"), tmp_path, resume_step=0)
    with pytest.raises(RuntimeError, match=f"no answer to {told}"), Audience([tracker, Broken()]) as audience:
        audience.status = status
        if error is not None:
            raise error
    assert wandb.calls[-1] == ("finish", told)


def _records(path: Path) -> list[Any]:
    """The records of a run that the package keeps: LevelDB's log format (blocks of 32 KiB) behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record, found = path.read_bytes(), 7, b"", []
    while place < len(content):
        left = 2**15 - place % 2**15
        if left < 7:  # too little for the head of a fragment
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its end
            found.append(Record.FromString(record))
            record = b""
    return found


def test_the_wandb_package_keeps_config_numbers_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    recipe = _recipe("track.wandb=pictures", "track.wandb_mode=offline")
    pixels = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    for resume_step in (0, 2):  # a run, and its second part
        (tracker,) = open_trackers(recipe, tmp_path, resume_step=resume_step)
        tracker.write(resume_step + 1, LINE)
        tracker.picture("samples/00-fox", resume_step + 1, pixels, "a fox")
        tracker.close(3 if resume_step else 0)
    package.teardown()  # ends its process
    assert capfd.readouterr().out == "", "standard output is for results"
    parts = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda part: part.stat().st_ctime_ns)
    known = (tmp_path / "wandb-run.txt").read_text().strip()
    for part, step in zip(parts, (1, 3), strict=True):
        records = _records(part / f"run-{known}.wandb")
        (ended,) = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
        assert ended.exit_code == (0 if step == 1 else 3)
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.project, run.display_name) == (known, "pictures", tmp_path.name)
        config = {one.key: json.loads(one.value_json) for one in run.config.update}
        assert config["train.steps"] == 360 and set(flatten(recipe)) <= set(config)
        (metric,) = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
        assert (metric.glob_name, metric.step_metric) == ("*", "step")
        told = [
            {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        line, picture = ({key: value for key, value in one.items() if key[0] != "_"} for one in told)
        assert line == {"step": step, "loss": 0.5, "loss_by_time/0.0-0.5": 1.0}
        assert (picture["step"], picture["samples/00-fox/caption"]) == (step, "a fox")
        file = part / "files" / picture["samples/00-fox/path"]
        np.testing.assert_array_equal(np.asarray(Image.open(file).convert("RGB")), pixels)


def test_what_wandb_refuses_is_one_line_with_a_cure(tmp_path: Path, wandb: _Wandb) -> None:
    wandb.refuses = "api_key not configured\nmore"
    with pytest.raises(UsageError, match=r"track.wandb=p: .* api_key not configured; log in .*wandb_mode=offline"):
        open_trackers(_recipe("track.wandb=p"), tmp_path, resume_step=0)


@pytest.mark.parametrize(
    ("words", "package", "told"),
    [
        (
            ["track.tensorboard=true"],
            "tensorboardX",
            r"needs the package tensorboardX: pip install 'maxdiffusion\[track\]'",
        ),
        (["track.wandb=p"], "wandb", "track.wandb=p needs the package wandb: pip install wandb"),
    ],
)
def test_a_missing_package_names_itself(
    words: list[str], package: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(UsageError, match=told):
        check_trackers(_recipe(*words).track, tmp_path)


def test_nobody_is_asked_for_by_default(tmp_path: Path) -> None:
    recipe = _recipe()
    check_trackers(recipe.track, tmp_path)
    assert open_trackers(recipe, tmp_path, resume_step=0) == ()
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_host_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert open_trackers(_recipe("track.tensorboard=true"), tmp_path, resume_step=0) == ()
    assert list(tmp_path.iterdir()) == []


def test_files_that_grow_are_refused_in_an_object_store(monkeypatch: pytest.MonkeyPatch, wandb: _Wandb) -> None:
    monkeypatch.setattr("maxdiffusion.train.trackers.is_remote", lambda _: True)
    for words in (["track.tensorboard=true"], ["track.wandb=p", "track.wandb_mode=offline"]):
        with pytest.raises(UsageError, match=r"is an object store: .*give a local folder with run=FOLDER"):
            check_trackers(_recipe(*words).track, as_path("runs/x"))


def test_a_mode_without_a_project_is_refused() -> None:
    with pytest.raises(UsageError, match=r"track.wandb_mode .*there is no project: write track.wandb=PROJECT"):
        _recipe("track.wandb_mode=offline")


def test_a_training_that_fails_is_closed_as_failed(
    trained: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: _Wandb
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    folder = tmp_path / "run"
    shutil.copytree(trained.run, folder)
    monkeypatch.setattr("maxdiffusion.train.run.compile_sizes", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(run_recipe(folder, "resume=true", "track.wandb=p"))
    assert [call for call in wandb.calls if call[0] == "finish"] == [("finish", 1)]
