"""The model `pictures` folds pixels, reads its text, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import UsageError
from maxdiffusion.models.pictures import PICTURES, Pictures, position_channels


@pytest.fixture(scope="module")
def params() -> Any:
    return PICTURES.build("tiny").init_weights(jax.random.key(0))


def test_text_and_time_change_the_prediction(params: Any) -> None:
    model = PICTURES.build("tiny")
    images = jax.random.normal(jax.random.key(1), (1, 8, 8, 3))
    mask = jnp.ones((1, 4), bool)

    @jax.jit
    def run(time: float, ids: jax.Array) -> jax.Array:
        return model.apply({"params": params}, images, jnp.full((1,), time), ids, mask)

    base = run(500.0, jnp.array([[2, 3, 4, 5]]))
    assert base.shape == images.shape
    assert float(jnp.abs(run(500.0, jnp.array([[2, 3, 4, 6]])) - base).max()) > 1e-3
    assert float(jnp.abs(run(900.0, jnp.array([[2, 3, 4, 5]])) - base).max()) > 1e-3


@pytest.mark.slow
def test_encoding_once_gives_the_same(params: Any) -> None:
    model = PICTURES.build("tiny")
    images, ids, mask = jnp.ones((2, 8, 8, 3)), jnp.array([[2, 3, 0], [2, 4, 5]]), jnp.array([[1, 1, 0], [1] * 3], bool)
    times = jnp.array([100.0, 800.0])
    whole = model.apply({"params": params}, images, times, ids, mask)
    text = model.apply({"params": params}, ids, mask, method="encode")
    parts = model.apply({"params": params}, images, times, text, mask, method="denoise")
    np.testing.assert_allclose(whole, parts, rtol=1e-6, atol=1e-6)


def test_folded_pixels_come_back_in_their_places(params: Any) -> None:
    """A network that gives back its input (here a stand-in for the UNet's channels) must leave pictures as they are."""
    from einops import rearrange

    images = jnp.arange(2 * 8 * 8 * 3.0).reshape(2, 8, 8, 3)
    folded = rearrange(images, "b (h p) (w q) c -> b (p q c) h w", p=2, q=2)
    assert folded.shape == (2, 12, 4, 4)
    np.testing.assert_array_equal(folded[0, :, 1, 2].reshape(2, 2, 3), images[0, 2:4, 4:6])
    kernel = params["unet"]["conv_in"]["kernel"]
    assert kernel.shape[2] == 12 + position_channels(4, 4, Pictures.position_waves).shape[0]


def test_every_position_has_its_own_channels() -> None:
    channels = position_channels(4, 6, 2)
    assert channels.shape == (2 + 2 * 4, 4, 6)
    assert channels.dtype == np.float32
    assert len(np.unique(channels.reshape(10, -1).T, axis=0)) == 24
    assert position_channels(4, 6, 0).shape == (0, 4, 6)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"attention_levels": (True,)}, "attention_levels has 1 entries for 2 levels"),
        ({"fold": 3}, "image_size=8 does not divide by fold=3"),
        ({"fold": 0}, "fold=0"),
        ({"head_dim": 5}, "head_dim=5 does not divide the 16 channels"),
        ({"blok_out_channels": (8,)}, "did you mean 'block_out_channels'"),
        ({"position_waves": -1}, "position_waves=-1"),
    ],
)
def test_what_does_not_fit_is_refused(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        PICTURES.build("tiny", **keywords)


def test_pictures_that_do_not_fold_are_refused(params: Any) -> None:
    ids, mask = jnp.ones((1, 2), int), jnp.ones((1, 2), bool)
    with pytest.raises(UsageError, match="7 x 8 pixels do not fold"):
        PICTURES.build("tiny").apply({"params": params}, jnp.ones((1, 7, 8, 3)), jnp.ones(1), ids, mask)
