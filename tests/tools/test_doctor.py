"""Each known trap is found by its own line, with a cure, and a broken installation does not stop the other checks."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from etils.epath import backend

from maxdiffusion.tools.doctor import Finding, Scene, examine, this_machine
from tests.train.object_store import Store

SEEN = {
    "platform": "cpu", "kind": "cpu", "count": 8, "total": 8.0, "memory": None, "start": 1.0, "compile": 0.1,
    "sum": 0.001, "x64": False, "jax": "0.10.2",
}  # fmt: skip
PACKAGES = dict(this_machine().packages) | {"jax": "0.10.2", "jaxlib": "0.10.2"}


def _examine(
    tmp_path: Path,
    environ: dict[str, str] | None = None,
    *,
    packages: dict[str, str] | None = None,
    probe: tuple[int, str, str] | None = None,
    without: tuple[str, ...] = (),
    **scene_values: Path,
) -> dict[str, list[Finding]]:
    have = {name: version for name, version in (PACKAGES | (packages or {})).items() if name not in without}
    scene = Scene(
        environ={"HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), **(environ or {})},
        packages=have,
        devices=tmp_path / "dev",
        probe=lambda: probe or (0, json.dumps(SEEN), ""),
        **{"run": tmp_path / "run", **scene_values},
    )
    found: dict[str, list[Finding]] = {}
    for finding in examine(scene):
        found.setdefault(finding.check, []).append(finding)
    return found


def _bad(found: dict[str, list[Finding]]) -> list[tuple[str, str]]:
    return [(one.check, one.state) for several in found.values() for one in several if one.state != "ok"]


def test_a_sound_machine_has_nothing_broken(tmp_path: Path) -> None:
    without = tuple(name for name in PACKAGES if name.startswith(("jax-", "libtpu")))
    found = _examine(tmp_path, without=without)
    assert [row for row in _bad(found) if row[1] == "broken"] == []
    assert "8 x cpu (cpu)" in found["devices"][0].found
    assert "a sum over 8 devices: 1.0 ms" in found["collective"][0].found


@pytest.mark.parametrize(
    ("environ", "check", "state", "told"),
    [
        ({"JAX_PLATFORMS": "tpu"}, "platforms", "broken", "JAX_PLATFORMS names tpu, but no package"),
        ({"JAX_PLATFORMS": "cdua"}, "platforms", "broken", "names 'cdua', which does not exist"),
        ({"XLA_FLAGS": "xla_foo=1"}, "flags", "broken", "'xla_foo=1', which is no flag"),
        ({"XLA_FLAGS": "--a=1 --a=2"}, "flags", "note", "--a=1 and --a=2: the last one wins"),
        ({"JAX_ENABLE_X64": "1"}, "flags", "note", "JAX_ENABLE_X64 is set"),
        ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}, "flags", "note", "8 CPU devices share 16 threads"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"},
            "flags", "broken", "XLA_FLAGS asks for 8 CPU devices and JAX_NUM_CPU_DEVICES for 4",
        ),
        (
            {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", "JAX_NUM_CPU_DEVICES": "8"},
            "flags", "broken", "segmentation fault",
        ),
        ({"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "glo"}, "flags", "broken", "is unknown"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, "devices", "broken", "4 CPU devices were asked for and 8 are here"),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, "cache", "note", "no compilation cache"),
        ({"JAX_COMPILATION_CACHE_DIR": "/proc/cache"}, "cache", "broken", "cannot be written"),
        ({"HOME": "/proc"}, "disk", "note", "the home folder /proc cannot be written"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "hosts", "broken", "does not say --coordinator"),
    ],
)  # fmt: skip
def test_a_trap_in_the_environment_has_its_line(
    environ: dict[str, str], check: str, state: str, told: str, tmp_path: Path
) -> None:
    found = _examine(tmp_path, environ, without=tuple(name for name in PACKAGES if name.startswith(("jax-", "libtpu"))))
    line = next((one for one in found[check] if told in one.found), None)
    assert line is not None, found[check]
    assert line.state == state
    assert line.cure or check == "hosts"


@pytest.mark.parametrize(
    ("packages", "told"),
    [
        ({"jaxlib": "0.11.0"}, "jax 0.10.2 does not go with the newer jaxlib 0.11.0"),
        ({"jax-cuda13-plugin": "0.9.0"}, "jax-cuda13-plugin 0.9.0 does not go with jaxlib 0.10.2"),
        (
            {"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"},
            "jax-cuda12 and jax-cuda13 are installed at once",
        ),
    ],
)
def test_packages_that_do_not_fit_together_are_named(packages: dict[str, str], told: str, tmp_path: Path) -> None:
    broken = [one.found for one in _examine(tmp_path, packages=packages)["jax"] if one.state == "broken"]
    assert any(told in line for line in broken), broken


def test_a_missing_package_and_a_missing_extra_are_told_apart(tmp_path: Path) -> None:
    found = _examine(tmp_path, packages={"optax": "0.0.1"}, without=("orbax-checkpoint", "av"))
    assert found["packages"][0].state == "broken"
    assert "orbax-checkpoint" in found["packages"][0].found
    assert "optax>=" in found["packages"][0].found and "(0.0.1 is here)" in found["packages"][0].found
    assert any(one.found.startswith("video") and one.state == "ok" for one in found["extras"])
    found = _examine(tmp_path, without=tuple(name for name in PACKAGES if name.startswith(("jax-", "libtpu"))))
    assert [one.found for one in found["extras"] if one.found.startswith("tpu")] == [
        "tpu (training on TPUs) is not installed: libtpu"
    ]


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        ((1, "", "Traceback\nRuntimeError: no driver\n"), "jax does not start: RuntimeError: no driver"),
        ((-6, "", "F1 flags.cc] Unknown flag in XLA_FLAGS: --xla_fo=1\n"), "does not know these flags"),
        ((0, json.dumps(SEEN | {"total": 7.0}), ""), "a sum of 8 ones over the devices gave 7"),
        ((0, "no json", ""), "cannot be examined: JSONDecodeError"),
    ],
)
def test_devices_that_do_not_work_are_a_finding(probe: tuple[int, str, str], told: str, tmp_path: Path) -> None:
    found = _examine(tmp_path, probe=probe)
    lines = [*found["devices"], *found.get("collective", [])]
    assert any(told in one.found and one.state == "broken" for one in lines), lines
    assert "disk" in found  # the checks after it have run


def test_an_accelerator_that_jax_cannot_use_is_noted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    without = tuple(name for name in PACKAGES if name.startswith("jax-"))
    lines = [one.found for one in _examine(tmp_path, without=without)["platforms"]]
    assert any("an NVIDIA GPU is here, but jax was installed without CUDA" in line for line in lines)


def test_a_folder_of_an_object_store_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the local disk of that name: pathlib makes `gs:/bucket` of the address on the command line."""
    Store.store.clear()
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda name: Store)
    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Store())
    (line,) = _examine(tmp_path, run=Path("gs://bucket/run"))["disk"]
    assert (line.state, line.found) == ("ok", "gs://bucket/run: a file was written, read and deleted")
    assert Store.store == {}

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("403 no right to create objects\nand more")

    monkeypatch.setattr(Store, "_open", refused)
    (line,) = _examine(tmp_path, run=Path("gs://bucket/run"))["disk"]
    assert line.state == "broken"
    assert line.found == "gs://bucket/run cannot be written: RuntimeError: 403 no right to create objects"


def test_an_address_whose_package_is_missing_is_a_finding_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    (line,) = _examine(tmp_path, run=Path("s3://bucket/run"))["disk"]
    assert line.state == "broken" and "needs the package s3fs: pip install s3fs" in line.found


def test_without_linux_s_file_the_memory_is_still_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = _examine(tmp_path, meminfo=tmp_path / "none")["memory"]
    assert line.state == "ok" and line.found.endswith(" GiB; how much is free is not known")

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    (line,) = _examine(tmp_path, meminfo=tmp_path / "none")["memory"]
    assert line.state == "note" and line.found == "this system does not tell its size"
