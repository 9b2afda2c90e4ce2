"""Trains the recipe `pictures-demo` in bfloat16, and quantised beside it from the same seeds: do the losses agree?

    python benchmarks/quantised_training.py [--modes fp8_full] [--seeds 0,1] [--steps 360] [--json]

The loss is the mean over the last tenth of the steps; the ratio is the quantised run's over that of bfloat16 with the
same seed, which draws the same batches, times and noise. Weights and optimizer are float32 in all runs. Exit status
is 1 where a ratio is above `--most`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from maxdiffusion.errors import nearest
from maxdiffusion.specs import QuantMode


def trained(folder: Path, seed: int, mode: str | None, steps: int) -> tuple[float, float]:
    """The mean loss of the last tenth of a run's steps, and its seconds a step."""
    settings = {
        "run": folder,
        "seed": seed,
        "dtype": "bfloat16",
        "quantization": mode or "null",
        "mesh": "data=1",
        "virtual_devices": "null",
        "train.steps": steps,
        "train.log_every": steps // 10,
        "train.sample_every": 0,
        "train.eval_every": 0,
        "train.checkpoint_every": steps,
    }
    command = [sys.executable, "-c", "from maxdiffusion.cli.main import run; run()", "train", "pictures-demo"]
    began = time.perf_counter()
    ran = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        sys.exit(ran.stderr[-2000:] or ran.stdout[-2000:])
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss"] for line in reversed(lines) if "loss" in line), seconds / steps


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", default="fp8_full", help=f"joined by commas, of {', '.join(get_args(QuantMode))}")
    parser.add_argument("--seeds", default="0,1", help="joined by commas")
    parser.add_argument("--steps", type=int, default=360, help="of each run; a multiple of 10")
    parser.add_argument("--most", type=float, default=1.02, help="largest ratio that is taken")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    if asked.steps < 10 or asked.steps % 10:
        parser.error(f"--steps {asked.steps}: the last tenth is looked at: write a multiple of 10")
    for mode in asked.modes.split(","):
        if mode not in get_args(QuantMode):
            parser.error(f"--modes {mode}: {nearest(mode, get_args(QuantMode))}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, asked.seeds.split(",")):
            plain, plain_seconds = trained(Path(folder) / f"{seed}", seed, None, asked.steps)
            for mode in asked.modes.split(","):
                loss, seconds = trained(Path(folder) / f"{seed}-{mode}", seed, mode, asked.steps)
                row = {"seed": seed, "mode": mode, "loss": loss, "bfloat16": plain, "ratio": loss / plain}
                rows.append(row | {"seconds_a_step": seconds, "bfloat16_seconds_a_step": plain_seconds})
                if not asked.json:
                    sys.stdout.write(
                        f"seed {seed}  {mode:8}  loss {loss:.5f}  bfloat16 {plain:.5f}  ratio {loss / plain:.4f}  "
                        f"{seconds:.2f} s a step, bfloat16 {plain_seconds:.2f}\n"
                    )
                    sys.stdout.flush()
    if asked.json:
        sys.stdout.write(json.dumps({"steps": asked.steps, "rows": rows}) + "\n")
    if beyond := [f"{row['mode']} of seed {row['seed']}" for row in rows if not row["ratio"] <= asked.most]:
        sys.exit(f"check failed: above {asked.most:g} times the loss of bfloat16: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
