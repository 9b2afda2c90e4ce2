"""Line charts as SVG: axes with labels, linear or logarithmic, readable in light and dark; plain text, no library."""

from __future__ import annotations

import colorsys
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

POINTS = 400
"""Points of a line, at most; of longer ones, each point is the mean of several."""

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 42

STYLE = """
.chart{margin:0;position:relative}
.chart svg{display:block;width:100%;height:auto;overflow:visible}
.chart text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--line);stroke-width:1}
.chart .mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 4}
.chart .cursor{stroke:var(--soft);stroke-width:1;visibility:hidden}
.chart path{fill:none;stroke-width:1.7;stroke-linejoin:round}
.chart path.faint{opacity:.3;stroke-width:1}
.chart .key{display:flex;flex-wrap:wrap;gap:2px 12px;font-size:12px;color:var(--soft);min-height:1.3em}
.chart .key b{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
.chart .key i{font-style:normal;color:var(--ink);font-variant-numeric:tabular-nums}
"""

SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const svg = chart.querySelector('svg'), cursor = chart.querySelector('.cursor');
  const values = [...chart.querySelectorAll('.key i')], {low, high, lines} = JSON.parse(chart.dataset.lines);
  const said = v => v == null ? '' : ' ' + (v && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) ? v.toExponential(2)
    : +v.toPrecision(4));
  const move = event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * %(width)d;
    const x = low + (at - %(left)d) / %(inner)d * (high - low);
    if (at < %(left)d || at > %(end)d) return leave();
    let place = null;
    lines.forEach((line, k) => {
      let best = 0;
      line[0].forEach((step, i) => { if (Math.abs(step - x) < Math.abs(line[0][best] - x)) best = i; });
      values[k].textContent = said(line[1][best]);
      place ??= line[0][best];
    });
    const px = %(left)d + (place - low) / (high - low) * %(inner)d;
    cursor.setAttribute('x1', px); cursor.setAttribute('x2', px); cursor.style.visibility = 'visible';
    chart.querySelector('.at').textContent = 'step ' + Math.round(place);
  };
  const leave = () => {
    cursor.style.visibility = 'hidden'; chart.querySelector('.at').textContent = '';
    values.forEach(value => value.textContent = '');
  };
  svg.addEventListener('pointermove', move); svg.addEventListener('pointerleave', leave);
}
""" % {"width": WIDTH, "left": LEFT, "inner": WIDTH - LEFT - RIGHT, "end": WIDTH - RIGHT}  # noqa: UP031  braces of CSS


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart; values that are not finite leave gaps.

    Attributes:
        name: in the key.
        x: rising.
        y: of the same length.
        color: as CSS writes it.
        faint: drawn thin, behind what stands out.
    """

    name: str
    x: Float[np.ndarray, " points"]
    y: Float[np.ndarray, " points"]
    color: str = "var(--accent)"
    faint: bool = False


def ramp(number: int) -> list[str]:
    """Colours from blue over violet to red, as many as asked for, equally readable on white and on black."""
    hues = [(225 + 145 * index / max(number - 1, 1)) / 360 % 1 for index in range(number)]
    rgb = [colorsys.hls_to_rgb(hue, 0.56, 0.72) for hue in hues]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in color) for color in rgb]


def thinned(
    x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"], most: int = POINTS
) -> tuple[Float[np.ndarray, " fewer"], Float[np.ndarray, " fewer"]]:
    """At most `most` points, each the mean of its neighbours that are finite."""
    if len(x) <= most:
        return x, y
    group = np.arange(len(x)) * most // len(x)
    finite = np.isfinite(y)
    counts = np.bincount(group, finite, most)
    sums = np.bincount(group, np.where(finite, y, 0.0), most)
    means = np.divide(sums, counts, out=np.full(most, np.nan), where=counts > 0)
    return np.bincount(group, x, most) / np.bincount(group, minlength=most), means


