"""What a run's folder holds, and how its weights are read back onto any mesh (the writing side is in `train`).

recipe.yaml          the whole recipe
tokenizer.json       the words of the captions
metrics.jsonl        a line every few steps
samples/             grids of pictures
checkpoints/STEP/    Orbax: one item for each part of the training state
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from maxdiffusion.errors import UsageError
from maxdiffusion.nn.model import DiffusionModel

TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples"
CHECKPOINTS = "checkpoints"


def checkpoint_steps(run: str | Path) -> list[int]:
    """The steps that have a whole checkpoint, in order; one that was being written when a run died does not count."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isdigit())


def latest_step(run: str | Path) -> int:
    """The step of the newest checkpoint.

    Raises:
        UsageError: there is none.
    """
    steps = checkpoint_steps(run)
    if not steps:
        raise UsageError(f"run '{run}' has no checkpoint yet: train it until its first one (train.checkpoint_every)")
    return steps[-1]


def parts(run: str | Path, step: int) -> set[str]:
    """Names of the parts that a checkpoint holds, such as params and ema."""
    return {entry.name for entry in (Path(run) / CHECKPOINTS / str(step)).iterdir() if entry.is_dir()}


def weight_shapes(model: DiffusionModel) -> Any:
    """The float32 weights as `jax.ShapeDtypeStruct`s with their shardings; nothing is allocated.

    Args:
        model: whose weights; its layout says where they live.

    Raises:
        RuleError: under `strict`, a weight is not sharded as the rules wish.
    """
    shapes, names = model.abstract_params()
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding),
        shapes,
        model.layout.shardings(shapes, names),
    )


def read_part(run: str | Path, step: int, part: str, like: Any) -> Any:
    """One part of a checkpoint.

    Args:
        run: the run's folder.
        step: of the checkpoint.
        part: `params`, `ema`, `opt_state` or `key`.
        like: tree of `jax.ShapeDtypeStruct` with the shardings to read into.

    Raises:
        UsageError: the checkpoint holds another tree.
    """
    folder = (Path(run) / CHECKPOINTS / str(step) / part).absolute()
    with quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        stored = reader.metadata(folder).item_metadata
        _check_same(stored, like, f"checkpoint {folder}")
        return reader.restore(folder, args=ocp.args.StandardRestore(like))


def read_weights(run: str | Path, like: Any, *, master_dtype: Any = jnp.float32) -> tuple[Any, int]:
    """The weights to make pictures with, averaged if the run averages them, and their step.

    Args:
        run: the run's folder.
        like: tree of float32 `jax.ShapeDtypeStruct` with the shardings to read into.
        master_dtype: of the run's trained weights, which are read where it keeps no averaged ones.

    Raises:
        UsageError: there is no checkpoint, or it is of another model.
    """
    step = latest_step(run)
    part = "ema" if "ema" in parts(run, step) else "params"
    if part == "params":
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, master_dtype, sharding=leaf.sharding), like)
    return read_part(run, step, part, like), step


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back Orbax's warnings about files that its other layouts have; errors still come."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_same(stored: Any, like: Any, place: str) -> None:
    """Refuses a tree of other names, shapes or dtypes, which a restore would cast or fail on obscurely."""
    found, wanted = _leaves(stored), _leaves(like)
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise UsageError(
                f"{place} is of another model: {name} is {_said(found.get(name))} there and "
                f"{_said(wanted.get(name))} here; keep model, model_config and data as they were"
            )


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(map(_key, path)): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def _key(entry: Any) -> str:
    """A step of a path, by what Orbax calls it: a list has no other names than its numbers."""
    if isinstance(entry, jax.tree_util.SequenceKey):
        return str(entry.idx)
    return str(entry.name if isinstance(entry, jax.tree_util.GetAttrKey) else entry.key)


def _said(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
