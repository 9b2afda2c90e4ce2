"""Charts are well-formed SVG whose axes hold every value, and say what was left out by leaving a gap."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from maxdiffusion.train.charts import HEIGHT, WIDTH, Line, line_chart, number, ramp, smoothed, thinned


def _line(y: list[float], **values: str) -> Line:
    return Line(**{"name": "loss", "x": np.arange(1.0, len(y) + 1), "y": np.array(y), **values})  # type: ignore[arg-type]


def _drawn(chart: str) -> tuple[list[tuple[float, float]], list[str]]:
    """Places that the first line goes through, and the words."""
    svg = ET.fromstring(re.search(r"<svg.*</svg>", chart)[0])  # type: ignore[index]
    path = svg.find("path")
    assert path is not None
    places = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attrib["d"])]
    return places, [text.text or "" for text in svg.iter("text")]


@pytest.mark.parametrize("log", [False, True])
def test_a_line_stays_inside_and_rises_with_its_values(log: bool) -> None:
    places, words = _drawn(line_chart([_line([1.0, 10.0, 100.0, 1000.0])], label="loss & <co>", log=log))
    across, up = zip(*places, strict=True)
    assert all(0 < x < WIDTH for x in across) and all(0 < y < HEIGHT for y in up)
    assert list(across) == sorted(across) and list(up) == sorted(up, reverse=True)
    steps = -np.diff(up)
    # Equal ratios are equal lengths on a logarithmic axis alone; drawn to a tenth of a unit.
    assert (np.ptp(steps) < 0.3) == log
    assert f"loss & <co>{' (log scale)' if log else ''}" in words
    assert {"10", "100"} <= set(words) if log else {"500", "1k"} & set(words)


def test_what_is_not_finite_is_a_gap() -> None:
    chart = line_chart([_line([1.0, np.nan, 3.0, 4.0, np.inf])], label="loss")
    assert re.search(r'd="M[-\d. ]+h2M[-\d. ]+L[-\d. ]+"', chart)
    told = json.loads(html.unescape(re.search(r'data-lines="([^"]*)"', chart)[1]))  # type: ignore[index]
    assert told["lines"] == [[[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, None, 3.0, 4.0, None]]]


@pytest.mark.parametrize("y", [[], [np.nan], [np.nan, np.nan]])
def test_nothing_to_draw_is_no_chart(y: list[float]) -> None:
    assert line_chart([_line(y)], label="loss") == ""


@pytest.mark.parametrize("y", [[0.5], [0.0, 0.0], [-1.0, 2.0]])
def test_single_and_equal_values_have_axes_too(y: list[float]) -> None:
    places, words = _drawn(line_chart([_line(y)], label="loss", from_zero=True))
    assert len(places) == len(y) and all(np.isfinite(place).all() for place in places)
    assert len(words) > 4


def test_long_lines_keep_their_mean() -> None:
    x = np.arange(10_000.0)
    y = np.where(x == 17, np.nan, np.sin(x / 500))
    fewer = thinned(x, y, 100)
    assert len(fewer[0]) == 100 and np.isfinite(fewer[1]).all()
    np.testing.assert_allclose(fewer[0], x.reshape(100, 100).mean(axis=1))
    np.testing.assert_allclose(fewer[1], np.nanmean(y.reshape(100, 100), axis=1))


def test_smoothing_is_the_mean_of_finite_neighbours() -> None:
    np.testing.assert_allclose(smoothed(np.array([1.0, 2.0, 3.0, np.nan, 5.0]), 3), [1.5, 2.0, 2.5, 4.0, 5.0])
    np.testing.assert_allclose(smoothed(np.array([1.0, 3.0]), 40), [2.0, 2.0])


def test_numbers_are_short_and_colours_differ() -> None:
    assert [number(value) for value in (0.0, 1200.0, 3e-7, 0.25, 2.5e9)] == ["0", "1.2k", "3e-07", "0.25", "2.5G"]
    assert len(set(ramp(10))) == 10 and all(re.fullmatch("#[0-9a-f]{6}", color) for color in ramp(10))
