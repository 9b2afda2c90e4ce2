"""Accelerators have a pinned memory on their host; a CPU has none, which is said once."""

from __future__ import annotations

import logging

import pytest

from maxdiffusion.log import say_once
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.memory import PINNED_HOST, host_memory
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.specs import MeshSpec


def layout_on(platform: str) -> Layout:
    return Layout.of(abstract_mesh(MeshSpec(data=2), platform=platform))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_offload_to_pinned_memory(platform: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert host_memory(layout_on(platform)) == PINNED_HOST
    assert not caplog.records


def test_on_a_cpu_nothing_moves_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert host_memory(layout_on("cpu")) is None
        assert host_memory(layout_on("cpu")) is None
    (record,) = caplog.records
    assert "platform 'cpu' computes in the memory of the host, so nothing is moved" in record.getMessage()
