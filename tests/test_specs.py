"""Specs refuse what cannot work, with the nearest valid name (meshes: see parallel/test_mesh.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.specs import AttentionSpec, MeshSpec, PipelineSpec, QuantSpec, RematSpec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionSpec(kernel="flsh"), "did you mean 'flash'"),  # type: ignore[arg-type]
        (lambda: AttentionSpec(flash_min_seq_length=-1), "0 or more"),
        (lambda: AttentionSpec(context="rng"), "context_attention='rng' is unknown: did you mean 'ring'"),  # type: ignore[arg-type]
        (lambda: AttentionSpec(context="hybrid", ulysses=0), "ulysses_degree=0: write a number of devices"),
        (lambda: AttentionSpec(ulysses=2), "ulysses_degree=2 is of no use with context_attention='auto'"),
        (lambda: RematSpec(policy="ful"), "did you mean 'full'"),  # type: ignore[arg-type]
        (lambda: RematSpec(policy="full", save=("atention",)), "did you mean 'attention'"),  # type: ignore[arg-type]
        (lambda: RematSpec(policy="full", save="hiden"), "did you mean 'hidden'"),  # type: ignore[arg-type]
        (lambda: RematSpec(policy="full", save=(1,)), "write names"),  # type: ignore[arg-type]
        (lambda: RematSpec(save=("attention",)), "of no use with remat_policy='none'"),
        (lambda: PipelineSpec(schedule="gpip"), "did you mean 'gpipe'"),  # type: ignore[arg-type]
        (lambda: PipelineSpec(microbatches=0), "pipeline_microbatches=0"),
        (lambda: PipelineSpec(repeats=2), 'pipeline_schedule="circular" repeats'),
        (lambda: PipelineSpec(patches=0), "pipeline_patches=0: write a whole number, 1 or more"),
        (lambda: PipelineSpec(patches=4, warmup_steps=0), "pipeline_warmup_steps=0: write a whole number, 1 or more"),
        (lambda: PipelineSpec(warmup_steps=2), "pipeline_warmup_steps=2 is of no use without pipeline_patches"),
        (lambda: PipelineSpec(patches=4, schedule="circular"), 'write pipeline_schedule="gpipe"'),
        (lambda: MeshSpec(axes=("data", "data")), "mesh axis 'data' is named twice"),
        (lambda: MeshSpec(axes=()), "a mesh has no axes: name one or more"),
        (lambda: MeshSpec.parse("axes=2", axes=("data", "axes")), "no mesh axis can be named 'axes'"),
        (lambda: QuantSpec(mode="int9"), "did you mean 'int8'"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_what_is_left_goes_to_data_or_to_the_first_axis() -> None:
    for axes, rest in ((("model", "data"), "data"), (("model", "batch"), "model")):
        spec = MeshSpec(axes=axes)
        assert spec.rest == rest and spec.shape(8)[rest] == 8


def test_nearest_names_or_lists():
    assert nearest("tenser", ["tensor", "data"]) == "did you mean 'tensor'?"
    assert nearest("zzz", ["tensor", "data"]) == "valid: data, tensor"


def test_import_starts_no_backend_and_no_jax():
    code = "import sys, maxdiffusion, maxdiffusion.specs; print('jax' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_names_to_save_are_one_value_however_written() -> None:
    spec = RematSpec(policy="full", save=("attention", "hidden"))
    assert RematSpec(policy="full", save="hidden, attention") == spec  # type: ignore[arg-type]
    assert RematSpec(policy="full", save=("hidden", "attention", "hidden")).save == spec.save
