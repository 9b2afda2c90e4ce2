"""Hosts in networks of their own train as over loopback, and both sides notice a cable that is pulled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.errors import HOST_GONE
from maxdiffusion.train.run import TrainResult
from tests.hosts import hosts
from tests.networks import ADDRESSES, PLUG, Networks, two_networks
from tests.train.runs import WORDS, read_lines

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Two machines, as far as addresses go."""
    with two_networks() as found:
        yield found


def _words(run: Path, *more: str) -> list[str]:
    words = [word for word in WORDS if not word.startswith("virtual_devices")]
    return ["train", "pictures-demo", *words, f"run={run}", *more, "--json"]


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def test_hosts_of_two_networks_train_as_one_process_does(
    networks: Networks, trained: TrainResult, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with hosts(tmp_path / "logs", *_words(run), address=ADDRESSES[0], inside=networks.inside) as running:
        for host, ended in enumerate(running.wait()):
            assert ended.status == 0, f"host {host}:\n{ended.said}"
            assert f"this is host {host} (pinned by --coordinator {ADDRESSES[0]}:" in ended.said
            assert host or json.loads(ended.out)["step"] == 6
    # The bound of the specification, in float32; sums over hosts are of another order.
    np.testing.assert_allclose(_losses(run), _losses(trained.run), rtol=1e-5)


def test_a_cable_that_is_pulled_ends_both_hosts_in_words(networks: Networks, tmp_path: Path) -> None:
    """No connection is closed, so that only the signs of life tell: collectives would wait for ever."""
    words = _words(tmp_path / "run", "train.steps=100000", "train.sample_every=0", "train.eval_every=0")
    words += ["--host-timeout", "20"]
    environ = {"GLOO_SOCKET_IFNAME": PLUG}  # the other way to say where gloo is reached
    with hosts(tmp_path / "logs", *words, address=ADDRESSES[0], inside=networks.inside, environ=environ) as running:
        running.wait_until(0, "step 1/")
        networks.unplug()
        first, second = running.wait(200)
    assert (first.status, second.status) == (HOST_GONE, HOST_GONE), first.said + second.said
    assert "error: host 1 (" in first.said and "is gone: no sign of life for" in first.said
    assert "error: host 0, which coordinates the others, is gone" in second.said