def smoothed(y: Float[np.ndarray, " points"], width: int) -> Float[np.ndarray, " points"]:
    """The mean of the finite values among the `width` around each point (an odd number), fewer at the ends."""
    finite = np.isfinite(y)
    sums, counts = (np.append(0.0, np.cumsum(values)) for values in (np.where(finite, y, 0.0), finite))
    at = np.arange(len(y))
    low, high = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, len(y))
    number = counts[high] - counts[low]
    return np.divide(sums[high] - sums[low], number, out=np.full(len(y), np.nan), where=number > 0)


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[float] = (),
    x_label: str = "step",
) -> str:
    """A chart as HTML: the SVG and its key; empty where no line has a finite value.

    Args:
        lines: drawn in this order.
        label: of the y axis, with its unit.
        log: a logarithmic y axis; values of 0 and less are left out.
        from_zero: the y axis begins at 0.
        marks: places on the x axis that get a dashed line, such as where a run was resumed.
        x_label: of the x axis.
    """
    shown = []
    for line in lines:
        x, y = thinned(np.asarray(line.x, np.float64), np.asarray(line.y, np.float64))
        y = np.where(np.isfinite(y) & ((y > 0) | (not log)), y, np.nan)
        if np.isfinite(y).any():
            shown.append((line, x, y))
    if not shown:
        return ""
    low, high = min(x[0] for _, x, _ in shown), max(x[-1] for _, x, _ in shown)
    if low == high:
        low, high = low - 1, high + 1
    bottom, top = _limits([y for _, _, y in shown], log=log, from_zero=from_zero)

    def across(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        share = math.log(y / bottom) / math.log(top / bottom) if log else (y - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    ticks = _log_ticks(bottom, top) if log else _ticks(bottom, top)
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{number(y)}</text>'
        for y in ticks
    ]
    parts += [
        f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(x)}</text>'
        for x in _ticks(low, high, 7)
    ]
    parts += [
        f'<line class="mark" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        for x in marks
        if low <= x <= high
    ]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
        f'<text transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(label)}{' (log scale)' if log else ''}</text>"
    )
    for line, x, y in shown:
        faint = ' class="faint"' if line.faint else ""
        parts.append(f'<path{faint} style="stroke:{line.color}" d="{_path(x, y, across, up)}"/>')
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    key = "".join(
        f'<span><b style="background:{line.color}{";opacity:.4" if line.faint else ""}"></b>{html.escape(line.name)}'
        "<i></i></span>"
        for line, _, _ in shown
    )
    values = json.dumps(
        {
            "low": float(low),
            "high": float(high),
            "lines": [[[_short(one) for one in x], [_short(one) for one in y]] for _, x, y in shown],
        },
        separators=(",", ":"),
    )
    return (
        f'<div class="chart" data-lines="{html.escape(values)}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
        f'<div class="key">{key}<span class="at"></span></div></div>'
    )


def number(value: float) -> str:
    """A number in few characters: 1200 is `1.2k`, 3e-7 `3e-07`."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e12):
        return f"{value:.3g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _path(x: np.ndarray, y: np.ndarray, across: object, up: object) -> str:
    """The commands of a line; a single point between two gaps becomes a dot."""
    commands, pen = [], False
    for index, (at, value) in enumerate(zip(x, y, strict=True)):
        if not math.isfinite(value):
            pen = False
            continue
        place = f"{across(at):.1f} {up(value):.1f}"  # type: ignore[operator]
        alone = not pen and (index + 1 == len(y) or not math.isfinite(y[index + 1]))
        commands.append(f"{'L' if pen else 'M'}{place}" + ("h2" if alone else ""))
        pen = True
    return "".join(commands)


def _limits(values: list[np.ndarray], *, log: bool, from_zero: bool) -> tuple[float, float]:
    """Where the y axis begins and ends."""
    low, high = min(np.nanmin(y) for y in values), max(np.nanmax(y) for y in values)
    if log:
        margin = max((high / low) ** 0.05, 1.05)
        return float(low / margin), float(high * margin)
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return float(low if from_zero and low == 0 else low - margin), float(high + margin)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers between two limits, about as many as wanted."""
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two limits, with their doubles and fivefolds where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 4:
            return found
    return found if len(found) >= 2 else _ticks(low, high)
