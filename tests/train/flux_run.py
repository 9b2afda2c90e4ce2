"""A training of FLUX.1's tiny twin by the trainer's own state, step, loop and checkpoints, with its own objective.

What there is of recipes trains the pictures model; this is the same machinery with the other architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.data.batches import batches
from maxdiffusion.data.pictures import pictures
from maxdiffusion.diffusion.noise import noise, stream
from maxdiffusion.diffusion.timesteps import TimeSampler, Uniform
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.pipelines.checkpoint_folder import newest_whole
from maxdiffusion.specs import MeshSpec
from maxdiffusion.train.checkpoint import Checkpoints
from maxdiffusion.train.feed import learn_words, make_feed
from maxdiffusion.train.loop import Loop, Outcome
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.state import initial_state, state_shapes
from maxdiffusion.train.step import Examples, train_step

BATCH, SIZE = 8, 4


@dataclass(frozen=True, kw_only=True)
class FluxObjective:
    """Flow matching on pictures of 4 x 4 pixels as 4 tokens; text is noise that the caption's ids decide."""

    model: DiffusionModel
    times: TimeSampler = Uniform()  # noqa: RUF009  (frozen)

    def losses(self, params: Any, examples: Examples, key: jax.Array, step: jax.Array) -> jax.Array:
        """The loss of each sample, float32."""
        rows = examples.images.shape[0]
        data = jnp.tile(examples.images.reshape(rows, 4, 12), (1, 1, 2))[..., :16]
        drawn = noise(stream(key, "noise"), examples.index, data.shape[1:], step=step)
        time = self.times(key, examples.index, step=step)[:, None, None]
        text = jnp.sin(examples.ids[:, :6, None] * jnp.arange(1.0, 25.0)[None, None])
        out: Any = self.model.apply(
            {"params": params},
            hidden_states=(1 - time) * data + time * drawn,
            encoder_hidden_states=text,
            pooled_projections=text.mean(axis=1)[:, :16],
            timestep=time[:, 0, 0],
            img_ids=np.stack(np.meshgrid(np.zeros(1), np.arange(2.0), np.arange(2.0), indexing="ij"), -1)
            .reshape(4, 3)
            .astype(np.float32),
            txt_ids=np.zeros((6, 3), np.float32),
            guidance=3.5,
        )
        return jnp.mean(jnp.square(out.sample - (drawn - data)), axis=(1, 2))


def train_flux(folder: Path, steps: int, *, mesh: str = "data=2,fsdp=2,tensor=2", every: int = 3) -> Outcome:
    """Trains to a step, from the newest whole checkpoint of the folder if there is one.

    Args:
        folder: of the run.
        steps: optimizer steps.
        mesh: sizes of its axes.
        every: steps between checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    section = TrainSection(
        steps=steps, batch_size=BATCH, warmup_steps=2, ema_decay=0.9, log_every=1, checkpoint_every=every
    )
    model = lookup("flux-dev").build(
        "tiny", num_layers=1, num_single_layers=1, precision="highest", mesh=build_mesh(MeshSpec.parse(mesh))
    )
    source = pictures(("red apple", "lemon", "fox", "banana", "rocket"), size=SIZE)
    tokenizer, rule = learn_words(list(source.captions)), optimizer(section, model)
    feed = make_feed(model.layout, tokenizer, batch_size=BATCH)
    shapes = state_shapes(model, rule, keeps_ema=True)
    examples = feed.shapes(BATCH, (SIZE, SIZE, 3))
    objective: Any = FluxObjective(model=model)
    done = newest_whole(folder) or 0
    checkpoints = Checkpoints(folder)
    state = checkpoints.restore(done, shapes) if done else initial_state(model, rule, shapes, seed=0)
    step = train_step(objective, rule, shapes=shapes, examples=examples, ema_decay=0.9)
    loop = Loop(
        section=section,
        step=step,
        batches=batches(source, batch_size=BATCH, seed=0),
        feed=feed,
        reporter=Reporter(),
        metrics=MetricsFile(folder / "metrics.jsonl", resume_step=done),
        checkpoints=checkpoints,
    )
    try:
        return loop.run(state)
    finally:
        checkpoints.close()
