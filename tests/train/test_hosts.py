"""Two processes train as one does, leave one run, and neither waits for the other when it is gone."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import HOST_GONE, INTERRUPTED
from maxdiffusion.pipelines.checkpoint_folder import checkpoint_steps
from maxdiffusion.train.run import TrainResult, train
from tests.data.formats import picture, write_tar
from tests.hosts import PROGRAM, hosts
from tests.train.runs import WORDS, read_lines, run_recipe

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]


def _words(run: Path, *more: str) -> list[str]:
    """The tiny run on the command line; the virtual devices are an option of each host."""
    words = [word for word in WORDS if not word.startswith("virtual_devices")]
    return ["train", "pictures-demo", *words, f"run={run}", *more, "--json"]


def _losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run of six steps, trained by two processes of four devices."""
    folder = tmp_path_factory.mktemp("two")
    with hosts(folder / "logs", *_words(folder / "run")) as running:
        for host, ended in enumerate(running.wait()):
            assert ended.status == 0, f"host {host}:\n{ended.said}"
            assert f"this is host {host} (pinned by --coordinator 127.0.0.1:" in ended.said
            assert host or json.loads(ended.out)["step"] == 6
    return folder / "run"


def test_two_processes_train_as_one_does(two: Path, trained: TrainResult) -> None:
    # The bound of the specification, in float32; sums over hosts are of another order.
    ours, alone = _losses(two), _losses(trained.run)
    assert list(ours) == list(alone) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(ours.values()), list(alone.values()), rtol=1e-5)


def test_pictures_and_held_out_losses_are_those_of_one_process(two: Path, trained: TrainResult) -> None:
    def measured(run: Path) -> list[float]:
        line = next(line for line in read_lines(run / "metrics.jsonl") if "held_out_loss" in line)
        return [line["held_out_loss"], line["unconditional_loss"]]

    np.testing.assert_allclose(measured(two), measured(trained.run), rtol=1e-5)
    name = "samples/step-000006.png"
    ours, alone = (np.asarray(Image.open(run / name), np.int16) for run in (two, trained.run))
    # Pixels are rounded to 256 values: a difference of the last bit may move one by one.
    assert np.abs(ours - alone).max() <= 1


def test_one_process_goes_on_with_what_two_have_saved(two: Path, trained: TrainResult, tmp_path: Path) -> None:
    assert checkpoint_steps(two) == [3, 6]
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    assert train(run_recipe(folder, "resume=true")).step == 6
    np.testing.assert_allclose(list(_losses(folder).values()), list(_losses(trained.run).values()), rtol=1e-5)


def test_the_odd_host_is_named_before_the_first_step(tmp_path: Path) -> None:
    each = {1: ["train.learning_rate=0.5"]}
    with hosts(tmp_path / "logs", *_words(tmp_path / "run"), each=each, devices=4) as running:
        ended = running.wait()
    for host in ended:
        assert host.status == 2, host.said
        told = "hosts do not agree on the set-up: train.learning_rate is 0.001 on 1 of 2 hosts, but host 1 has 0.5"
        assert told in host.said
    assert not checkpoint_steps(tmp_path / "run")


@pytest.mark.slow
def test_hosts_begin_with_the_weights_of_a_run_as_one_process_does(trained: TrainResult, tmp_path: Path) -> None:
    words = (f"train.start_from={trained.run}@3", "train.steps=2", "train.sample_every=0", "train.eval_every=0")
    with hosts(tmp_path / "logs", *_words(tmp_path / "two", *words)) as running:
        for host in running.wait():
            assert host.status == 0, host.said
    train(run_recipe(tmp_path / "one", *words))
    np.testing.assert_allclose(
        list(_losses(tmp_path / "two").values()), list(_losses(tmp_path / "one").values()), rtol=1e-5
    )


