"""The page about a run needs nothing but itself, is there for every run, and says what its files say."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.data.png import write_png
from maxdiffusion.errors import UsageError
from maxdiffusion.train.report import GRIDS, PICTURE_BYTES, embedded, read_run, write_report
from tests.pipelines.test_checkpoint_folder import make


class _Page(HTMLParser):
    """Headings, words and what a page would fetch; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "line", "path", "br"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "h3"):
            self.titles.append(data.strip())
        self.words.append(data)


def _page(folder: Path) -> _Page:
    return _Page(write_report(folder).read_text(encoding="utf-8"))


def _lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _line(step: int, seconds: float, **values: Any) -> dict[str, Any]:
    by_time = [1.0 / (step + k + 1) if k != 3 else None for k in range(10)]
    fixed = {"loss": 10.0 / step, "grad_norm": 1.0, "learning_rate": 1e-3, "images_per_second": 100.0 + step}
    return {"step": step, **fixed, "loss_by_time": by_time, "count_by_time": [1.0] * 10, "seconds": seconds, **values}


def _grid(folder: Path, name: str, size: int = 8) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    write_png(folder / "samples" / name, pixels, {"prompts": "a <red> apple\na fox"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    # Resumed after step 30, so its clock began anew.
    lines = [_line(step, float(step)) for step in range(1, 31)] + [_line(step, step - 30.0) for step in range(31, 61)]
    _lines(folder, [*lines, {"step": 60, "held_out_loss": 0.5, "unconditional_loss": 0.75, "novelty": 3}])
    (folder / "recipe.yaml").write_text("model: pictures\ntrain:\n  steps: 80\nprofile:\n  steps: 10:13\n")
    for name in ("step-000030.png", "step-000060.png", "step-000060-2.png", "other.png"):
        _grid(folder, name)
    (folder / "evaluation.json").write_text(json.dumps({"retrieval": 0.25, "retrieval_interval": [0.2, 0.3]}))
    mesh = {"axes": {"data": 4, "tensor": 2}, "devices": 8, "device_kind": "TPU v5 lite", "processes": 2}
    told = {"format": 1, "versions": {"jax": "0.10.2"}, "mesh": mesh, "parameters": 1_500_000, "files": {}}
    told |= {"recipe": {"train.steps": 80}, "data": {"num_samples": 120, "batch_size": 8}, "step": 60}
    (make(folder, 60) / "checkpoint.json").write_text(json.dumps(told))
    return folder


def test_a_page_has_all_parts_and_fetches_nothing(run: Path) -> None:
    page = _page(run)
    wanted = {"Loss", "Loss by noise level", "Gradient norm", "Learning rate", "Images a second", "novelty", "Samples"}
    assert wanted <= set(page.titles)
    assert {"Evaluation", "Recipe", "Versions and devices"} <= set(page.titles)
    assert len(page.fetched) == 2 and all(place.startswith("data:image/") for place in page.fetched)
    text = " ".join(page.words)
    for words in ("of 80", "data=4, tensor=2 (8 x TPU v5 lite)", "1.5M", "resumed 1 times", "0.2 to 0.3", "0.10.2"):
        assert words in text, words
    assert "Rows: a <red> apple; a fox." in text and "step 30" in text and "step 60" in text
    assert "10:13" in text
    assert "<red>" not in (run / "report.html").read_text()


def test_figures_are_those_of_the_files(run: Path) -> None:
    record = read_run(run)
    assert record.resumed == [30]
    assert record.seconds == 60.0
    assert record.samples[60].name == "step-000060-2.png"
    assert record.value("train.steps") == 80 and record.value("profile.steps") == "10:13"
    tiles = (run / "report.html") if (run / "report.html").exists() else write_report(run)
    found = dict(re.findall(r"<span>([^<]*)</span><b>([^<]*)</b>", tiles.read_text()))
    # Steps 11 to 60 are the last 50; their losses are 10 / step.
    assert found["loss"] == f"{np.mean([10 / step for step in range(11, 61)]):.4g}"
    assert (found["step"], found["held-out loss"], found["images/s"]) == ("60", "0.5", "131")
    assert (found["epochs"], found["time in steps"]) == ("4", "1 min 00 s")


@pytest.mark.parametrize("left", ["metrics.jsonl", "recipe.yaml", "samples"])
def test_any_part_alone_makes_a_page(left: str, run: Path) -> None:
    for path in sorted(run.rglob("*"), reverse=True):
        if left not in (path.name, path.parent.name):
            path.rmdir() if path.is_dir() else path.unlink()
    page = _page(run)
    assert ("Loss" in page.titles) == (left == "metrics.jsonl")
    assert ("Samples" in page.titles) == (left == "samples")
    assert "Versions and devices" not in page.titles


def test_what_is_cut_off_is_left_out_or_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')
    (run / "recipe.yaml").write_text("model: [\n")
    (run / "samples" / "step-000060-2.png").write_bytes(b"no picture")
    (run / "evaluation.json").write_text("{")
    (run / "checkpoints" / "60" / "checkpoint.json").write_text("{")
    page = _page(run)
    text = " ".join(page.words)
    assert "samples of step 60: the file cannot be read" in text
    assert "recipe.yaml" in text and "not valid YAML" in text and "checkpoint.json cannot be read" in text
    assert "Evaluation" not in page.titles and "Loss" in page.titles


def test_lines_of_other_versions_and_values_that_are_null_do_no_harm(run: Path) -> None:
    _lines(
        run,
        [
            {"step": 1, "loss": None, "loss_by_time": [None] * 10},
            {"note": "no step"},
            {"step": 2, "loss_by_time": [1.0]},
        ],
    )
    assert "Samples" in _page(run).titles


@pytest.mark.parametrize(("step", "told"), [(61, True), (40, False)])
def test_where_a_training_broke_off_is_told_until_it_has_gone_beyond(step: int, told: bool, run: Path) -> None:
    (run / "diverged").mkdir()
    bad = {"step": step, "loss": "nan", "first_bad_tensor": "activation unet/conv_in"}
    (run / "diverged" / "bad-step.json").write_text(json.dumps(bad))
    line = f"stopped at step {step}: loss nan, first bad tensor: activation unet/conv_in"
    assert (line in " ".join(_page(run).words)) == told


def test_pictures_fit(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    for step in range(40):
        _grid(folder, f"step-{step:06}.png", size=200)
    page = _page(folder)
    assert len(page.fetched) == GRIDS
    assert (folder / "report.html").stat().st_size < 4 / 3 * PICTURE_BYTES
    text = " ".join(page.words)
    assert "Of 40 grids, 24 are shown." in text and "step 39" in text


def test_an_embedded_picture_is_itself_or_smaller(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    path = write_png(tmp_path / "a.png", pixels, {"prompts": "p"})
    whole, text = embedded(path, most=10**6, side=640)
    with Image.open(io.BytesIO(base64.b64decode(whole.partition(",")[2]))) as picture:
        np.testing.assert_array_equal(np.asarray(picture), pixels)
    assert text["prompts"] == "p"
    small, _ = embedded(path, most=5000, side=640)
    assert len(small) <= 5000 * 4 / 3 + 40


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is no run: it has no recipe\.yaml"):
        write_report(tmp_path)
