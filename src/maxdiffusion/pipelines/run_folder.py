"""What a run's folder holds, and how its weights are read back onto any mesh (the writing side is in `train`).

recipe.yaml          the whole recipe
tokenizer.json       the words of the captions
metrics.jsonl        a line every few steps
samples/             grids of pictures
report.html          one page about all of it
checkpoints/STEP/    see `checkpoint_folder`
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
from maxdiffusion.paths import as_text
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_folder, chosen_step, parts_in
from maxdiffusion.pipelines.stored_layers import from_stored, leaf_names, stored_form

TOKENIZER = "tokenizer.json"


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


def read_part(run: str | Path, step: int, part: str, like: Any, *, cast: bool = False) -> Any:
    """One part of a checkpoint; stacks of layers may be stored layer by layer, and the other way round.

    Args:
        run: the run's folder.
        step: of the checkpoint.
        part: `params`, `ema`, `opt_state` or `key`.
        like: tree of `jax.ShapeDtypeStruct` with the shardings to read into.
        cast: whether other dtypes than the stored ones may be read into.

    Raises:
        UsageError: the checkpoint holds another tree, other dtypes, or files that cannot be read.
    """
    with opened_part(run, step, part, like, cast=cast) as (folder, form):
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            tree = reader.restore(folder, args=ocp.args.StandardRestore(form))
        return tree if form is like else from_stored(like, tree)


@contextlib.contextmanager
def opened_part(run: str | Path, step: int, part: str, like: Any, *, cast: bool = False) -> Iterator[tuple[str, Any]]:
    """A part of a checkpoint that holds what is wanted: its folder, and its `stored_form`, to read from in here.

    Args:
        run, step, part, like, cast: as for `read_part`.

    Raises:
        UsageError: as `read_part`, for what is read inside as well.
    """
    folder = checkpoint_folder(run, step) / part
    place = f"checkpoint {folder}"
    with quiet():
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                stored = reader.metadata(as_text(folder)).item_metadata
            form = stored_form(like, stored)
            _check_same(stored, form, place, part, cast=cast)
            yield as_text(folder), form
        except UsageError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{place} cannot be read ({cause}): take an older one, by moving {folder.parent.name} out of "
                f"{folder.parent.parent}"
            ) from error


def read_weights(
    run: str | Path, like: Any, *, master_dtype: Any = jnp.float32, step: int | None = None
) -> tuple[Any, int]:
    """The weights to make pictures with, averaged if the run averages them, and their step.

    Args:
        run: the run's folder.
        like: tree of float32 `jax.ShapeDtypeStruct` with the shardings to read into.
        master_dtype: of the run's trained weights, which are read where it keeps no averaged ones.
        step: of the checkpoint; None for the newest whole one.

    Raises:
        UsageError: there is no checkpoint, or it is of another model.
    """
    step, part, like = weights_part(run, like, master_dtype=master_dtype, step=step)
    return read_part(run, step, part, like), step


def weights_part(run: str | Path, like: Any, *, master_dtype: Any, step: int | None) -> tuple[int, str, Any]:
    """Where a run keeps the weights that `read_weights` reads: the step, the part, and `like` in its dtype."""
    step = chosen_step(run, step)
    part = "ema" if "ema" in parts_in(checkpoint_folder(run, step)) else "params"
    if part == "params":
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, master_dtype, sharding=leaf.sharding), like)
    return step, part, like


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


def _check_same(stored: Any, like: Any, place: str, part: str, *, cast: bool) -> None:
    """Refuses a tree of other names, shapes or dtypes, which a restore would cast or fail on obscurely."""
    found, wanted = _leaves(stored), _leaves(like)
    for name in sorted(wanted.keys() | found.keys()):
        there, here = found.get(name), wanted.get(name)
        if there == here:
            continue
        if there is not None and here is not None and there[0] == here[0]:
            if cast:
                continue
            raise UsageError(
                f"{place} has {name} in {there[1]}, and {here[1]} is wanted: keep the dtypes that it was trained with, "
                "or let them change with train.resume_changes=[cast]"
            )
        kind, keys = (
            ("optimizer", "its keys in train") if part == "opt_state" else ("model", "model, model_config and data")
        )
        raise UsageError(
            f"{place} is of another {kind}: {name} is {_said(there)} there and {_said(here)} here; "
            f"keep {keys} as they were"
        )


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(leaf_names(path)): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def _said(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
