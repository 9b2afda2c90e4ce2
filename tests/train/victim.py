"""A training in a process of its own, so that it can be killed: `python -m tests.train.victim ...`.

    victim unet IDS KEY=VALUE...     what `maxdiffusion train` does, by its own command line
    victim flux IDS FOLDER STEPS     the same loop, state and checkpoints with an objective for FLUX.1's tiny twin

Both append to IDS a line for every batch that a step is given: its number, the size of its pictures and its samples.
VICTIM_PAUSE says where to wait for ever: `step:N` before step N, `write:N` while the checkpoint of step N is written,
all but its last file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxdiffusion.data.batches import Batch
from maxdiffusion.train import checkpoint, loop


def spy(on_batch: Callable[[Batch], None], on_write: Callable[[int], None] = lambda step: None) -> None:
    """Calls back before each training step with its batch, and before a checkpoint gets its last file."""
    run, seal = loop.Loop.run, checkpoint.Checkpoints.seal

    def noted(self: loop.Loop, state: Any) -> Any:
        feed = self.feed

        def give(batch: Batch) -> Any:
            on_batch(batch)
            return feed(batch)

        self.feed = give  # pyright: ignore[reportAttributeAccessIssue]
        return run(self, state)

    def sealed(self: checkpoint.Checkpoints, folder: Path, step: int) -> None:
        on_write(step)
        seal(self, folder, step)

    loop.Loop.run = noted
    checkpoint.Checkpoints.seal = sealed


def note(ids: str | Path, pause: str = "") -> None:
    """Spies for the file of batches, and waits for ever where it is told."""
    ids = Path(ids)
    where, _, number = pause.partition(":")

    def on_batch(batch: Batch) -> None:
        line = {"step": batch.step, "size": batch.images.shape[1:3], "samples": batch.index.tolist()}
        with ids.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if (where, number) == ("step", str(batch.step)):
            time.sleep(3600)

    def on_write(step: int) -> None:
        if (where, number) == ("write", str(step)):
            time.sleep(3600)

    spy(on_batch, on_write)


def main(kind: str, ids: str, *words: str) -> int:
    """Trains; the exit status is that of the command line."""
    note(ids, os.environ.get("VICTIM_PAUSE", ""))
    if kind == "unet":
        from maxdiffusion.cli.main import main as command_line

        return command_line(["train", "pictures-demo", *words, "resume=true"])
    from tests.train.flux_run import train_flux

    folder, steps = words
    train_flux(Path(folder), int(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
