"""What each optimizer keeps beside the weights of the recipe `pictures`, buffer by buffer.

    python benchmarks/optimizer_state.py [--json]

Megabytes over all devices and on one of eight (`mesh=fsdp=8`), from the state's shapes and layouts: nothing is
allocated. These are the figures of `docs/training.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from typing import Any, get_args, get_type_hints

import jax

from maxdiffusion.cli.devices import make_virtual_devices
from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.schema import TrainSection
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.pipelines.text_to_image import text_to_image_of
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.state import state_shapes

BUFFERS = {"mu": "first moment", "ema": "first moment", "nu": "second moment", "v": "second moment"}
"""Names of arrays in optax's states; Adafactor's rows and columns have their own."""


def sizes(tree: Any) -> tuple[Counter[str], Counter[str]]:
    """Bytes of each buffer over all devices, and on one."""
    whole, share = Counter[str](), Counter[str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [getattr(entry, "name", "") for entry in path]
        if "v_row" in names or "v_col" in names:
            buffer = "rows and columns"
        else:
            buffer = next((BUFFERS[name] for name in names if name in BUFFERS), "counters")
        whole[buffer] += math.prod(leaf.shape) * leaf.dtype.itemsize
        share[buffer] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return whole, share


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    make_virtual_devices(8)
    recipe = load_recipe("pictures", ["mesh=fsdp=8"]).recipe
    subject = text_to_image_of(recipe, mesh=build_mesh(recipe.mesh_spec), vocab_size=2048, max_length=16)
    rows = []
    for name in get_args(get_type_hints(TrainSection)["optimizer"]):
        rule = optimizer(TrainSection(optimizer=name), subject.model)
        shapes = state_shapes(subject.model, rule, keeps_ema=True)
        weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes.params))
        whole, share = sizes(shapes.opt_state)
        rows.append({"optimizer": name, "weights": weights, "buffers": dict(whole), "one_device": sum(share.values())})
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
        return
    for row in rows:
        buffers = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in row["buffers"].items() if size > 1e3)
        total = sum(row["buffers"].values())
        sys.stdout.write(
            f"{row['optimizer']:10} weights {row['weights'] / 1e6:.2f} MB, state {total / 1e6:.2f} MB ({buffers}), "
            f"on one of eight devices {row['one_device'] / 1e6:.2f} MB\n"
        )


if __name__ == "__main__":
    main()
