"""Checkpoints of a run: written while training goes on, whole or not at all, read back onto any mesh."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as keeping
from orbax.checkpoint import type_handlers
from orbax.checkpoint.path import atomicity_defaults

from maxdiffusion.config import show
from maxdiffusion.config.load import RUN_RECIPE, format_value, load_run
from maxdiffusion.config.schema import Recipe, ResumeChange, flatten
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import as_path, as_text, write_whole
from maxdiffusion.pipelines.checkpoint_folder import (
    CHECKPOINTS,
    MANIFEST,
    broken_steps,
    checkpoint_folder,
    checkpoint_steps,
    newest_whole,
    parts_in,
    read_manifest,
    recipe_folder,
    sizes_in,
)
from maxdiffusion.pipelines.run_folder import TOKENIZER, quiet, read_part
from maxdiffusion.train.manifest import RunFacts, manifest
from maxdiffusion.train.state import TrainState

KEPT = 3
"""Newest checkpoints that are kept where no recipe says how many."""

PARTS = tuple(entry.name for entry in dataclasses.fields(TrainState) if entry.name != "step")
"""What a checkpoint may hold."""

SHARED_BYTES = 16 * 2**20
"""Least share of a replicated array that is worth a host's own write."""

FIXED = (
    *("model", "model_config", "seed", "data", "diffusion"),
    *("train.batch_size", "train.optimizer", "train.master_dtype", "train.start_from"),
)
"""What a resumed run may not change, by the beginnings of keys: with other values it would be another run."""

FREE = ("data.num_threads", "data.index_folder")
"""What it may change nevertheless: these say how data is read, not what."""

COMPARED = ("data.path", "data.on_broken")
"""What it may change where the checkpoint knows its samples: then these are compared, wherever they are."""

_WRITE_ERRORS = (OSError, ValueError, RuntimeError, TimeoutError)
"""What file systems, TensorStore, jax and Orbax raise where writing fails."""


class CheckpointError(UsageError):
    """A checkpoint could not be written; those before it are whole."""


def open_run(recipe: Recipe, *, resume: bool) -> tuple[Path, int]:
    """The run's folder and the step to go on from, 0 for a new run.

    Args:
        recipe: names the folder.
        resume: go on from the newest whole checkpoint, if there is one.

    Raises:
        UsageError: the folder holds another run's checkpoints, the run to resume had another recipe or other parts,
            or none of its checkpoints is whole.

    Warns:
        MaxDiffusionWarning: a newer checkpoint is not whole.
    """
    folder = as_path(recipe.run or f"runs/{recipe.model}")
    steps = checkpoint_steps(folder)
    if steps and not resume:
        raise UsageError(
            f"run '{folder}' is there already, trained to step {steps[-1]}: go on with resume=true, or give another "
            "folder with run=FOLDER"
        )
    if not steps:
        return folder, 0
    step = newest_whole(folder)
    assert step is not None, "there are checkpoints, and if none were whole that was said"
    _check_same_run(recipe, folder, step, knows_samples="samples" in _data_of(folder, step))
    allowed = recipe.train.resume_changes
    check_average(checkpoint_folder(folder, step), keeps_ema=recipe.train.ema_decay > 0, allowed=allowed)
    return folder, step


def write_run(folder: Path, recipe: Recipe, tokenizer: WordTokenizer) -> None:
    """Writes what makes a folder a run: its recipe and its words. Only the first process writes.

    Raises:
        UsageError: the folder cannot be written to.
    """
    if jax.process_index():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RUN_RECIPE, show.as_yaml(recipe))
        write_whole(folder / TOKENIZER, tokenizer.as_text())
    except OSError as error:
        raise UsageError(
            f"run folder '{folder}' cannot be written: {error.strerror or error}; give another with run=FOLDER"
        ) from error


