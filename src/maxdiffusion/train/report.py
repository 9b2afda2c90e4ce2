"""One self-contained HTML page about a run: made anew from the files of its folder, whichever of them are there."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from maxdiffusion.config import dialect
from maxdiffusion.config.load import RUN_RECIPE, load_run
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path, write_whole
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_folder, checkpoint_steps, read_manifest
from maxdiffusion.pipelines.run_files import (
    BAD_STEP,
    DIVERGED,
    EVALUATION,
    METRICS,
    REPORT,
    SAMPLES,
    grid_number,
    grids_in,
)
from maxdiffusion.train import charts
from maxdiffusion.train.charts import Line, line_chart, number, ramp, smoothed

GRIDS = 24
"""Grids of samples that a page shows, at most, evenly spread over the run."""

PICTURE_BYTES = 3_000_000
"""Bytes of all pictures of a page, at most."""

RECENT = 50
"""Steps that the figures at the top are means of."""

_KNOWN = (
    *("step", "loss", "grad_norm", "loss_by_time", "count_by_time", "learning_rate", "images_per_second", "seconds"),
    *("input_wait", "held_out_loss", "held_out_loss_by_time", "unconditional_loss", "tflops_per_second", "mfu"),
    *("device_memory", "step_memory", "host_memory"),
)
"""Names in lines of metrics that have a place on the page; others get a chart each."""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#fff;--ink:#1b2230;--soft:#687285;--line:#e5e8ee;--accent:#3a5fd9;
--second:#d9653a;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--paper:#12151b;--card:#1a1e26;--ink:#e8ebf1;--soft:#98a2b3;--line:#2b313c;
--accent:#7f9cf5;--second:#f0936d;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 20px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:38px 0 12px}h3{font-size:14px;margin:0 0 6px;font-weight:600}
h3 small{font-weight:400;color:var(--soft)}
p{margin:4px 0}.soft,.soft a{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;margin-top:18px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;min-width:0}
.tile span{display:block;font-size:12px;color:var(--soft)}.tile b{font-size:20px;font-weight:600}
.tile small{display:block;font-size:12px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}
.strip{display:flex;gap:14px;overflow-x:auto;padding-bottom:8px}
.strip figure{margin:0;flex:none}figcaption{font-size:12px;color:var(--soft)}
.strip img,.wide{display:block;max-width:min(420px,80vw);border-radius:6px;border:1px solid var(--line);
image-rendering:pixelated;background:#fff}
.wide{max-width:100%}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px}
td{padding:3px 18px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
pre{overflow-x:auto;font-size:12.5px;line-height:1.45;margin:0}
.alarm{border-color:var(--bad);color:var(--bad);margin-top:18px}
"""


