"""`make soak`: trainings are killed (SIGKILL) at random moments, again and again, and end with the same bits.

    python -m tests.train.soak [--kills 20] [--seed N] [--kind unet|flux|both] [--keep FOLDER]

Each kind is trained twice to the same step: once in peace, once killed so many times in a row, half of the times while
a checkpoint is being written. Then parameters, optimizer, averaged weights and key must be equal to the bit, the loss
of every step too, and every step must have been given the same samples. Exit status 1 if anything differs or was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from maxdiffusion.cli.devices import PATIENCE
from maxdiffusion.pipelines.checkpoint_folder import CHECKPOINTS, checkpoint_steps, flaw
from maxdiffusion.specs import THREADS_PER_DEVICE
from tests.children import child
from tests.train.runs import WORDS, read_bits, read_lines

STEPS = {"unet": 150, "flux": 150}
EVERY = 3

VICTIM = "import sys; from tests.train.victim import main; sys.exit(main(*sys.argv[1:]))"

PATIENT = 3600
"""Seconds that a whole run may take on a machine that does other things."""


def start(kind: str, folder: Path, steps: int, *, cache: Path | None, pause: str = "", **env: str) -> subprocess.Popen:
    """A process that trains into `folder`; what it says goes to `folder.log`, its batches to `folder.ids`.

    Args:
        kind: `unet` or `flux`.
        folder: of the run.
        steps: optimizer steps.
        cache: of compiled programs; None compiles anew.
        pause: see `tests.train.victim`.
        env: more variables of its environment.
    """
    if kind == "unet":
        words = [*WORDS, f"run={folder}", f"train.steps={steps}", f"train.checkpoint_every={EVERY}"]
        words += ["train.sample_every=0", "train.eval_every=0"]
    else:
        words = [str(folder), str(steps)]
    more = {"VICTIM_PAUSE": pause, "JAX_PLATFORMS": "cpu", **env}
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        more["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *PATIENCE))
        more["NPROC"] = str(8 * THREADS_PER_DEVICE)
    if cache is not None:
        more |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    with folder.with_suffix(".log").open("a") as log:
        return child(
            VICTIM, kind, str(folder.with_suffix(".ids")), *words, env={**os.environ, **more}, stdout=log, stderr=log
        )


def read_batches(ids: Path) -> dict[int, list[int]]:
    """The samples of each step; every process that ran a step must have been given the same."""
    found: dict[int, list[int]] = {}
    for line in ids.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        assert found.setdefault(one["step"], one["samples"]) == one["samples"], f"step {one['step']} got other samples"
    return found


def differing(a: Path, b: Path, step: int) -> list[str]:
    """Names of what is not the same to the bit in two runs at a step: arrays, batches, losses."""
    one, other = read_bits(a, step), read_bits(b, step)
    names = [name for name in sorted(one.keys() | other.keys()) if _bytes(one.get(name)) != _bytes(other.get(name))]
    if read_batches(a.with_suffix(".ids")) != read_batches(b.with_suffix(".ids")):
        names.append("the samples of the batches")
    losses = [
        {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line} for run in (a, b)
    ]
    return names if losses[0] == losses[1] else [*names, "losses"]


@dataclass(kw_only=True)
class Soak:
    """One kind of training, killed many times.

    Attributes:
        kind: `unet` or `flux`.
        folder: where its two runs go.
        kills: how many times.
        chance: decides the moments.
    """

    kind: str
    folder: Path
    kills: int
    chance: random.Random
    startup: float = field(default=0.0, init=False)

    def run(self) -> bool:
        """Whether nothing was lost and the bits are the same."""
        steps, began = STEPS[self.kind], time.monotonic()
        peace, victim = self.folder / "peace", self.folder / "victim"
        self._in_peace(peace, steps)
        newest, whiles = 0, {"starting": 0, "training": 0, "writing": 0}
        for number in range(1, self.kills + 1):
            what, left_over = self._kill_once(victim, steps, self.kills - number + 1)
            found = checkpoint_steps(victim) if victim.is_dir() else []
            broken = [step for step in found if flaw(victim, step)]
            if broken or (newest and newest not in found and max(found, default=0) < newest):
                say(f"{self.kind}: LOST: checkpoints {found} after {newest}, broken {broken}")
                return False
            newest = max(found, default=0)
            whiles[what] += 1
            half = f", {left_over} half-written left behind" if left_over else ""
            say(f"{self.kind}: kill {number:2} of {self.kills} while {what}: newest whole checkpoint {newest}{half}")
        process = start(self.kind, victim, steps, cache=self.folder / "xla")
        if _ended(process):
            say(f"{self.kind}: the last process failed: see {victim.with_suffix('.log')}")
            return False
        different = differing(peace, victim, steps)
        result = f"DIFFERENT: {', '.join(different)}" if different else f"the same bits at step {steps}"
        moments = ", ".join(f"{count} while {what}" for what, count in whiles.items())
        say(f"{self.kind}: {self.kills} kills ({moments}): {result}; {time.monotonic() - began:.0f} s")
        return not different

    def _in_peace(self, folder: Path, steps: int) -> None:
        """The run that nobody kills; it also tells how long a start takes."""
        process, began = start(self.kind, folder, steps, cache=self.folder / "xla"), time.monotonic()
        while not folder.with_suffix(".ids").exists() and process.poll() is None:
            time.sleep(0.01)
        self.startup = time.monotonic() - began
        if _ended(process):
            raise SystemExit(f"the run in peace failed: see {folder.with_suffix('.log')}")
        rate = steps / (time.monotonic() - began - self.startup)
        say(f"{self.kind}: in peace: {steps} steps, {rate:.1f} a second after {self.startup:.1f} s of starting")

    def _kill_once(self, folder: Path, steps: int, left: int) -> tuple[str, int]:
        """Starts, waits for a random moment, kills; what it was doing, and how many half-written folders it left."""
        ids, wanted = folder.with_suffix(".ids"), self.chance.choice(("writing", "writing", "training", "any"))
        size = ids.stat().st_size if ids.exists() else 0
        done = max(checkpoint_steps(folder), default=0) if folder.is_dir() else 0
        # Told by steps, not by the clock: a machine that does other things is sometimes ten times slower.
        goal = done + int(self.chance.uniform(0, max(steps - done - 4 * EVERY, EVERY) / left))
        process = start(self.kind, folder, steps, cache=self.folder / "xla")
        if wanted == "any":
            time.sleep(self.chance.uniform(0, self.startup))
        else:
            while _newest_batch(ids, size) < goal and process.poll() is None:
                time.sleep(0.002)
            time.sleep(self.chance.uniform(0, 0.1))
        deadline = time.monotonic() + 5
        while wanted == "writing" and not _half_written(folder) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if wanted == "writing":
            time.sleep(self.chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            raise SystemExit(f"the process ended before it was killed: see {folder.with_suffix('.log')}")
        stepped = ids.exists() and ids.stat().st_size > size
        half = len(_half_written(folder))
        return ("writing" if half and stepped else "training" if stepped else "starting"), half


def say(text: str) -> None:
    """One line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; without it, another one each time")
    parser.add_argument("--kind", choices=("unet", "flux", "both"), default="both")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; without it they are deleted")
    args = parser.parse_args()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    say(f"soak: --seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        good = True
        for kind in ("unet", "flux") if args.kind == "both" else (args.kind,):
            folder = (args.keep or Path(temporary)) / kind
            folder.mkdir(parents=True, exist_ok=True)
            good &= Soak(kind=kind, folder=folder, kills=args.kills, chance=random.Random(seed)).run()
    return 0 if good else 1


def _ended(process: subprocess.Popen) -> int:
    """The exit status; nothing is left running."""
    try:
        return process.wait(timeout=PATIENT)
    finally:
        process.kill()


def _newest_batch(ids: Path, size: int) -> int:
    """The step of the last batch in the file beyond its first `size` bytes; -1 where there is none."""
    if not ids.exists():
        return -1
    with ids.open("rb") as file:
        file.seek(size)
        lines = file.read().split(b"\n")[:-1]  # the last one may be half a line
    return json.loads(lines[-1])["step"] if lines else -1


def _half_written(folder: Path) -> list[Path]:
    return list((folder / CHECKPOINTS).glob("*.orbax-checkpoint-tmp*"))


def _bytes(array: np.ndarray | None) -> tuple | None:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


if __name__ == "__main__":
    sys.exit(main())
