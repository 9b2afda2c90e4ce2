"""When a step is not finite, the state before it is saved, the first bad tensor is named, and training stops."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from maxdiffusion.config.schema import TrainSection
from maxdiffusion.data.batches import Batch
from maxdiffusion.errors import UsageError
from maxdiffusion.paths import is_remote, write_whole
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_folder, checkpoint_steps, flaw
from maxdiffusion.pipelines.run_files import BAD_STEP, DIVERGED
from maxdiffusion.train.bad_tensor import BadTensor, first_bad_tensor
from maxdiffusion.train.checkpoint import CheckpointError, Checkpoints
from maxdiffusion.train.manifest import RunFacts
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, Objective


class DivergedError(UsageError):
    """A loss or a gradient is no longer a finite number; the state before that step is saved apart."""


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """Saves and explains; every process must take part.

    The state is saved in a folder of its own, not among the checkpoints of the run: the step that failed is a function
    of that state, so that a run resumed from it would fail at once. It is there to be looked at.

    Attributes:
        folder: of the run.
        objective: of the training.
        section: whose values the cure names.
        facts: what a checkpoint tells besides its arrays.
    """

    folder: Path
    objective: Objective
    section: TrainSection
    facts: RunFacts | None = None

    def __call__(
        self, state: TrainState, examples: Examples, batch: Batch, *, loss: float, norm: float
    ) -> DivergedError:
        """Saves the state, finds the tensor, writes `bad-step.json`.

        Args:
            state: before the step.
            examples: of the step.
            batch: the same, this host's share.
            loss: of the step.
            norm: of its gradients.

        Returns:
            The error to raise: one line with the step, the tensor, the place of the state and the cure.
        """
        step = int(state.step) + 1
        saved = self._save(state)
        found = self._search(state, examples)
        first = batch.step * self.section.batch_size
        keys = {int(place) - first: key for place, key in zip(batch.position, batch.keys, strict=True)}
        samples = [keys[row] for row in found.rows if row in keys]  # those of this host
        self._write(
            {
                "step": step,
                "loss": loss if math.isfinite(loss) else str(loss),
                "grad_norm": norm if math.isfinite(norm) else str(norm),
                "first_bad_tensor": found.name,
                "kind": found.kind,
                "gradients": found.gradients,
                "rows": found.rows,
                "samples": samples,
                "learning_rate": self.section.learning_rate,
            }
        )
        what = f"the loss became {loss}" if not math.isfinite(loss) else f"the gradients' norm became {norm}"
        where = f" ({', '.join(samples)})" if samples and found.kind == "batch" else ""
        return DivergedError(
            f"{what} in step {step}; first bad tensor: {found.name}{where}; {saved}; {self._cure(found, step)}"
        )

    def _save(self, state: TrainState) -> str:
        """Saves the state in a folder of its own, in place of that of an earlier failure; says where."""
        place = self.folder / DIVERGED
        if jax.process_index() == 0 and place.exists():
            _remove(place)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("an earlier failure's files are gone")
        try:
            checkpoints = Checkpoints(place, keep=1, facts=self.facts)
            try:
                step = checkpoints.save(state)
            finally:
                checkpoints.close()
        except CheckpointError as error:
            return f"the state before it could not be saved: {error}"
        return f"the state before it is in {checkpoint_folder(place, step)}"

    def _search(self, state: TrainState, examples: Examples) -> BadTensor:
        try:
            return first_bad_tensor(self.objective, state, examples, parts=self.section.accumulation_steps)
        except jax.errors.JaxRuntimeError as error:
            cause = next(iter(str(error).splitlines()), type(error).__name__)
            return BadTensor(name=f"unknown, the step could not be run again ({cause})", kind="none")

    def _write(self, content: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
            write_whole(self.folder / DIVERGED / BAD_STEP, f"{{\n{lines}\n}}\n")

    def _cure(self, found: BadTensor, step: int) -> str:
        section = self.section
        whole = [one for one in checkpoint_steps(self.folder) if one < step and flaw(self.folder, one) is None]
        again = f"go on from step {whole[-1]} with resume=true" if whole else "start again"
        if found.kind == "batch":
            return f"leave these pictures out, then {again}"
        if found.kind == "state" and len(whole) > 1:
            again += " (or from an older one, by moving newer checkpoints away)"
        clip = "" if section.grad_clip is None else f" ({section.grad_clip:g})"
        return (
            f"lower train.learning_rate ({section.learning_rate:g}), lengthen train.warmup_steps "
            f"({section.warmup_steps}) or {'set' if section.grad_clip is None else 'lower'} train.grad_clip{clip}, "
            f"then {again}"
        )


def _remove(folder: Path) -> None:
    if is_remote(folder):
        folder.rmtree()  # type: ignore[attr-defined]  etils' paths have it
    else:
        shutil.rmtree(folder)
