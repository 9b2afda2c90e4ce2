"""Names of what a run's folder holds beside its checkpoints, for whoever reads it without jax."""

METRICS = "metrics.jsonl"
"""A line every few steps."""

SAMPLES = "samples"
"""Folder of the grids of pictures, `step-000500.png`."""

EVALUATION = "evaluation"
"""Stem of the files that an evaluation writes."""

REPORT = "report.html"
"""One page about all of it."""

DIVERGED = "diverged"
"""Folder with the state before a step that was not finite, in a checkpoint of its own."""

BAD_STEP = "bad-step.json"
"""File in there that says what was wrong."""

PACKED_WEIGHTS = "weights.safetensors"
"""The weights of a packed model, which is a run without the state of its training."""