@dataclass(kw_only=True)
class RunRecord:
    """What the files of a run say; every part may be missing.

    Attributes:
        name: of the folder.
        lines: of metrics, in order.
        samples: the newest grid of each step.
        recipe: its text.
        values: of the recipe, by section as written.
        manifest: of the newest checkpoint.
        evaluation: figures.
        evaluation_picture: targets and what was made for them.
        flaws: what could not be read, and where the training broke off, in words.
    """

    name: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, Path] = field(default_factory=dict)
    recipe: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    evaluation_picture: Path | None = None
    flaws: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """A value of the recipe by its full key; None where it is not known."""
        told = self.manifest.get("recipe", {})
        section, _, name = key.rpartition(".")
        place: Any = self.values.get(section, {}) if section else self.values
        return told.get(key, place.get(name) if isinstance(place, Mapping) else None)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a number in the lines of metrics; null becomes NaN."""
        found = [(line["step"], line[name]) for line in self.lines if _is_number(line.get(name, ""))]
        x, y = zip(*found, strict=True) if found else ((), ())
        return np.array(x, np.float64), np.array([math.nan if one is None else one for one in y], np.float64)

    @property
    def resumed(self) -> list[int]:
        """The steps that a resumed run went on from: there the clock of the steps begins anew."""
        x, seconds = self.series("seconds")
        return [int(x[index]) for index in np.flatnonzero(np.diff(seconds) < 0)]

    @property
    def seconds(self) -> float:
        """Time spent in steps, over all parts of the run."""
        _, seconds = self.series("seconds")
        ends = np.append(np.flatnonzero(np.diff(seconds) < 0), len(seconds) - 1)
        return float(np.nansum(seconds[ends])) if len(seconds) else 0.0


def write_report(run: str | Path) -> Path:
    """Writes `report.html` into a run's folder, in place of an older one.

    Args:
        run: folder that `train` wrote.

    Returns:
        The file.

    Raises:
        UsageError: there is no such run, or its folder cannot be written to.
    """
    folder = as_path(run)
    target = folder / REPORT
    try:
        write_whole(target, as_html(read_run(folder)))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}; make room or free the folder") from (
            error
        )
    return target


def read_run(folder: Path) -> RunRecord:
    """What is there of a run.

    Raises:
        UsageError: the folder is not that of a run.
    """
    if not any((folder / name).exists() for name in (RUN_RECIPE, METRICS, SAMPLES)):
        load_run(folder)  # says what is wrong with it
    record = RunRecord(name=folder.resolve().name)
    text = _text(folder / METRICS, record)
    record.lines = [line for line in map(_json, text.splitlines()) if isinstance(line.get("step"), int)]
    record.recipe = _text(folder / RUN_RECIPE, record)
    try:
        parsed = dialect.parse(record.recipe, RUN_RECIPE)
        record.values = parsed.plain() if isinstance(parsed, dialect.Mapping) else {}
    except (UsageError, yaml.YAMLError) as error:
        record.flaws.append(str(error))
    if (folder / SAMPLES).is_dir():
        for path in grids_in(folder / SAMPLES):
            step, _ = grid_number(path)
            record.samples[step] = path
    record.manifest = _newest_manifest(folder, record)
    if (folder / f"{EVALUATION}.json").exists():
        record.evaluation = _json(_text(folder / f"{EVALUATION}.json", record))
    bad = _json(_text(folder / DIVERGED / BAD_STEP, record))
    if bad and bad.get("step", 0) > max((line["step"] for line in record.lines), default=0):
        record.flaws.append(
            f"stopped at step {bad['step']}: loss {bad.get('loss')}, first bad tensor: {bad.get('first_bad_tensor')}"
        )
    picture = folder / f"{EVALUATION}.png"
    record.evaluation_picture = picture if picture.exists() else None
    return record


def as_html(record: RunRecord) -> str:
    """The page."""
    sections = [
        _heading(record),
        _tiles(record),
        _section("Training", _cards(_training_charts(record)) or '<p class="soft">No metrics yet.</p>'),
        _section("Speed and memory", _cards(_speed_charts(record))),
        _section("Other figures", _cards(_other_charts(record))),
        _section("Samples", _samples(record)),
        _section("Evaluation", _evaluation(record)),
        _section("Recipe", f'<div class="card"><pre>{html.escape(record.recipe)}</pre></div>' if record.recipe else ""),
        _section("Versions and devices", _versions(record)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(record.name)}</title><style>{_STYLE}{charts.STYLE}</style>'
        f"</head><body>{''.join(sections)}<script>{charts.SCRIPT}</script></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _heading(record: RunRecord) -> str:
    told = [str(record.value("model") or ""), _mesh(record.manifest.get("mesh", {}))]
    told += [f"written {time.strftime('%Y-%m-%d %H:%M', time.localtime())}"]
    flaws = "".join(f'<div class="card alarm">{html.escape(flaw)}</div>' for flaw in record.flaws)
    line = html.escape(" · ".join(filter(None, told)))
    return f'<header><h1>{html.escape(record.name)}</h1><p class="soft">{line}</p>{flaws}</header>'


def _mesh(mesh: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.get("axes", {}).items() if size > 1) or "one device"
    return f"{axes} ({mesh.get('devices', '?')} x {mesh.get('device_kind', '?')})" if mesh else ""


def _tiles(record: RunRecord) -> str:
    x, loss = record.series("loss")
    steps, wanted = (int(x[-1]) if len(x) else 0), record.value("train.steps")
    tiles = [("step", f"{steps:,}", f"of {wanted:,}" if isinstance(wanted, int) else "")]
    if len(x):
        recent = loss[x > steps - RECENT]
        mean = float(np.nanmean(recent)) if np.isfinite(recent).any() else math.nan
        tiles.append(("loss", f"{mean:.4g}", f"mean of the last {min(RECENT, steps)} steps"))
    at, held_out = record.series("held_out_loss")
    if len(at):
        tiles.append(("held-out loss", f"{held_out[-1]:.4g}", f"at step {int(at[-1]):,}"))
    for name, title, form in (
        ("images_per_second", "images/s", "{:.4g}"),
        ("mfu", "MFU", "{:.1%}"),
        ("tflops_per_second", "TFLOP/s", "{:.3g}"),
    ):
        _, values = record.series(name)
        if np.isfinite(values).any() and not (name == "tflops_per_second" and tiles[-1][0] == "MFU"):
            # The first line of a run holds what a first step costs once.
            tiles.append((title, form.format(float(np.nanmedian(values[1:] if len(values) > 1 else values))), "median"))
    for name, title in _MEMORY.items():
        _, values = record.series(name)
        if np.isfinite(values).any():
            tiles.append(("memory", _size(float(np.nanmax(values))), title))
            break
    if record.seconds:
        again = len(record.resumed)
        tiles.append(("time in steps", _clock(record.seconds), f"resumed {again} times" if again else ""))
    data = record.manifest.get("data", {})
    if data.get("num_samples"):
        seen = steps * data["batch_size"]
        tiles.append(("epochs", f"{seen / data['num_samples']:.3g}", f"of {data['num_samples']:,} pictures"))
    if record.manifest.get("parameters"):
        tiles.append(("parameters", number(record.manifest["parameters"]), ""))
    shown = (
        f'<div class="tile"><span>{title}</span><b>{html.escape(value)}</b><small>{html.escape(note)}</small></div>'
        for title, value, note in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


_MEMORY = {
    "device_memory": "peak of the fullest device",
    "step_memory": "of the compiled step, a device",
    "host_memory": "of this host's process",
}
"""Names of memory in metrics, the most telling first."""


def _training_charts(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    """(title, note, chart) of each."""
    x, loss = record.series("loss")
    width = max(len(x) // 40, 1)
    lines = [Line(name="loss", x=x, y=loss, faint=width > 1)]
    if width > 1:
        lines.append(Line(name=f"mean of {width} lines", x=x, y=smoothed(loss, width)))
    for name, title, color in (
        ("held_out_loss", "held out", "var(--second)"),
        ("unconditional_loss", "held out, without caption", "var(--soft)"),
    ):
        at, values = record.series(name)
        lines.append(Line(name=title, x=at, y=values, color=color))
    yield "Loss", "", line_chart(lines, label="loss", log=_wide(loss), marks=record.resumed)
    yield _noise_chart(record)
    x, norm = record.series("grad_norm")
    chart = line_chart([Line(name="gradient norm", x=x, y=norm)], label="norm", log=_wide(norm), marks=record.resumed)
    yield "Gradient norm", "before clipping", chart
    x, rate = record.series("learning_rate")
    line = Line(name="learning rate", x=x, y=rate)
    yield "Learning rate", "", line_chart([line], label="rate", from_zero=True, marks=record.resumed)


def _noise_chart(record: RunRecord) -> tuple[str, str, str]:
    """Ten lines, one for each tenth of the noise levels, smoothed by the pictures that fell into it."""
    title, note = "Loss by noise level", "tenths of the times: blue next to the data, red next to the noise"
    told = [line for line in record.lines if isinstance(line.get("loss_by_time"), list)]
    bins = max((len(line["loss_by_time"]) for line in told), default=0)
    told = [line for line in told if len(line["loss_by_time"]) == bins]
    if not told:
        return title, note, ""
    x = np.array([line["step"] for line in told], np.float64)
    means = np.array([[math.nan if one is None else one for one in line["loss_by_time"]] for line in told], np.float64)
    width = max(len(x) // 40, 1)
    edges = np.linspace(0, 1, bins + 1)
    lines = [
        # A line without a picture of this level is no gap.
        Line(
            name=f"{low:.1f} to {high:.1f}",
            x=x[np.isfinite(column)],
            y=smoothed(column[np.isfinite(column)], width),
            color=color,
        )
        for column, color, low, high in zip(means.T, ramp(bins), edges, edges[1:], strict=False)
    ]
    return title, note, line_chart(lines, label="loss", log=_wide(means), marks=record.resumed)


def _speed_charts(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    def chart(names: Mapping[str, str], label: str, scale: float = 1.0) -> str:
        colors = ("var(--accent)", "var(--second)", "var(--soft)")
        lines = []
        for (name, title), color in zip(names.items(), colors, strict=False):
            x, y = record.series(name)
            lines.append(Line(name=title, x=x, y=y * scale, color=color))
        return line_chart(lines, label=label, from_zero=True, marks=record.resumed)

    yield "Images a second", "over all devices", chart({"images_per_second": "images/s"}, "images/s")
    yield "MFU", "model FLOPs over the peak of the devices", chart({"mfu": "MFU"}, "% of peak", 100.0)
    yield "Model FLOPs", "over all devices", chart({"tflops_per_second": "TFLOP/s"}, "TFLOP/s")
    yield "Memory", "", chart(_MEMORY, "GiB", 2.0**-30)
    yield "Waiting for input", "share of the time", chart({"input_wait": "waiting"}, "%", 100.0)


def _other_charts(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    names = dict.fromkeys(name for line in record.lines for name, one in line.items() if _is_number(one))
    for name in names:
        if name not in _KNOWN:
            x, y = record.series(name)
            title = name.replace("_", " ")
            yield title, "", line_chart([Line(name=title, x=x, y=y)], label=title, marks=record.resumed)


def _cards(found: Iterable[tuple[str, str, str]]) -> str:
    cards = [
        f'<div class="card"><h3>{html.escape(title)} <small>{html.escape(note)}</small></h3>{chart}</div>'
        for title, note, chart in found
        if chart
    ]
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _samples(record: RunRecord) -> str:
    steps = sorted(record.samples)
    if not steps:
        return ""
    chosen = [steps[round(place)] for place in np.linspace(0, len(steps) - 1, min(GRIDS, len(steps)))]
    figures, prompts = [], ""
    for step in chosen:
        image, text = embedded(record.samples[step], most=PICTURE_BYTES // (2 * len(chosen)), side=640)
        prompts = text.get("prompts", prompts)
        figures.append(
            f"<figure>{_img(image, f'samples of step {step}')}<figcaption>step {step:,}</figcaption></figure>"
        )
    left = f" Of {len(steps)} grids, {len(chosen)} are shown." if len(chosen) < len(steps) else ""
    rows = "; ".join(prompts.split("\n"))
    told = f'<p class="soft">Rows: {html.escape(rows)}.{left}</p>' if rows else f'<p class="soft">{left}</p>'
    return f'{told}<div class="strip">{"".join(figures)}</div>'


def _evaluation(record: RunRecord) -> str:
    if not record.evaluation:
        return ""
    rows = [(name.replace("_", " "), _said(value)) for name, value in record.evaluation.items()]
    picture = ""
    if record.evaluation_picture is not None:
        image, _ = embedded(record.evaluation_picture, most=PICTURE_BYTES // 2, side=1200)
        picture = (
            f'<div class="card"><h3>Targets, and what was made for them</h3>{_img(image, "targets", "wide")}</div>'
        )
    return f'<div class="cards"><div class="card">{_table(rows)}</div>{picture}</div>'


def _versions(record: RunRecord) -> str:
    manifest = record.manifest
    if not manifest:
        return ""
    rows = [*manifest.get("versions", {}).items(), ("mesh", _mesh(manifest.get("mesh", {})))]
    rows += [
        ("hosts", manifest.get("mesh", {}).get("processes", "?")),
        ("newest checkpoint", manifest.get("step", "?")),
    ]
    return f'<div class="card">{_table([(name, _said(value)) for name, value in rows])}</div>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table>{cells}</table></div>'


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " to ".join(map(_said, value)) if len(value) == 2 else ", ".join(map(_said, value))
    return "" if value is None else str(value)


def _img(source: str, alt: str, kind: str = "") -> str:
    if not source:
        return f'<p class="soft">{html.escape(alt)}: the file cannot be read</p>'
    return f'<img class="{kind}" loading="lazy" alt="{html.escape(alt)}" src="{source}">'


def embedded(path: Path, *, most: int, side: int) -> tuple[str, dict[str, str]]:
    """A picture as a data URI, made smaller until it fits, and the text of its file; empty if it cannot be read.

    Args:
        path: of a PNG file.
        most: bytes that it may have.
        side: pixels of its longer side, at most.
    """
    try:
        with Image.open(io.BytesIO(path.read_bytes())) as file:
            file.load()
            text = {key: str(value) for key, value in getattr(file, "text", {}).items()}
            picture = file.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return "", {}
    while True:
        picture.thumbnail((side, side))
        for form, settings in (("PNG", {"optimize": True}), ("JPEG", {"quality": 85})):
            encoded = io.BytesIO()
            picture.save(encoded, form, **settings)
            if encoded.tell() <= most or (form == "JPEG" and side <= 64):
                data = base64.b64encode(encoded.getvalue()).decode()
                return f"data:image/{form.lower()};base64,{data}", text
        side //= 2


def _newest_manifest(folder: Path, record: RunRecord) -> Mapping[str, Any]:
    for step in reversed(checkpoint_steps(folder)):
        try:
            found = read_manifest(checkpoint_folder(folder, step))
        except UsageError as error:
            record.flaws.append(str(error))
            continue
        if found is not None:
            return found
    return {}


def _text(path: Path, record: RunRecord) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        record.flaws.append(f"{path.name} cannot be read: {error}")
        return ""


def _json(text: str) -> dict[str, Any]:
    """An object, or an empty one for what is none, such as the half line of a killed process."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _wide(values: np.ndarray) -> bool:
    """Whether positive values spread so far that a logarithmic axis says more."""
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(
        positive.size and positive.size >= 0.9 * np.isfinite(values).sum() and positive.max() > 5 * positive.min()
    )


def _size(size: float) -> str:
    scale, unit = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / scale:.3g} {unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
