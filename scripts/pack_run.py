"""Packs a trained run into the package, with its log and figures.

    python scripts/pack_run.py runs/pictures-64 pictures-64

Measures the run as `maxdiffusion evaluate` does, with the weights as they are packed, in float16.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from maxdiffusion.config.load import load_run
from maxdiffusion.pipelines.packed import pack
from maxdiffusion.pipelines.run_files import METRICS, PACKED_WEIGHTS
from maxdiffusion.pipelines.shipped import FOLDER
from maxdiffusion.pipelines.trained import open_trained
from maxdiffusion.train.evaluate import evaluate_run

LARGEST = 12_000_000
KEPT = ("step", "loss", "held_out_loss", "unconditional_loss", "retrieval", "pictures_frechet")


def log_of(run: Path, number: int = 60) -> list[dict[str, float]]:
    """About so many lines of a run's metrics, and all those of evaluations."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    losses = [line for line in lines if "loss" in line]
    chosen = losses[:: -(-len(losses) // number)] + [line for line in lines if "held_out_loss" in line]
    rows = [{key: line[key] for key in KEPT if key in line} for line in sorted(chosen, key=lambda line: line["step"])]
    return [{key: value if key == "step" else float(f"{value:.5g}") for key, value in row.items()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    args = parser.parse_args()
    recipe = dataclasses.replace(load_run(args.run).recipe, run=None, resume=False, mesh={}, virtual_devices=None)
    trained = open_trained(args.run, recipe)
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=trained.step))
    model = functools.partial(
        pack,
        recipe=recipe,
        tokenizer=trained.tokenizer,
        params=jax.tree.map(np.asarray, trained.params),
        step=trained.step,
    )
    with tempfile.TemporaryDirectory() as draft:
        folder = model(Path(draft) / args.name, figures={})
        size = (folder / PACKED_WEIGHTS).stat().st_size
        if size > LARGEST:
            sys.exit(f"{size:,} bytes of weights: {LARGEST:,} at most belong into the package")
        figures = dataclasses.asdict(evaluate_run(folder, recipe=recipe))
    for key in ("run", "pictures", "samples", "seconds", "step"):
        figures.pop(key)
    said = {"seed": recipe.seed, "evaluation": figures, "log": log_of(args.run)}
    model(FOLDER / args.name, figures=said)
    sys.stderr.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
