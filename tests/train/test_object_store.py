"""A run may live in an object store: trained there, gone on with there, read back from there."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest
from etils.epath import backend
from orbax.checkpoint._src.path import gcs_utils

from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.tools.checkpoints import list_checkpoints
from maxdiffusion.train.run import TrainResult, train
from tests.train.object_store import Store, object_store
from tests.train.runs import read_bits, run_recipe


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with object_store() as address:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        monkeypatch.setattr(fsspec, "get_filesystem_class", lambda name: Store)
        monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Store())
        monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
        yield "gs://bucket"


@pytest.mark.slow
def test_a_run_lives_in_an_object_store(trained: TrainResult, bucket: str) -> None:
    run = f"{bucket}/runs/tiny"
    first = train(run_recipe(run, "train.steps=3"))
    assert (first.step, str(first.run)) == (3, run)
    assert checkpoint_steps(run) == [3]
    assert train(run_recipe(run, "resume=true")).step == 6
    found, unfinished = list_checkpoints(run)
    assert [(one.step, one.flaw) for one in found] == [(3, None), (6, None)] and unfinished == []
    here, there = read_bits(trained.run, 6), read_bits(run, 6)
    for name, array in here.items():
        np.testing.assert_array_equal(there[name], array)