def check_average(folder: Path, *, keeps_ema: bool, allowed: Collection[ResumeChange]) -> None:
    """Refuses a checkpoint that has averaged weights where the run keeps none, or has none where it keeps some.

    Args:
        folder: of the checkpoint.
        keeps_ema: whether the run that reads it keeps averaged weights.
        allowed: changes that the user asked for.

    Raises:
        UsageError: the two differ, and nobody asked for that.
    """
    has = "ema" in parts_in(folder)
    if keeps_ema and not has and "start_ema" not in allowed:
        raise UsageError(
            f"checkpoint {folder} has no averaged weights, and train.ema_decay wants them: go on with "
            "train.ema_decay=0, or let the average start from its weights with train.resume_changes=[start_ema]"
        )
    if has and not keeps_ema and "drop_ema" not in allowed:
        raise UsageError(
            f"checkpoint {folder} has averaged weights, and train.ema_decay=0 would drop them: go on with the decay "
            "that it was trained with, or drop them with train.resume_changes=[drop_ema]"
        )


def check_data(folder: Path, step: int, samples: Fingerprint, *, allowed: Collection[ResumeChange]) -> bool:
    """Refuses other samples than those that a run was trained on; True where they are others and that was asked for.

    Args:
        folder: of the run.
        step: of the checkpoint to go on from; an older version's tells the number of samples only, or nothing.
        samples: that there are now.
        allowed: changes that the user asked for.

    Raises:
        UsageError: they are others.
    """
    data = _data_of(folder, step)
    then = data.get("samples", {"number": data["num_samples"]} if "num_samples" in data else {})
    change = samples.change(then)
    if change is not None and "data" not in allowed:
        raise UsageError(
            f"run '{folder}' was trained on other data ({change}): bring the data back as it was, go on with what is "
            "there now with train.resume_changes=[data], or start another run with run=FOLDER"
        )
    return change is not None


def _data_of(folder: Path, step: int) -> Mapping[str, Any]:
    """What a checkpoint says of its data."""
    return (read_manifest(checkpoint_folder(folder, step)) or {}).get("data", {})


def _check_same_run(recipe: Recipe, folder: Path, step: int, *, knows_samples: bool) -> None:
    """Refuses a recipe that would make another run of it; compared with that which the checkpoint was trained with."""
    then = load_run(recipe_folder(folder, step)).recipe
    # As written: lists and tuples are the same there.
    old, new = ({key: format_value(value) for key, value in flatten(one).items()} for one in (then, recipe))
    allowed = recipe.train.resume_changes
    free = (*FREE, *COMPARED) if knows_samples else FREE
    for key in sorted(old.keys() | new.keys()):
        if ("cast" in allowed and key == "train.master_dtype") or ("data" in allowed and key.startswith("data.")):
            continue
        fixed = key not in free and any(key == name or key.startswith(f"{name}.") for name in FIXED)
        if fixed and old.get(key) != new.get(key):
            cure = f"write {key}={old[key]}" if key in old else f"leave {key} out"
            raise UsageError(
                f"run '{folder}' was trained with {key}={old.get(key, 'its default')}, and this recipe says "
                f"{new.get(key, 'its default')}: {cure}, or start another run with run=FOLDER"
            )
    # The one coefficient that says what is kept: Adafactor has a first moment or none.
    if recipe.train.optimizer == "adafactor" and (then.train.beta1 is None) != (recipe.train.beta1 is None):
        before, now = old["train.beta1"], new["train.beta1"]
        raise UsageError(
            f"run '{folder}' was trained by adafactor with train.beta1={before}, and this recipe says {now}: with a "
            "value it keeps first moments, with null it keeps none, and a run cannot change that; keep "
            f"train.beta1={before}" + ("" if then.train.beta1 is None else " or set another value")
        )


