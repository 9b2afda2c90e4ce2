"""A tiny subject on any mesh: one level of eight by eight pixels, a handful of captioned pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils.epath import backend
from jax.sharding import Mesh
from orbax.checkpoint._src.path import gcs_utils

from maxdiffusion.config.schema import Recipe, TrainSection
from maxdiffusion.data.batches import Batches, batches
from maxdiffusion.data.pictures import pictures
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.timesteps import Uniform
from maxdiffusion.pipelines.text_to_image import text_to_image_of
from maxdiffusion.train.feed import Feed, learn_words, make_feed
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.run import TrainResult, train
from maxdiffusion.train.state import TrainState, initial_state, state_shapes
from maxdiffusion.train.step import Objective, Step, train_step
from tests.train.object_store import Store, object_store
from tests.train.runs import run_recipe

# Four channels a group at least: with one, the network has leaves whose true gradient is zero, and Adam turns their
# rounding into steps.
TINY: dict[str, Any] = {
    "block_out_channels": [16],
    "attention_levels": [False],
    "layers_per_block": 1,
    "head_dim": 8,
    "norm_num_groups": 4,
    "text_width": 16,
    "text_layers": 1,
    "text_heads": 2,
}
CONCEPTS = ("red apple", "lemon", "fox", "banana", "rocket")
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Everything of one training on one mesh, before its first step."""

    objective: Objective
    rule: optax.GradientTransformation
    shapes: TrainState
    feed: Feed
    step: Step
    batches: Batches
    tokenizer: WordTokenizer

    def start(self) -> TrainState:
        """A fresh state."""
        return initial_state(self.objective.text_to_image.model, self.rule, self.shapes, seed=0)


def tiny_recipe(**values: Any) -> Recipe:
    """A recipe of the tiny model at full float32 precision."""
    return Recipe(**{"model_config": TINY, "precision": "highest", **values})


def make_subject(mesh: Mesh, section: TrainSection | None = None, **values: Any) -> Subject:
    """The tiny training on a mesh."""
    section = section or TrainSection(batch_size=BATCH, learning_rate=1e-3, warmup_steps=2, ema_decay=0.9)
    source = pictures(CONCEPTS, size=8)
    tokenizer = learn_words(list(source.captions))
    recipe = tiny_recipe(data={"size": 8, "concepts": CONCEPTS}, **values)
    text_to_image = text_to_image_of(
        recipe, mesh=mesh, vocab_size=tokenizer.vocab_size, max_length=tokenizer.max_length
    )
    rule, layout = optimizer(section, text_to_image.model), text_to_image.layout
    objective = Objective(
        text_to_image=text_to_image,
        times=Uniform(),
        caption_dropout=section.caption_dropout,
        empty=tuple(int(word) for word in tokenizer.encode([""])[0][0]),
    )
    shapes = state_shapes(
        text_to_image.model, rule, keeps_ema=section.ema_decay > 0, master_dtype=jnp.dtype(section.master_dtype)
    )
    feed = make_feed(layout, tokenizer, batch_size=section.batch_size)
    examples = feed.shapes(section.batch_size, text_to_image.image_shape)
    step = train_step(
        objective,
        rule,
        shapes=shapes,
        examples=examples,
        ema_decay=section.ema_decay,
        accumulation_steps=section.accumulation_steps,
        rounding=section.rounding,
    )
    stream = batches(source, batch_size=section.batch_size, seed=0)
    return Subject(
        objective=objective, rule=rule, shapes=shapes, feed=feed, step=step, batches=stream, tokenizer=tokenizer
    )


def losses_of(subject: Subject, num_steps: int) -> np.ndarray:
    """The mean losses of the first steps."""
    state, losses = subject.start(), []
    for number in range(num_steps):
        state, result = subject.step(state, subject.feed(subject.batches[number]))
        losses.append(float(result.loss))
    return np.array(losses)


@pytest.fixture(scope="session")
def one_device() -> Mesh:
    """A mesh of the first device alone."""
    return Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.fixture(scope="session")
def subject_on() -> Callable[..., Subject]:
    """Makes the tiny training on a mesh."""
    return make_subject


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A tiny run of six steps, on the mesh of the demonstration."""
    return train(run_recipe(tmp_path_factory.mktemp("runs") / "tiny", "train.eval_pictures=1"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket of an object store in this process."""
    with object_store() as address:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        monkeypatch.setattr(fsspec, "get_filesystem_class", lambda name: Store)
        monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Store())
        monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
        yield "gs://bucket"
