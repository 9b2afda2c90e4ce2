"""The rule of a step: AdamW, Adafactor, Lion or Muon, warmed up and clipped; schedules count optimizer steps alone.

`learning_rate` means about the same for all but Lion: Adafactor is not scaled by the size of the weights, Muon's steps
are as long as AdamW's. Decay is decoupled and times the learning rate for all; only kernels decay, no biases, norms or
tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.nn.model import DiffusionModel

FACTORED_FROM = 128
"""Adafactor keeps rows and columns of second moments where two dimensions are at least so large, as the original."""

MUON_RMS = 0.2
"""Root mean square of Muon's steps, a unit of learning rate: as AdamW's (Liu et al. 2025, section 2.2)."""

ENDS = ("conv_in", "conv_out", "x_embedder", "context_embedder")
"""Layers that read or write what comes from outside: AdamW's under Muon, whose rule is for hidden matrices."""


def learning_rate(section: TrainSection) -> Callable[[Any], Float[Array, ""]]:
    """The learning rate of each optimizer step, counted from 0.

    It rises in a straight line, reaching its height in step `warmup_steps - 1` (step 0 learns already), and then stays
    or falls along half a cosine, which would be zero in the step after the last. With `decay_steps` it stays first and
    falls in so many steps at the end (warm-up, stable, decay: Hu et al. 2024), so a run is lengthened by resuming it.

    Args:
        section: height, warm-up, schedule and number of steps.
    """

    def rate(count: Any) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        height = jnp.minimum(1.0, (step + 1) / max(section.warmup_steps, 1))
        if section.schedule == "cosine":
            length = max(section.decay_steps or section.steps - section.warmup_steps, 1)
            done = jnp.clip((step - (section.steps - length)) / length, 0.0, 1.0)
            height = height * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return section.learning_rate * height

    return rate


def optimizer(section: TrainSection, model: DiffusionModel | None = None) -> optax.GradientTransformation:
    """The rule of a recipe, on float32 weights.

    Args:
        section: which one, rates, decays and the largest norm of the gradients.
        model: whose weights; Muon and Adafactor ask for the logical names of their dimensions, which tell the layers of
            a stack apart. Without it, Adafactor takes every weight as one.
    """
    if section.optimizer == "adamw":
        rule = _adamw(section, beta1=_or(section.beta1, 0.9))
    elif section.optimizer == "lion":
        rule = optax.lion(
            learning_rate(section),
            b1=_or(section.beta1, 0.9),
            b2=_or(section.beta2, 0.99),
            weight_decay=section.weight_decay,
            mask=_kernels,
        )
    elif section.optimizer == "adafactor":
        rule = _adafactor(section, None if model is None else model.abstract_params()[1])
    else:
        assert model is not None, "Muon needs the names of the weights' dimensions"
        rule = _muon(section, model.abstract_params()[1])
    # Without a limit something stands there too: a checkpoint names states by their places, and the limit may change.
    clip = optax.identity() if section.grad_clip is None else optax.clip_by_global_norm(section.grad_clip)
    return optax.chain(clip, rule)


def _adamw(section: TrainSection, *, beta1: float) -> optax.GradientTransformation:
    """Loshchilov and Hutter 2019."""
    return optax.adamw(
        learning_rate(section),
        b1=beta1,
        b2=_or(section.beta2, 0.99),
        weight_decay=section.weight_decay,
        mask=_kernels,
    )


def _adafactor(section: TrainSection, names: Any) -> optax.GradientTransformation:
    """Shazeer and Stern 2018, with an absolute learning rate (as Zhai et al. 2022, section 3.5) and AdamW's decay.

    `optax.adafactor` would add the decay after the learning rate, so that it would not follow the schedule.
    """
    momentum = [] if section.beta1 is None else [optax.ema(section.beta1, debias=False)]
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM),
        optax.clip_by_block_rms(1.0) if names is None else optax.stateless(_clip_by_layer(names)),
        *momentum,
        optax.add_decayed_weights(section.weight_decay, mask=_kernels),
        optax.scale_by_learning_rate(learning_rate(section)),
    )


def _clip_by_layer(names: Any) -> Callable[..., Any]:
    """Updates cut to a root mean square of 1, for each weight; a stack has one for each of its layers.

    Args:
        names: logical names of the weights' dimensions.
    """

    def one(update: Array, names: tuple[str | None, ...]) -> Array:
        within = tuple(axis for axis, name in enumerate(names) if name != "layers")
        return update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update), axis=within, keepdims=True)))

    def clip(updates: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(one, updates, names)

    return clip


def _muon(section: TrainSection, names: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for the rest.

    A stack of layers is a matrix for each layer; heads are part of what a projection reads or makes; a convolution's
    window is part of what it reads.
    """
    cuts = jax.tree_util.tree_map_with_path(_matrix, names, is_leaf=_is_names)
    labels = jax.tree.map(lambda cut: "adamw" if cut is None else "muon", cuts, is_leaf=_is_cut)
    masked = jax.tree.map(lambda cut: optax.MaskedNode() if cut is None else cut, cuts, is_leaf=_is_cut)

    def as_long_as_adamw(updates: Any, params: Any = None) -> Any:
        del params

        def one(update: Array, cut: optax.contrib.MuonDimensionNumbers) -> Array:
            sides: Any = (cut.reduction_axis, cut.output_axis)
            return update * (
                MUON_RMS * math.sqrt(max(math.prod(update.shape[axis] for axis in side) for side in sides))
            )

        return jax.tree.map(one, updates, masked)

    muon = optax.chain(
        optax.contrib.scale_by_muon(beta=_or(section.beta1, 0.95), weight_dimension_numbers=masked),
        optax.stateless(as_long_as_adamw),
        optax.add_decayed_weights(section.weight_decay, mask=_kernels),
        optax.scale_by_learning_rate(learning_rate(section)),
    )
    return optax.partition({"muon": muon, "adamw": _adamw(section, beta1=0.9)}, labels)


def _matrix(path: Any, names: tuple[str | None, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dimensions of a hidden kernel are read and which are made, by their logical names; None for the rest."""
    parts = [entry.key for entry in path]
    if parts[-1] != "kernel" or parts[-2] in ENDS or parts[:-1] == ["proj_out"]:
        return None
    makes = 2 if names[-2:] == ("heads", "kv") else 1
    # The unnamed dimensions of a convolution are its window; of a product, matrices that are stored together.
    counts = ("layers",) if "conv_in" in names else ("layers", None)
    named = [axis for axis, name in enumerate(names) if name not in counts]
    return optax.contrib.MuonDimensionNumbers(reduction_axis=tuple(named[:-makes]), output_axis=tuple(named[-makes:]))


def _is_names(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def _is_cut(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, optax.contrib.MuonDimensionNumbers)


def _or(given: float | None, usual: float) -> float:
    return usual if given is None else given


def _kernels(params: Any) -> Any:
    """True for the kernels of products and convolutions."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