class Checkpoints:
    """The checkpoints of one run (Orbax), written in the background; each gets its name when it is whole."""

    def __init__(
        self, folder: str | Path, *, keep: int = KEPT, keep_every: int = 0, facts: RunFacts | None = None
    ) -> None:
        """Opens them for a run that goes on from the newest whole one.

        What a process that died had begun to write is deleted; newer checkpoints that are not whole are renamed to
        `STEP.broken`, for the run will write these steps anew.

        Args:
            folder: of the run.
            keep: how many of the newest stay.
            keep_every: those of steps that are multiples of this stay too; 0 for none.
            facts: what each checkpoint tells besides its arrays.
        """
        self._folder = as_path(folder)
        self._facts = facts
        self._manifests: dict[int, dict[str, Any]] = {}
        broken = broken_steps(self._folder)
        self._saved = set(checkpoint_steps(self._folder)) - broken.keys()
        if jax.process_index() == 0:
            for step in broken:
                _put_aside(checkpoint_folder(self._folder, step))
        self._writing: int | None = None
        self._failure: BaseException | None = None
        self._filter = _Unheard()
        logging.getLogger("absl").addFilter(self._filter)
        root = as_text(self._folder / CHECKPOINTS)
        kept: list[keeping.PreservationPolicy] = [keeping.LatestN(keep)]
        if keep_every:
            kept.append(keeping.EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keeping.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
            temporary_path_class=_sealed(self.seal, self._fail, root),
        )
        # By default Orbax cuts every replicated array on its devices, so that hosts share the writing: one small
        # compiled program a shape and device, which costs more than it saves for one host or small arrays.
        arrays = type_handlers.ArrayHandler(
            use_replica_parallel=jax.process_count() > 1, min_slice_bytes_for_replica_parallel=SHARED_BYTES
        )
        handlers = type_handlers.create_type_handler_registry((jax.Array, arrays))
        with quiet():
            self._manager = ocp.CheckpointManager(
                root,
                options=options,
                item_handlers={part: ocp.PyTreeCheckpointHandler(type_handler_registry=handlers) for part in PARTS},
            )

    def save(self, state: TrainState) -> int:
        """Begins to write the state and returns its step; the state may be donated at once.

        A checkpoint of that step is left as it is. One that is still being written is waited for first.

        Raises:
            CheckpointError: this one or the one before it cannot be written.
        """
        self.wait()
        step = int(state.step)
        if step in self._saved:
            return step
        items = _parts(state)
        self._manifests = {step: manifest(step, items, self._facts)}
        self._saved.add(step)
        self._writing, self._failure = step, None
        args = ocp.args.Composite(**{name: ocp.args.PyTreeSave(tree) for name, tree in items.items()})
        try:
            with quiet():
                self._manager.save(step, args=args, force=True)
        except _WRITE_ERRORS as error:
            raise self._refused(step, error) from error
        return step

    def check(self) -> None:
        """Costs nothing while all is well; to be called after every step.

        Raises:
            CheckpointError: what was written in the background failed.
        """
        if self._writing is not None and (self._failure or not self._manager.is_saving_in_progress()):
            self.wait()

    def wait(self) -> None:
        """Returns when the last checkpoint is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        try:
            with quiet():
                if _several_hosts():
                    self._wait_for_failure()
                self._manager.wait_until_finished()
        except _WRITE_ERRORS as error:
            raise self._refused(step, error) from error

    def _wait_for_failure(self) -> None:
        """Returns when nothing is being written; raises what failed here, for which Orbax would wait for the others.

        They wait for this host in turn, until its main thread ends and they hear why.
        """
        while self._failure is None and self._manager.is_saving_in_progress():
            time.sleep(0.02)
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        """In the thread that writes: keeps what failed."""
        self._failure = error

    def seal(self, folder: Path, step: int) -> None:
        """Puts into the folder of a checkpoint what it is and the size of every file; then it can get its name.

        Args:
            folder: where it is being written.
            step: of the checkpoint.
        """
        facts = self._facts
        if facts is not None:
            (folder / RUN_RECIPE).write_text(show.as_yaml(facts.recipe), encoding="utf-8")
            (folder / TOKENIZER).write_text(facts.tokenizer.as_text(), encoding="utf-8")
        # Orbax writes into the files of the folder itself once more, when it renames it.
        inside = {
            name: size for name, size in sizes_in(folder).items() if "/" in name or name in (RUN_RECIPE, TOKENIZER)
        }
        content = self._manifests[step] | {"files": inside}
        (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")

    def restore(self, step: int, shapes: TrainState, *, allowed: Collection[ResumeChange] = ()) -> TrainState:
        """The state of a checkpoint, laid out as `shapes` says, on any mesh.

        Args:
            step: of the checkpoint.
            shapes: from `state_shapes`.
            allowed: changes that the user asked for.

        Raises:
            UsageError: the checkpoint is of another model, has other dtypes or parts, or its files cannot be read.
        """
        check_average(checkpoint_folder(self._folder, step), keeps_ema=shapes.ema is not None, allowed=allowed)
        has_ema = "ema" in parts_in(checkpoint_folder(self._folder, step))
        sharding = shapes.step.sharding  # type: ignore[attr-defined]
        found: dict[str, Any] = {}
        for name, like in _parts(shapes).items():
            starts = name == "ema" and not has_ema  # in float32, whatever the weights are kept in
            source = "params" if starts else name
            read = _read_optimizer if name == "opt_state" else read_part
            tree = read(self._folder, step, source, like, cast=starts or "cast" in allowed)
            found[name] = jax.random.wrap_key_data(tree["key"]) if name == "key" else tree
        parts: dict[str, Any] = dict.fromkeys(PARTS) | found
        return TrainState(step=jax.device_put(jnp.asarray(step, jnp.int32), sharding), **parts)

    def close(self) -> None:
        """Waits until the last checkpoint is whole, and lets go of the folder.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self.wait()
        finally:
            if self._failure is None or not _several_hosts():  # else it would wait for hosts that wait for this one
                self._manager.close()
            logging.getLogger("absl").removeFilter(self._filter)

    def _refused(self, step: int, error: BaseException) -> CheckpointError:
        self._writing = None
        self._saved.discard(step)
        whole = max(checkpoint_steps(self._folder), default=None)
        left = "there is none before it" if whole is None else f"the newest whole one is that of step {whole}"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {_cause(error)}; {left}: make room "
            "or make the folder writable, then go on with resume=true"
        )


