"""Sizes of Stable Diffusion, counted from shapes alone."""

from __future__ import annotations

import math

import jax
import pytest

from maxdiffusion.models import FlaxUNet2DConditionModel
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel


def count(model: DiffusionModel) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract_params()[0]))


@pytest.mark.parametrize(
    ("name", "parameters"), [("sd15", 859_520_964), ("sd21", 865_910_724), ("sdxl", 2_567_463_684)]
)
def test_parameter_count_is_the_originals(name: str, parameters: int) -> None:
    assert count(lookup(name).build()) == parameters


def test_with_no_keywords_it_is_stable_diffusion_1_5() -> None:
    assert count(FlaxUNet2DConditionModel()) == 859_520_964
