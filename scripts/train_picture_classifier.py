"""Trains the shipped classifier of the built-in pictures on the split `train` and writes it into the package.

    python scripts/train_picture_classifier.py

The held-out pairs are looked at once, at the end, for the figures in `picture-classifier.json`. Pictures are moved,
zoomed, blurred, recoloured and made noisy, so that features hold for what a half-trained model paints, too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from maxdiffusion.data.pictures import STYLES, Pictures, concept_names, pictures
from maxdiffusion.models.picture_classifier import SIZE, PictureClassifier

FOLDER = Path(__file__).parent.parent / "src" / "maxdiffusion" / "shipped"


def arrays(source: Pictures) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pixels, numbers of concepts, numbers of styles)."""
    number = {name: index for index, name in enumerate(concept_names())}
    concepts = np.array([number[name] for name in source.concepts], np.int32)
    return source.images, concepts, np.array([STYLES.index(style) for style in source.styles], np.int32)


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Random versions of pictures from -1 to 1."""

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 9)
        zoom = jnp.exp(jax.random.uniform(keys[0], (2,), minval=-0.12, maxval=0.1))
        move = jax.random.uniform(keys[1], (2,), minval=-4, maxval=4) + (1 - zoom) * SIZE / 2
        # On white: beyond its border a picture is 0 after this shift.
        image = jax.image.scale_and_translate(image - 1, image.shape, (0, 1), zoom, move, "linear", antialias=True) + 1
        side = jax.random.choice(keys[2], jnp.array([12, 16, 24, 32]))
        soft = jax.image.scale_and_translate(
            jax.image.scale_and_translate(image, image.shape, (0, 1), jnp.full(2, side / SIZE), jnp.zeros(2), "linear"),
            image.shape, (0, 1), jnp.full(2, SIZE / side), jnp.zeros(2), "linear",
        )  # fmt: skip
        image = jnp.where(jax.random.bernoulli(keys[3], 0.3), soft, image)
        gain = jax.random.uniform(keys[4], (3,), minval=0.85, maxval=1.1)
        image = image * gain + jax.random.uniform(keys[5], (3,), minval=-0.08, maxval=0.08)
        grey = jnp.broadcast_to(image.mean(axis=-1, keepdims=True), image.shape)
        image = image + jax.random.uniform(keys[6]) * jax.random.bernoulli(keys[7], 0.2) * (grey - image)
        return image + 0.1 * jax.random.uniform(keys[8]) * jax.random.normal(key, image.shape)

    return jax.vmap(one)(jax.random.split(key, images.shape[0]), images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    pixels, concepts, styles = arrays(pictures(split="train"))
    model = PictureClassifier(num_concepts=len(concept_names()), num_styles=len(STYLES))
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, SIZE, SIZE, 3)))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0, 2e-3, args.steps // 20, args.steps)
    rule = optax.adamw(schedule, weight_decay=0.05)
    opt_state = rule.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, key, images, concepts, styles):
        drop, vary = jax.random.split(key)

        def loss(params):
            varied = augment(vary, images.astype(jnp.float32) / 127.5 - 1)
            out = model.apply({"params": params}, varied, training=True, rngs={"dropout": drop})
            by_concept = optax.softmax_cross_entropy_with_integer_labels(out.concepts, concepts)
            by_style = optax.softmax_cross_entropy_with_integer_labels(out.styles, styles)
            return jnp.mean(by_concept + 0.3 * by_style)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = rule.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    began, log, key = time.perf_counter(), [], jax.random.key(args.seed)
    order = np.random.default_rng(args.seed)
    rows = np.concatenate([order.permutation(len(pixels)) for _ in range(args.steps * args.batch // len(pixels) + 1)])
    for number in range(args.steps):
        chosen = rows[number * args.batch : (number + 1) * args.batch]
        params, opt_state, value = step(
            params, opt_state, jax.random.fold_in(key, number), pixels[chosen], concepts[chosen], styles[chosen]
        )
        if number % 50 == 49:
            log.append({"step": number + 1, "loss": round(float(value), 4)})
            sys.stderr.write(f"{log[-1]} {time.perf_counter() - began:.0f} s\n")

    half = {"/".join(name): np.asarray(leaf, np.float16) for name, leaf in flatten_dict(params).items()}
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float16).astype(jnp.float32), params)
    see = jax.jit(lambda images: model.apply({"params": params}, images.astype(jnp.float32) / 127.5 - 1))

    def shares(split: str) -> dict[str, float]:
        pixels, concepts, styles = arrays(pictures(split=split))
        outs = [see(pixels[start : start + 512]) for start in range(0, len(pixels), 512)]
        top = np.argsort(-np.concatenate([np.asarray(out.concepts) for out in outs]), axis=1)[:, :5]
        style = np.concatenate([np.asarray(out.styles).argmax(axis=1) for out in outs])
        return {
            "pictures": len(pixels),
            "concept": round(float((top[:, 0] == concepts).mean()), 4),
            "concept_among_5": round(float((top == concepts[:, None]).any(axis=1).mean()), 4),
            "style": round(float((style == styles).mean()), 4),
        }

    args.out.mkdir(parents=True, exist_ok=True)
    weights = args.out / "picture-classifier.safetensors"
    save_file(half, weights)
    said = {
        "what": "classifier of the built-in pictures; it never saw the held-out pairs",
        "made_by": "scripts/train_picture_classifier.py",
        "steps": args.steps,
        "batch": args.batch,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - began),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "parameters": int(sum(leaf.size for leaf in half.values())),
        "train": shares("train"),
        "held_out": shares("held_out"),
        "log": log,
    }
    (args.out / "picture-classifier.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(json.dumps({key: said[key] for key in ("parameters", "seconds", "train", "held_out")}) + "\n")


if __name__ == "__main__":
    main()
