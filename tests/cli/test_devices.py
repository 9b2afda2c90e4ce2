"""Virtual devices are made before jax starts, or the reason why not is said."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import jax
import pytest

from maxdiffusion.cli import devices
from maxdiffusion.errors import MeshError, UsageError
from maxdiffusion.specs import MeshSpec


def _count_in_a_new_process(program: str, **environment: str) -> str:
    names = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC")
    kept = {name: value for name, value in os.environ.items() if name not in names and "MALLOC" not in name}
    env = kept | environment
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_cpu_is_split_before_jax_starts() -> None:
    program = (
        "from maxdiffusion.cli import devices; devices.make_virtual_devices(3); import jax; "
        "import sys; sys.stdout.write(str(jax.device_count()))"
    )
    assert _count_in_a_new_process(program, JAX_PLATFORMS="cpu") == "3"


def test_every_device_has_threads_to_wait_in_beside_those_that_work() -> None:
    # Read from the process itself: XLA names the threads of its pool after it.
    program = (
        "from maxdiffusion.cli import devices; devices.make_virtual_devices(64); "
        "import jax, pathlib, sys; jax.devices(); "
        "names = [path.read_text() for path in pathlib.Path('/proc/self/task').glob('*/comm')]; "
        "sys.stdout.write(str(sum('Eigen' in name for name in names)))"
    )
    assert int(_count_in_a_new_process(program, JAX_PLATFORMS="cpu")) >= 4 * 64


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, whose settings these are")
def test_memory_of_large_blocks_is_cleared_once_unless_the_user_says_how() -> None:
    program = (
        "from maxdiffusion.cli import devices; devices.make_virtual_devices(None); import numpy as np, resource, sys; "
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; np.ones(400_000); before = faults(); "
        "[np.ones(400_000).size for _ in range(50)]; sys.stdout.write(str(faults() - before))"
    )
    kept = int(_count_in_a_new_process(program, JAX_PLATFORMS="cpu"))
    own = int(_count_in_a_new_process(program, JAX_PLATFORMS="cpu", MALLOC_MMAP_THRESHOLD_="65536"))
    assert kept < own / 4


def test_the_same_number_in_the_flags_is_no_conflict() -> None:
    program = (
        "from maxdiffusion.cli import devices; devices.make_virtual_devices(2); import jax; "
        "import sys; sys.stdout.write(str(jax.device_count()))"
    )
    flags = "--xla_force_host_platform_device_count=2"
    assert _count_in_a_new_process(program, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) == "2"


def test_another_number_in_the_flags_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    with pytest.raises(UsageError, match="4 virtual devices, but XLA_FLAGS asks for 8"):
        devices.make_virtual_devices(4)
    devices.make_virtual_devices(8)


def test_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UsageError, match="jax has started already"):
        devices.make_virtual_devices(3)


def test_another_platform_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    flags = os.environ["XLA_FLAGS"]
    with pytest.raises(UsageError, match="jax runs on tpu: set JAX_PLATFORMS=cpu"):
        devices.make_virtual_devices(8)
    assert os.environ["XLA_FLAGS"] == flags


def test_none_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    before = dict(os.environ)
    devices.make_virtual_devices(None)
    assert dict(os.environ) == before


def test_too_few_devices_on_a_cpu_get_the_cure() -> None:
    spec = MeshSpec(data=8, tensor=2)
    with (
        pytest.raises(MeshError, match=r"= 16 devices, but there are 8: .*--virtual-devices 16$"),
        devices.mesh_cure(spec),
    ):
        spec.shape(8)


def test_a_mesh_that_is_wrong_otherwise_gets_no_such_cure() -> None:
    spec = MeshSpec(data=3)
    with pytest.raises(MeshError) as error, devices.mesh_cure(spec):
        spec.shape(8)
    assert "--virtual-devices" not in str(error.value)
