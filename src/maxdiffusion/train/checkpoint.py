"""Checkpoints of a run: written whole or not at all, read back onto any mesh, never over another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from maxdiffusion.config import show
from maxdiffusion.config.load import RUN_RECIPE, format_value, load_run
from maxdiffusion.config.schema import Recipe, flatten
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import UsageError
from maxdiffusion.pipelines.run_folder import CHECKPOINTS, TOKENIZER, checkpoint_steps, quiet, read_part
from maxdiffusion.train.state import TrainState

KEPT = 3
"""Newest checkpoints of a run that are kept."""

PARTS = ("params", "opt_state", "ema", "key")
"""What a checkpoint may hold."""

SHARED_BYTES = 16 * 2**20
"""Least share of a replicated array that is worth a host's own write."""

FIXED = (
    *("model", "model_config", "seed", "data", "diffusion"),
    *("train.batch_size", "train.optimizer", "train.master_dtype"),
)
"""What a resumed run may not change, by the beginnings of keys: with other values it would be another run."""


def open_run(recipe: Recipe, *, resume: bool) -> tuple[Path, int]:
    """The run's folder and the step to go on from, 0 for a new run.

    Args:
        recipe: names the folder.
        resume: go on from the newest checkpoint, if there is one.

    Raises:
        UsageError: the folder holds another run's checkpoints, or the run to resume had another recipe.
    """
    folder = Path(recipe.run or f"runs/{recipe.model}")
    steps = checkpoint_steps(folder)
    if steps and not resume:
        raise UsageError(
            f"run '{folder}' is there already, trained to step {steps[-1]}: go on with resume=true, or give another "
            "folder with run=FOLDER"
        )
    if steps:
        _check_same_run(recipe, folder)
    return folder, steps[-1] if steps else 0


def write_run(folder: Path, recipe: Recipe, tokenizer: WordTokenizer) -> None:
    """Writes what makes a folder a run: its recipe and its words. Only the first process writes.

    Raises:
        UsageError: the folder cannot be written to.
    """
    if jax.process_index():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_RECIPE).write_text(show.as_yaml(recipe), encoding="utf-8")
        tokenizer.save(folder / TOKENIZER)
    except OSError as error:
        raise UsageError(
            f"run folder '{folder}' cannot be written: {error.strerror}; give another with run=FOLDER"
        ) from error


def _check_same_run(recipe: Recipe, folder: Path) -> None:
    # As written: lists and tuples are the same there.
    old, new = (
        {key: format_value(value) for key, value in flatten(one).items()} for one in (load_run(folder).recipe, recipe)
    )
    for key in sorted(old.keys() | new.keys()):
        fixed = any(key == name or key.startswith(f"{name}.") for name in FIXED)
        if fixed and old.get(key) != new.get(key):
            raise UsageError(
                f"run '{folder}' was trained with {key}={old.get(key, 'its default')}, and this recipe says "
                f"{new.get(key, 'its default')}: resume it with the old value, or start another run with run=FOLDER"
            )


class Checkpoints:
    """The checkpoints of one run (Orbax); each is written to another name and renamed when it is whole."""

    def __init__(self, folder: Path) -> None:
        """Opens them.

        Args:
            folder: of the run.
        """
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        # By default Orbax cuts every replicated array on its devices, so that hosts share the writing: one small
        # compiled program a shape and device, which costs more than it saves for one host or small arrays.
        arrays = type_handlers.ArrayHandler(
            use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=SHARED_BYTES
        )
        handlers = type_handlers.create_type_handler_registry((jax.Array, arrays))
        with quiet():
            self._manager = ocp.CheckpointManager(
                (folder / CHECKPOINTS).absolute(),
                options=options,
                item_handlers={part: ocp.PyTreeCheckpointHandler(type_handler_registry=handlers) for part in PARTS},
            )

    def save(self, state: TrainState) -> int:
        """Writes the state; returns its step. A checkpoint of that step is left as it is."""
        step = int(state.step)
        if step in checkpoint_steps(self._folder):
            return step
        items = {"params": state.params, "opt_state": state.opt_state, "key": {"key": jax.random.key_data(state.key)}}
        if state.ema is not None:
            items["ema"] = state.ema
        with quiet():
            self._manager.save(
                step, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(tree) for name, tree in items.items()})
            )
            self._manager.wait_until_finished()
        return step

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The state of a checkpoint, laid out as `shapes` says, on any mesh.

        Args:
            step: of the checkpoint.
            shapes: from `state_shapes`.

        Raises:
            UsageError: the checkpoint is of another model, or lacks the averaged weights.
        """
        sharding = shapes.step.sharding  # type: ignore[attr-defined]
        like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        like = {"key": jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)}

        def read(part: str, tree: Any) -> Any:
            return read_part(self._folder, step, part, tree)

        return TrainState(
            step=jax.device_put(jax.numpy.asarray(step, jax.numpy.int32), sharding),
            params=read("params", shapes.params),
            opt_state=read("opt_state", shapes.opt_state),
            ema=None if shapes.ema is None else read("ema", shapes.ema),
            key=jax.random.wrap_key_data(read("key", like)["key"]),
        )

    def close(self) -> None:
        """Lets go of the folder."""
        self._manager.close()
