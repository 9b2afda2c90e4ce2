"""Train the demonstration's recipe for a few steps on eight virtual devices, then make pictures with it.

python examples/train_and_generate.py
"""

from __future__ import annotations

import maxdiffusion
from maxdiffusion.cli.devices import make_virtual_devices
from maxdiffusion.config.load import load_recipe

make_virtual_devices(8)  # before anything runs; leave it out where there are accelerators
words = ["mesh=data=4,tensor=2", "train.steps=20", "train.warmup_steps=5", "train.eval_every=0", "run=runs/example"]
recipe = load_recipe("pictures-demo", [*words, "resume=true"]).recipe
trained = maxdiffusion.train(recipe)  # type: ignore[operator]
made = maxdiffusion.generate(["a red apple, flat style", "a fox, noto style"], trained.run, seed=7, num_images=2)
for path in made.files:
    print(path)  # noqa: T201
