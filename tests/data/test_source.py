"""Pixels and model range are inverse to each other, to the bit."""

import numpy as np

from maxdiffusion.data.source import to_float, to_pixels


def test_every_pixel_value_survives_the_round_trip():
    pixels = np.arange(256, dtype=np.uint8)
    values = to_float(pixels)
    assert values.dtype == np.float32
    assert values[0] == -1 and values[255] == 1
    assert np.array_equal(to_pixels(values), pixels)


def test_values_out_of_range_are_clipped_and_the_rest_rounded():
    step = np.float32(2 / 255)
    values = np.array([-7, 7, -1 + 0.4 * step, -1 + 0.6 * step], np.float32)
    assert to_pixels(values).tolist() == [0, 255, 0, 1]