@pytest.mark.slow
def test_hosts_stop_alike_where_a_step_is_not_finite(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = _words(run, "train.learning_rate=1.0e+30", "train.grad_clip=null", "train.log_every=4", "train.steps=40")
    with hosts(tmp_path / "logs", *words) as running:
        ended = running.wait()
    told = {re.search(r"error: (the .* in step \d+; first bad tensor: .*)", host.said) for host in ended}
    assert len({found and found[1] for found in told}) == 1 and None not in told, [host.said for host in ended]
    assert [host.status for host in ended] == [2, 2]
    assert len(checkpoint_steps(run / "diverged")) == 1


@pytest.mark.slow
def test_a_host_that_is_killed_is_named_and_the_run_goes_on(trained: TrainResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = _words(run, "train.checkpoint_every=2")
    with hosts(tmp_path / "killed", *words, "--host-timeout", "20") as running:
        _wait_for_checkpoint(run)
        running.kill(1)
        survivor = running.wait(120)[0]
    assert survivor.status == HOST_GONE, survivor.said
    assert re.search(r"error: host 1 \(\S+, pid \d+.*, last seen after step \d\) is gone", survivor.said), survivor.said
    assert checkpoint_steps(run)
    with hosts(tmp_path / "again", *words, "resume=true") as running:
        for host in running.wait():
            assert host.status == 0, host.said
    assert checkpoint_steps(run)[-1] == 6
    np.testing.assert_allclose(list(_losses(run).values()), list(_losses(trained.run).values()), rtol=1e-5)


@pytest.mark.slow
def test_without_host_0_the_others_end_and_say_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hosts(tmp_path / "killed", *_words(run, "train.checkpoint_every=2")) as running:
        _wait_for_checkpoint(run)
        running.kill(0)
        survivor = running.wait(120)[1]
    assert survivor.status == HOST_GONE, survivor.said
    assert "error: host 0, which coordinates the others, is gone" in survivor.said


FULL = """
import sys
from maxdiffusion.cli.main import main
from maxdiffusion.train.checkpoint import Checkpoints

def full(self, folder, step):
    raise OSError(28, "No space left on device")

Checkpoints.seal = full
sys.exit(main())
"""


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_all_hosts_in_words(tmp_path: Path) -> None:
    """Host 0 seals it; Orbax would let it wait for the others, which wait for host 0, for many minutes."""
    words = _words(tmp_path / "run", "train.steps=100000", "train.sample_every=0", "train.eval_every=0")
    with hosts(tmp_path / "logs", *words, program=FULL) as running:
        running.wait_until(0, "step 1/")  # what comes before takes as long as it takes
        first, second = running.wait(120)
    assert (first.status, second.status) == (2, 3)
    assert "error: the checkpoint of step 3 could not be written to" in first.said
    assert "host 0 has left, and this host stops too; it said: CheckpointError: the checkpoint of step 3" in second.said


@pytest.mark.slow
def test_sigterm_on_one_host_stops_all_after_the_same_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = _words(run, "train.steps=100000", "train.sample_every=0", "train.eval_every=0", "train.checkpoint_every=0")
    with hosts(tmp_path / "logs", *words) as running:
        running.wait_until(0, "step 1/")
        running.processes[1].send_signal(signal.SIGTERM)
        first, second = running.wait(120)
    assert (first.status, second.status) == (INTERRUPTED, INTERRUPTED), first.said + second.said
    (saved,) = checkpoint_steps(run)
    assert f"interrupted: saved step {saved}" in first.said
    assert json.loads(first.out)["interrupted"] is True


@pytest.mark.slow
def test_four_processes_train_as_one_does(trained: TrainResult, tmp_path: Path) -> None:
    # Tensor pairs lie within a host; each of the four rows of the data axis is one host.
    with hosts(tmp_path / "logs", *_words(tmp_path / "run"), num_hosts=4, devices=2) as running:
        for host in running.wait():
            assert host.status == 0, host.said
    np.testing.assert_allclose(list(_losses(tmp_path / "run").values()), list(_losses(trained.run).values()), rtol=1e-5)


@pytest.mark.slow
def test_hosts_that_share_every_row_read_the_same_pictures(trained: TrainResult, tmp_path: Path) -> None:
    # The tensor axis lies over both hosts, and the batch is whole on each.
    with hosts(tmp_path / "logs", *_words(tmp_path / "run", "mesh=data=1,tensor=8")) as running:
        for host in running.wait():
            assert host.status == 0, host.said
    np.testing.assert_allclose(list(_losses(tmp_path / "run").values()), list(_losses(trained.run).values()), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_draw_pictures_of_several_sizes_as_one_does(tmp_path: Path) -> None:
    sizes, steps = (
        {(8, 8): 20, (8, 24): 12},
        8,
    )  # batches of 8: two epochs to a row, whose ends cut batches of both sizes
    _write_sizes(tmp_path / "data", sizes)
    words = [
        "data.source=webdataset",
        f"data.path={tmp_path / 'data'}",
        "data.buckets=[8x8, 8x24]",
        "data.concepts=null",
    ]
    words += [
        'sample.prompts=["a lemon"]',
        f"train.steps={steps}",
        "train.sample_every=0",
        "train.eval_every=0",
        "train.checkpoint_every=0",
    ]
    program = f"import sys; from tests.train.victim import note; note({str(tmp_path)!r} + f'/{{sys.argv[-1]}}.ids')\n"
    with hosts(tmp_path / "logs", *_words(tmp_path / "two", *words), program=program + PROGRAM) as running:
        for host in running.wait():
            assert host.status == 0, host.said
    alone = run_recipe(tmp_path / "one", *words)
    train(alone)
    # The bound of the specification, in float32; sums over hosts are of another order.
    ours, wanted = _losses(tmp_path / "two"), _losses(tmp_path / "one")
    assert list(ours) == list(wanted) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(ours.values()), list(wanted.values()), rtol=1e-5)

    first, second = (read_lines(tmp_path / f"{host}.ids") for host in range(2))
    drawn: dict[tuple[int, ...], list[int]] = {size: [] for size in sizes}
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        assert (one["step"], one["size"]) == (other["step"], other["size"]) == (number, one["size"])
        assert len(one["samples"]) == len(other["samples"]) == alone.train.batch_size // 2
        drawn[tuple(one["size"])] += one["samples"] + other["samples"]
    rows = np.cumsum([0, *sizes.values()])
    for (size, count), start in zip(sizes.items(), rows, strict=False):
        for epoch in range(2):
            samples = drawn[size][epoch * count : (epoch + 1) * count]
            assert sorted(samples) == list(range(start, start + count)), (size, epoch)


def _write_sizes(folder: Path, sizes: dict[tuple[int, int], int]) -> None:
    """Tar shards with so many pictures of each height and width, one size after the other."""
    folder.mkdir()
    captions = ("a red apple", "a lemon", "a fox")
    for (height, width), count in sizes.items():
        members = []
        for row in range(count):
            name = f"{row:02}"
            members += [(f"{name}.png", picture(100 * width + row, width, height))]
            members += [(f"{name}.txt", captions[row % len(captions)].encode())]
        write_tar(folder / f"{width:02}.tar", members)


def _wait_for_checkpoint(run: Path, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not checkpoint_steps(run):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
