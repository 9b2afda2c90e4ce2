"""Error of patch pipelining by number of warm-up steps: mean over 16 prompts, on a tiny Flux trained on the spot.

    python benchmarks/patches.py --patches 8 --steps 16 [--json]

The model learns 16 concepts of the built-in pictures in four styles, 16 x 16 pixels as 64 tokens. The text is the
concept's name alone, so that patches must agree on a style. The error of a picture is max |a - b| / max |b| against the
usual sampler. The stages of a mesh change no number, so one device is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from einops import rearrange

from maxdiffusion.data.pictures import concept_lists, pictures
from maxdiffusion.data.source import to_float
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.diffusion.grid import make_grid
from maxdiffusion.diffusion.process import FlowMatching
from maxdiffusion.diffusion.sample import sample
from maxdiffusion.diffusion.solvers import get_solver
from maxdiffusion.models import FlaxFluxTransformer2DModel
from maxdiffusion.pipelines.patches import sample_patched

NUM_PROMPTS, SIDE, FOLD, BATCH = 16, 16, 2, 32
TOKENS, CHANNELS = (SIDE // FOLD) ** 2, 3 * FOLD**2
TEXT_WIDTH, POOLED_WIDTH = 24, 16


def network(**keywords: Any) -> FlaxFluxTransformer2DModel:
    """Two double and four single blocks, 64 wide."""
    return FlaxFluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        axes_dims_rope=(4, 6, 6),
        scan_layers=True,
        **keywords,
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained network, and what the prompts are to it.

    Attributes:
        params: weights.
        cond: keywords of the network's call for each of the prompts.
        losses: mean loss of the first and of the last tenth of the training.
    """

    params: Any
    cond: dict[str, jax.Array]
    losses: tuple[float, float]


def trained(num_steps: int) -> Trained:
    """Trains the network by flow matching; the words have fixed random states."""
    data = pictures(concept_lists()["demo-160"][:NUM_PROMPTS], size=SIDE)
    names = sorted(set(data.concepts))
    ids, _ = WordTokenizer.train(names, max_length=6).encode(names)
    rng = np.random.default_rng(0)
    states = rng.normal(size=(ids.max() + 1, TEXT_WIDTH)).astype(np.float32)[ids]
    pooled = rng.normal(size=(NUM_PROMPTS, POOLED_WIDTH)).astype(np.float32)
    rows, columns = np.divmod(np.arange(TOKENS), SIDE // FOLD)
    places = np.stack([np.zeros(TOKENS), rows, columns], axis=1).astype(np.float32)
    shared = {"img_ids": jnp.asarray(places), "txt_ids": jnp.zeros((ids.shape[1], 3))}
    of_prompt = {"encoder_hidden_states": jnp.asarray(states), "pooled_projections": jnp.asarray(pooled)}
    clean = jnp.asarray(
        rearrange(to_float(data.images), "b (h p) (w q) c -> b (h w) (p q c)", p=FOLD, q=FOLD), jnp.float32
    )
    prompt = jnp.asarray([names.index(concept) for concept in data.concepts])
    model = network()
    rule = optax.adam(optax.cosine_decay_schedule(3e-3, num_steps))

    def loss(params: Any, key: jax.Array) -> jax.Array:
        of_row, of_noise, of_time = jax.random.split(key, 3)
        row = jax.random.randint(of_row, (BATCH,), 0, clean.shape[0])
        noise, time = jax.random.normal(of_noise, (BATCH, TOKENS, CHANNELS)), jax.random.uniform(of_time, (BATCH,))
        x0, t = clean[row], time[:, None, None]
        cond = jax.tree.map(lambda leaf: leaf[prompt[row]], of_prompt)
        x = (1 - t) * x0 + t * noise
        velocity: Any = model.apply({"params": params}, hidden_states=x, timestep=time, **cond, **shared)
        return jnp.mean(jnp.square(velocity.sample - (noise - x0)))

    def step(state: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, memory = state
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, memory = rule.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    params = model.init_weights(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), num_steps)
    (params, _), values = jax.jit(lambda state: jax.lax.scan(step, state, keys))((params, rule.init(params)))
    tenth = max(num_steps // 10, 1)
    losses = float(values[:tenth].mean()), float(values[-tenth:].mean())
    return Trained(params=params, cond={**of_prompt, **shared}, losses=losses)


def errors(made: Trained, *, patches: int, steps: int, warmups: list[int]) -> dict[int, np.ndarray]:
    """For each number of warm-up steps, the error of every prompt's picture."""
    grid = make_grid(FlowMatching(timestep_scale=1), steps, "uniform")
    noise = jax.random.normal(jax.random.key(2), (NUM_PROMPTS, TOKENS, CHANNELS))
    solver, plain = get_solver("euler"), network(precision="highest")

    def denoise(cache: Any, x: Any, timestep: Any, cond: Any) -> Any:
        out: Any = plain.apply({"params": made.params}, hidden_states=x, timestep=timestep, **cond)
        return cache, out.sample

    exact = jax.jit(lambda x: sample(denoise, x, grid, made.cond, solver=solver, prediction="velocity").x)(noise)
    found = {}
    for warmup in warmups:
        model = network(precision="highest", pipeline_patches=patches, pipeline_warmup_steps=warmup)
        call = jax.jit(lambda x, model=model: sample_patched(model, made.params, x, grid, made.cond, solver=solver))
        apart = np.abs(np.asarray(call(noise) - exact)).max(axis=(1, 2))
        found[warmup] = apart / np.abs(np.asarray(exact)).max(axis=(1, 2))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of the sampler")
    parser.add_argument("--train-steps", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    warmups = sorted({1, 2, 4, 8, 12, args.steps})
    warmups = [warmup for warmup in warmups if warmup <= args.steps]
    made = trained(args.train_steps)
    found = errors(made, patches=args.patches, steps=args.steps, warmups=warmups)
    figures = {
        "patches": args.patches,
        "prompts": NUM_PROMPTS,
        "steps": args.steps,
        "train_steps": args.train_steps,
        "losses": made.losses,
        "errors": {warmup: {"mean": float(e.mean()), "max": float(e.max())} for warmup, e in found.items()},
    }
    lines = [
        f"{args.patches} patches, {args.steps} steps; trained for {args.train_steps} steps, loss "
        f"{made.losses[0]:.3f} -> {made.losses[1]:.3f}",
        f"{'warm-up steps':>13}{'mean error':>12}{'largest':>10}   of {NUM_PROMPTS} prompts",
        *(f"{warmup:>13}{e.mean():>12.2e}{e.max():>10.1e}" for warmup, e in found.items()),
    ]
    sys.stdout.write((json.dumps(figures) if args.json else "\n".join(lines)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
