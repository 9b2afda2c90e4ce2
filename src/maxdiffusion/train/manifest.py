"""What a checkpoint says of itself: enough to understand its folder alone, on a machine without devices."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from maxdiffusion import __version__
from maxdiffusion.config.schema import Recipe, flatten
from maxdiffusion.data.batches import Batches
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.pipelines.checkpoint_folder import FORMAT

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
"""Whose versions a checkpoint tells."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a checkpoint tells besides its arrays.

    Attributes:
        recipe: of the run.
        layout: mesh and resolved rules.
        tokenizer: of the captions.
        batches: of the training; they know how far each bucket of samples is drawn.
        sizes: height and width of the pictures of each bucket.
        samples: of the training data.
        started_from: where the first weights came from; None where they were drawn.
    """

    recipe: Recipe
    layout: Layout
    tokenizer: WordTokenizer
    batches: Batches
    sizes: tuple[tuple[int, int], ...]
    samples: Fingerprint
    started_from: Mapping[str, Any] | None = None


def manifest(step: int, parts: Mapping[str, Any], facts: RunFacts | None) -> dict[str, Any]:
    """The manifest of a checkpoint, but for the sizes of its files.

    Args:
        step: optimizer steps done.
        parts: a tree of arrays for each part.
        facts: of the run; None leaves out what only they know.
    """
    described = {name: _leaves(tree) for name, tree in parts.items()}
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "written": time.time(),
        "versions": {"maxdiffusion": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in LIBRARIES},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(parts["params"])),
        "mesh": _mesh(jax.tree.leaves(parts["params"])[0].sharding),
        "parts": described,
    }
    if facts is None:
        return content
    return content | {
        "model": facts.recipe.model,
        "recipe": flatten(facts.recipe),
        "rules": [[name, axes] for name, axes in facts.layout.rules],
        "data": _data(step, facts),
        "started_from": facts.started_from,
    }


def _data(step: int, facts: RunFacts) -> dict[str, Any]:
    """Which samples there are, and how far they are drawn: of each size on its own, for a batch is of one."""
    batch, position = facts.batches.batch_size, facts.batches.position(step)
    return {
        "seed": facts.recipe.seed,
        "batch_size": batch,
        "num_samples": facts.samples.number,
        "samples": facts.samples.as_dict(),
        "next_sample": step * batch,
        "epoch": position.epoch,
        "buckets": [
            {"size": list(size), "samples": number, "epoch": drawn // number, "place": drawn % number}
            for size, number, drawn in zip(facts.sizes, position.samples, position.drawn, strict=True)
        ],
    }


def _leaves(tree: Any) -> dict[str, dict[str, Any]]:
    """Each array of a part by its path: dtype, shape, and the mesh axes of its dimensions."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = leaf.sharding
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = {
            "dtype": str(leaf.dtype),
            "shape": list(leaf.shape),
            "axes": list(sharding.spec) if isinstance(sharding, NamedSharding) else [],
        }
    return found


def _mesh(sharding: Any) -> dict[str, Any]:
    """Sizes of the mesh axes, kind and number of the devices, and how many processes there were."""
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) if isinstance(mesh, Mesh) else {}
    return {
        "axes": sizes,
        "devices": len(devices),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "processes": jax.process_count(),
    }
