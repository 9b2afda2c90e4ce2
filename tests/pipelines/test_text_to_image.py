"""A recipe becomes a process and a sampler; guidance of 1 is no guidance."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import DataSection, DiffusionSection, SampleSection
from maxdiffusion.data.pictures import STYLES
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.process import FlowMatching, VariancePreserving
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.text_to_image import process_of, sampler, styles_in, text_to_image_of
from tests.train.conftest import tiny_recipe

TOKENIZER = WordTokenizer.train(["a red apple, flat style", "a fox"], max_length=8)


def test_the_process_of_a_recipe() -> None:
    assert process_of(DiffusionSection(shift=3.0)) == FlowMatching(shift=3.0)
    section = DiffusionSection(process="vp", prediction="v_prediction", zero_terminal_snr=True)
    assert process_of(section) == VariancePreserving(zero_terminal_snr=True)


def test_the_styles_of_the_data() -> None:
    assert styles_in(DataSection()) == STYLES
    assert styles_in(DataSection(styles=("noto",))) == ("noto",)
    assert styles_in(DataSection(source="folder", path="here")) == ()


def test_what_follows_from_the_data_cannot_be_set() -> None:
    recipe = tiny_recipe(model_config={"vocab_size": 7})
    with pytest.raises(UsageError, match="vocab_size follows from the captions"):
        text_to_image_of(recipe, mesh=None, vocab_size=20, max_length=8)


@pytest.mark.parametrize("process", ["flow", "vp"])
def test_guidance_moves_away_from_the_empty_text(process: str) -> None:
    """Scale 1 needs no empty text, scale 0 needs no other, and between them guidance is linear in one step."""
    recipe = tiny_recipe(
        data={"size": 8}, diffusion={"process": process, "prediction": "sample" if process == "vp" else "velocity"}
    )
    subject = text_to_image_of(recipe, mesh=None, vocab_size=TOKENIZER.vocab_size, max_length=8)
    params = subject.model.init_weights(jax.random.key(0))
    texts, empty = TOKENIZER.encode(["a fox", "a red apple"]), TOKENIZER.encode([""])

    def draw(scale: float, texts: tuple) -> np.ndarray:
        section = SampleSection(steps=1, guidance_scale=scale)
        return sampler(subject, section)(params, texts, empty, seed=0, indices=np.arange(2))

    alone, without, guided = draw(1.0, texts), draw(0.0, texts), draw(3.0, texts)
    np.testing.assert_allclose(guided, without + 3 * (alone - without), atol=2e-5)
    np.testing.assert_allclose(without, draw(1.0, tuple(np.repeat(array, 2, axis=0) for array in empty)), atol=2e-5)
    assert np.abs(alone - without).max() > 1e-4


@pytest.mark.parametrize("axes", [("cfg",), pytest.param(("cfg", "tensor"), marks=pytest.mark.slow)], ids="x".join)
def test_the_halves_of_one_sample_part_along_the_mesh(axes: tuple[str, ...], devices: np.ndarray) -> None:
    """Guidance parallelism: one guided sample keeps every device busy, with the numbers of one device."""
    recipe = tiny_recipe(data={"size": 8})
    texts, empty = TOKENIZER.encode(["a fox"]), TOKENIZER.encode([""])
    drawn, flops = [], []
    for mesh in (None, Mesh(devices[: 2 ** len(axes)].reshape((2,) * len(axes)), axes)):
        subject = text_to_image_of(recipe, mesh=mesh, vocab_size=TOKENIZER.vocab_size, max_length=8)
        draw = sampler(subject, SampleSection(steps=2, guidance_scale=3.0))
        params = subject.model.init_weights(jax.random.key(0))
        drawn.append(draw(params, texts, empty, seed=0, indices=np.arange(1)))
        args = (params, *texts, *empty, jax.random.key(0), np.arange(1, dtype=np.int32))
        flops.append(draw.draw.lower(*args).compile().cost_analysis()["flops"])  # type: ignore[attr-defined]
    np.testing.assert_allclose(drawn[1], drawn[0], atol=1e-5)
    # Half of the network's work, and what is not cut: noise, solver and guidance.
    assert flops[1] < 0.6 * flops[0]


def test_without_guidance_a_mesh_axis_for_it_shares_the_samples(devices: np.ndarray) -> None:
    mesh = Mesh(devices[:2], ("cfg",))
    subject = text_to_image_of(tiny_recipe(data={"size": 8}), mesh=mesh, vocab_size=TOKENIZER.vocab_size, max_length=8)
    assert not sampler(subject, SampleSection(guidance_scale=1.0)).guided
    assert subject.layout.rows(2).spec == jax.P("cfg")  # type: ignore[union-attr]
    assert subject.layout.rows(1).spec in (jax.P(), jax.P(None))  # type: ignore[union-attr]