def _read_optimizer(run: Path, step: int, part: str, like: Any, *, cast: bool) -> Any:
    """The optimizer's state; in that of an older version without `train.grad_clip`, nothing stood in its place.

    Raises:
        UsageError: it is of another optimizer.
    """
    try:
        return read_part(run, step, part, like, cast=cast)
    except UsageError:
        limit, *rest = like
        with contextlib.suppress(UsageError):
            return type(like)((limit, *read_part(run, step, part, tuple(rest), cast=cast)))
        raise


class _Unheard(logging.Filter):
    """Holds back what Orbax logs of its threads: their errors are raised, in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _parts(state: TrainState) -> dict[str, Any]:
    """The parts of a state that are written; random keys as the numbers that they are made of."""
    trees = {name: getattr(state, name) for name in PARTS}
    return {
        name: {"key": _key_data(tree)} if name == "key" else tree for name, tree in trees.items() if tree is not None
    }


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.Array):
        return jax.random.key_data(key)
    like = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=key.sharding)


def _put_aside(folder: Path) -> None:
    """Renames a checkpoint that is not whole, to a name that no other has."""
    number, target = 1, folder.with_name(f"{folder.name}.broken")
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.broken-{number}")
    folder.rename(target)


def _several_hosts() -> bool:
    return jax.process_count() > 1


def _sealed(seal: Callable[[Path, int], None], fail: Callable[[BaseException], None], root: str) -> type:
    """Orbax's way from a folder that is written to one that is whole, with our own files put in at the very end.

    Args:
        seal: puts them into a folder, given the step.
        fail: is told what went wrong with it.
        root: folder of the checkpoints.
    """
    base: Any = atomicity_defaults.get_default_temporary_path_class(as_path(root))  # type: ignore[arg-type]

    class Sealed(base):
        async def finalize(self) -> None:
            final = self.get_final()
            try:
                if final.name.isdigit():  # a part's folder comes by here too
                    await asyncio.to_thread(seal, as_path(self.get()), int(final.name))
                await super().finalize()
            except Exception as error:
                fail(error)
                raise

    return Sealed


def _cause(error: BaseException) -> str:
    """The first line of an error."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
