"""Names and weights of the PyTorch originals in the tests: a rule for weights, and torch names to ours.

The rule makes every weight from its name alone, so goldens need not store weights. Only numpy here: the script that
writes the goldens runs where there is no jax.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator

import numpy as np


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float64 weight of a torch parameter: uniform, seeded by its name, of variance 1 / fan-in.

    Scales of norms lie in [0.5, 1.5], biases in [-0.3, 0.3]. No two entries agree, so that no swap of dimensions,
    heads or halves goes unseen. Built on the raw words of Philox, which numpy keeps the same for ever.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=seed).random_raw(math.prod(shape))
    uniform = ((words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)
    if len(shape) == 1:
        norm_scale = name.endswith(".weight")
        return 1.0 + 0.5 * uniform if norm_scale else 0.3 * uniform
    return uniform * math.sqrt(3.0 / math.prod(shape[1:]))


def inputs(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 input of about unit variance, seeded by its name."""
    return (math.sqrt(math.prod(shape[1:])) * weight(name, shape)).astype(np.float32)


def our_path(name: str, leaf_names: set[str]) -> tuple[str, ...]:
    """The path of our parameter for a torch name: `down_blocks.0.resnets.1.conv1.weight` becomes
    `("down_blocks_0", "resnets_1", "conv1", "kernel")`.

    Args:
        name: of the torch parameter.
        leaf_names: names of our parameters in that layer.
    """
    *modules, leaf = re.sub(r"\.(\d+)", r"_\1", name).split(".")
    if leaf == "weight":
        (leaf,) = leaf_names & {"kernel", "scale", "embedding"}
    return (*modules, leaf)


def ours(name: str, value: np.ndarray, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
    """A torch weight in our layout: inputs before outputs, heads and gates as dimensions of their own.

    Args:
        name: of the torch parameter, for the message.
        value: (out, in) or (out, in, height, width) for a kernel.
        leaf: our name: `kernel`, `bias`, `scale`, `embedding`.
        shape: our shape.
    """
    if leaf == "kernel":
        value = np.moveaxis(value, (0, 1), (-1, -2))  # OIHW to HWIO
    assert value.size == math.prod(shape), (name, value.shape, shape)
    return value.reshape(shape)


def from_torch(names: dict[str, tuple[int, ...]], shapes: dict) -> dict:
    """Our parameter tree with the weights of the rule; every torch parameter is used, and each of ours is filled.

    Args:
        names: shape of each torch parameter.
        shapes: our tree of shapes.
    """
    flat = dict(_flatten(shapes))
    tree: dict = {}
    for name, value in _parts({name: weight(name, shape) for name, shape in names.items()}):
        module = re.sub(r"\.(\d+)", r"_\1", name).split(".")[:-1]
        siblings = {path[-1] for path in flat if list(path[:-1]) == module}
        path = our_path(name, siblings)
        target = flat.pop(path)
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = ours(name, value, path[-1], target.shape).astype(np.float32)
    assert not flat, f"no torch parameter fills {sorted(flat)}"
    return tree


def _parts(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights with those apart that the original keeps in one: what reads heads, and what reads hidden units."""
    for name, value in weights.items():
        if not re.fullmatch(r"single_transformer_blocks\.\d+\.proj_out\.(weight|bias)", name):
            yield name, value
            continue
        layer, leaf = name.rsplit(".", 1)
        width = value.shape[0]
        if leaf == "weight":
            yield f"{layer}_attn.weight", value[:, :width]
            yield f"{layer}_mlp.weight", value[:, width:]
        else:
            yield f"{layer}_mlp.bias", value


def _flatten(tree: dict, prefix: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value
