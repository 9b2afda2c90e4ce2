"""FLUX.1 by patch pipelining: where it is exact, what a patch reads, the same numbers on stages, memory of stores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.errors import UsageError
from maxdiffusion.models.flux import FLUX_SCHNELL, FlaxFluxTransformer2DModel
from maxdiffusion.models.flux_patches import empty_stores, synchronous
from maxdiffusion.nn.model import DiffusionModel
from tests.models.patched import patched

# float32: stages and patches add the same terms in another order, through a handful of blocks.
TOLERANCE = 1e-5
BATCH, IMAGE, TEXT = 2, 8, 5
KEYS = jax.random.split(jax.random.key(5), 5)


def flux(**keywords: Any) -> FlaxFluxTransformer2DModel:
    """The tiny Flux with an uneven stack of single blocks; four patches, for which the text does not divide."""
    given = {"num_single_layers": 3, "scan_layers": True, "precision": "highest", "pipeline_patches": 4, **keywords}
    model = FLUX_SCHNELL.build("tiny", **given)
    assert isinstance(model, FlaxFluxTransformer2DModel)
    return model


@pytest.fixture(scope="module")
def params() -> Any:
    return flux().init_weights(jax.random.key(0))


def noisy(seed: int = 0) -> Any:
    return jax.random.normal(jax.random.fold_in(KEYS[0], seed), (BATCH, IMAGE, 16))


def cond(masked: bool = False) -> dict[str, Any]:
    mask = {"encoder_attention_mask": jnp.arange(TEXT)[None] < jnp.array([[TEXT], [3]])} if masked else {}
    return mask | {
        "encoder_hidden_states": jax.random.normal(KEYS[1], (BATCH, TEXT, 24)),
        "pooled_projections": jax.random.normal(KEYS[2], (BATCH, 16)),
        "img_ids": jnp.arange(3.0 * IMAGE).reshape(IMAGE, 3) % 5,
        "txt_ids": jnp.zeros((TEXT, 3)),
    }


TIME, LATER = jnp.full((BATCH,), 0.7), jnp.full((BATCH,), 0.6)


class Calls:
    """The compiled calls of a model: of an exact step, and of a patched one with what it left."""

    def __init__(self, model: FlaxFluxTransformer2DModel, given: dict[str, Any]) -> None:
        def exact(params: Any, x: Any, time: Any) -> Any:
            return synchronous(model, params, empty_stores(model, IMAGE, given), x, time, given)

        def approximate(params: Any, stores: Any, x: Any, time: Any) -> Any:
            return patched(model, params, stores, x, time, given)

        self.exact, self.patched = jax.jit(exact), jax.jit(approximate)


def plain(model: DiffusionModel, params: Any, x: Any, time: Any, given: dict[str, Any]) -> Any:
    return jax.jit(lambda p: model.apply({"params": p}, hidden_states=x, timestep=time, **given).sample)(params)  # type: ignore[union-attr]


def distance(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


class Alone:
    """On one device, with a mask of the text: an exact step, and a patched one after it."""

    def __init__(self, params: Any) -> None:
        self.model, self.cond = flux(), cond(masked=True)
        self.calls = Calls(self.model, self.cond)
        self.stores, self.exact = self.calls.exact(params, noisy(), TIME)
        self.patched = self.calls.patched(params, self.stores, noisy(1), LATER)[1]

    def moved(self, params: Any, stores: Any, x: Any) -> np.ndarray:
        """How far the velocity of each patch is from `patched` with other stores, or another x."""
        other = self.calls.patched(params, stores, x, LATER)[1]
        return np.abs(np.asarray(other - self.patched)).reshape(BATCH, 4, 2, -1).max(axis=(0, 2, 3))


@pytest.fixture(scope="module")
def alone(params: Any) -> Alone:
    return Alone(params)


def test_the_synchronous_step_is_the_model(alone: Alone, params: Any) -> None:
    assert distance(alone.exact, plain(alone.model, params, noisy(), TIME, alone.cond)) <= TOLERANCE


def test_keys_of_the_same_step_make_it_exact(alone: Alone, params: Any) -> None:
    """Where nothing has changed since the last step, what it left is what the patches would leave now."""
    _, again = alone.calls.patched(params, alone.stores, noisy(), TIME)
    assert distance(again, alone.exact) <= TOLERANCE
    exact = plain(alone.model, params, noisy(1), LATER, alone.cond)
    assert distance(alone.patched, exact) > 100 * TOLERANCE, "and where something has, it is an approximation"


def test_one_patch_is_exact(params: Any) -> None:
    model, given = flux(pipeline_patches=1), cond()
    stores = empty_stores(model, IMAGE, given)
    _, velocity = jax.jit(lambda params: patched(model, params, stores, noisy(1), LATER, given))(params)
    assert distance(velocity, plain(model, params, noisy(1), LATER, given)) <= TOLERANCE


def test_a_patch_reads_those_before_it_from_this_step_and_those_behind_it_from_the_last(
    alone: Alone, params: Any
) -> None:
    moved = alone.moved(params, alone.stores, noisy(1).at[:, 4:6].add(1.0))  # the third of four patches
    assert np.array_equal(moved[:2], [0, 0]) and (moved[2:] > 1e-3).all()

    def other(patch: int) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[:, :, patch].add(1.0), alone.stores)

    assert not alone.moved(params, other(0), noisy(1)).any(), "every patch reads the first one's keys of this step"
    moved = alone.moved(params, other(2), noisy(1))
    assert (moved > 1e-3).all(), "the first two read the third one's old keys, and the last two what they made of it"


@pytest.mark.parametrize(
    ("sizes", "keywords"),
    [
        ({"stage": 2, "data": 2}, {}),
        pytest.param(
            {"stage": 2, "fsdp": 2, "tensor": 2},
            {"attention_kernel": "flash", "flash_min_seq_length": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"stage": 3}, {"remat_policy": "full"}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "context": 2}, {}, marks=pytest.mark.slow),
        (
            {"stage": 2, "context": 4},
            {},
        ),  # patches of two tokens, filled up for four devices
    ],
)
def test_stages_give_the_numbers_of_one_device(
    sizes: dict[str, int], keywords: Any, alone: Alone, devices: np.ndarray
) -> None:
    mesh = Mesh(devices[: np.prod([*sizes.values()])].reshape(*sizes.values()), tuple(sizes))
    model = flux(mesh=mesh, **keywords)
    params, calls = model.init_weights(jax.random.key(0)), Calls(model, alone.cond)
    stores, exact = calls.exact(params, noisy(), TIME)
    assert distance(exact, alone.exact) <= TOLERANCE
    stores, approximate = calls.patched(params, stores, noisy(1), LATER)
    assert distance(approximate, alone.patched) <= TOLERANCE
    # The larger part of the layers, keys and values, samples of a shard, filled-up patches, width over `tensor`.
    stages, shards = sizes["stage"], sizes.get("data", 1) * sizes.get("fsdp", 1)
    layers = -(-2 // stages) + -(-3 // stages)
    tokens = max(2, sizes.get("context", 1))
    expected = layers * 2 * (BATCH // shards) * 4 * (tokens + tokens) * 32 // sizes.get("tensor", 1) * 4
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(stores)]
    assert sum(held) == expected


def test_more_patches_than_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="pipeline_patches=9 are more than the 8 image tokens: write 8 or fewer"):
        empty_stores(flux(pipeline_patches=9), IMAGE, cond())
    with pytest.raises(UsageError, match="the model has no patches: write pipeline_patches=8"):
        empty_stores(flux(pipeline_patches=None), IMAGE, cond())
