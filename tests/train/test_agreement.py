"""The odd host is named with the value that differs, on every host, before the first step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.pictures import pictures
from maxdiffusion.errors import UsageError
from maxdiffusion.train.agreement import DisagreementError, agree, difference, setup_facts, share_folder, source_hash
from tests.boards import boards


def test_the_value_that_most_have_is_right() -> None:
    said = {0: {"seed": "0", "jax": "1"}, 1: {"seed": "7", "jax": "1"}, 2: {"seed": "0", "jax": "1"}}
    assert difference("set-up", said) == (
        "hosts do not agree on the set-up: seed is 0 on 2 of 3 hosts, but host 1 has 7: start all with the same"
    )
    assert difference("set-up", {0: {"a": "1"}, 1: {"a": "1"}}) is None


def test_at_a_tie_host_0_is_right_and_a_missing_value_differs() -> None:
    line = difference("set-up", {0: {"a": "1"}, 1: {"b": "1"}})
    assert line is not None and "a is 1 on 1 of 2 hosts, but host 1 has nothing" in line


def _all_agree(facts: list[dict[str, str]], seconds: float = 5.0) -> list[BaseException | None]:
    """What the check raises on each host, each in a thread of its own."""
    raised: list[BaseException | None] = [None] * len(facts)
    views = boards(len(facts))

    def one(host: int) -> None:
        try:
            agree(views[host], "set-up", facts[host], seconds=seconds)
        except UsageError as error:
            raised[host] = error

    threads = [threading.Thread(target=one, args=(host,)) for host in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_every_host_hears_the_verdict() -> None:
    assert _all_agree([{"seed": "0"}] * 3) == [None] * 3
    raised = _all_agree([{"seed": "0"}, {"seed": "0"}, {"seed": "1"}])
    assert [type(error) for error in raised] == [DisagreementError] * 3
    assert len({str(error) for error in raised}) == 1


def _share(folders: list[Path]) -> list[BaseException | None]:
    """What each host hears of its folder, each in a thread of its own."""
    views = boards(len(folders))

    def one(host: int) -> BaseException | None:
        try:
            share_folder(views[host], folders[host], seconds=5.0, patience=0.05)
        except UsageError as error:
            return error
        return None

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(one, range(len(folders))))


def test_a_host_that_does_not_share_the_folder_is_named_before_the_first_step(tmp_path: Path) -> None:
    ours, other = tmp_path / "runs" / "x", tmp_path / "elsewhere"
    assert _share([ours] * 3) == [None] * 3
    assert list(ours.iterdir()) == []
    raised = _share([ours, ours, other])
    assert [type(error) for error in raised] == [DisagreementError] * 3
    assert {str(error) for error in raised} == {
        f"the run's folder is not shared: host 0 wrote a file into {ours}, and host 2 does not find it in {other}: "
        "give all hosts one folder of a shared file system, or a bucket"
    }
    assert list(ours.iterdir()) == [] and not other.exists()


def test_the_file_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    other = tmp_path / "copied"
    other.mkdir()
    (other / ".hosts").write_text("0123")
    assert [type(error) for error in _share([tmp_path / "run", other])] == [DisagreementError] * 2


def test_a_host_that_does_not_come_is_named() -> None:
    first, _ = boards(2)
    with pytest.raises(UsageError, match="host 1 has not come to the check of set-up"):
        agree(first, "set-up", {}, seconds=0.05)


def test_facts_know_every_value_and_every_picture() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    samples, others = (Fingerprint.of(pictures(names, size=8)) for names in (("lemon", "fox"), ("lemon", "rose")))
    facts = setup_facts(Recipe(), mesh=mesh, samples=samples, done=0)
    for other in (
        setup_facts(Recipe(seed=1), mesh=mesh, samples=samples, done=0),
        setup_facts(Recipe(train={"learning_rate": 0.5}), mesh=mesh, samples=samples, done=0),  # type: ignore[arg-type]
        setup_facts(Recipe(), mesh=Mesh(np.array(jax.devices()[::-1]), ("data",)), samples=samples, done=0),
        setup_facts(Recipe(), mesh=mesh, samples=others, done=0),
        setup_facts(Recipe(), mesh=mesh, samples=samples, done=3),
    ):
        assert len([name for name in facts if facts[name] != other[name]]) == 1
    assert source_hash() in facts["maxdiffusion"]
