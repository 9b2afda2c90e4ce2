"""A tiny run, trained once for every test that needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from PIL import Image

from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.pictures import pictures
from maxdiffusion.paths import as_path, as_text
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_folder, parts_in
from maxdiffusion.pipelines.run_folder import quiet

WORDS = (
    "mesh=data=4,tensor=2",
    "virtual_devices=null",
    "precision=highest",
    "data.size=8",
    "data.concepts=[red apple, green apple, lemon, fox, banana, rocket, frog, sunflower, dog face, rose, key]",
    "model_config={block_out_channels: [16], attention_levels: [false], layers_per_block: 1, head_dim: 8, "
    "norm_num_groups: 4, text_width: 16, text_layers: 1, text_heads: 2}",
    "train.steps=6",
    "train.batch_size=8",
    "train.warmup_steps=2",
    "train.log_every=1",
    "train.sample_every=6",
    "train.eval_every=6",
    "train.checkpoint_every=3",
    "sample.steps=2",
    'sample.prompts=["a red apple, flat style", "a fox, noto style"]',
    "sample.num_per_prompt=2",
)


def write_pictures(root: Path) -> Path:
    """A folder of the tiny set's pictures, every third of them drawn out to three times its width."""
    root.mkdir(parents=True, exist_ok=True)
    known = pictures(("red apple", "lemon", "fox", "banana", "rocket"), size=8)
    for row, caption in enumerate(known.captions):
        image = Image.fromarray(known.images[row])
        (image.resize((24, 8)) if row % 3 == 0 else image).save(root / f"{row:02}.png")
        (root / f"{row:02}.txt").write_text(caption)
    return root


def run_recipe(folder: Path, *words: str) -> Recipe:
    """The recipe of the tiny run, from the recipe of the demonstration."""
    return load_recipe("pictures-demo", [*WORDS, f"run={folder}", *words]).recipe


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    import json

    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_bits(run: str | Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its name, as it is stored."""
    found: dict[str, np.ndarray] = {}
    folder = as_path(as_text(checkpoint_folder(run, step)))
    with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        for part in sorted(parts_in(folder)):
            tree = reader.metadata(folder / part).item_metadata.tree
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            values = reader.restore(folder / part, args=ocp.args.PyTreeRestore(restore_args=plain))
            for path, leaf in jax.tree_util.tree_leaves_with_path(values):
                found[f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}"] = np.asarray(leaf)
    return found
