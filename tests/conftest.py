"""Every test runs on eight virtual CPU devices, refuses rank promotion, and fails on our own warnings."""

from __future__ import annotations

import functools
import gc
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # A rendezvous of eight devices on a busy machine can take long; the test's own timeout decides.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # Programs of tests run for milliseconds and compile for seconds: a third of the compiler's time is spared.
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_use_xnnpack": "false",
    "--xla_cpu_experimental_ynn_fusion_type": "",
    "--xla_cpu_parallel_codegen_split_count": "4",
}
if version("jaxlib") < "0.11":
    # Fused loops from the older code generator compile in half the time. Later versions have the newer one alone.
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_given, *(f"{k}={v}" for k, v in _FLAGS.items() if k not in _given)]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As `cli.devices.make_virtual_devices` does it: with fewer, collectives that wait can leave no thread for the others.
os.environ.setdefault("NPROC", "32")

import jax  # noqa: E402  (the flags above must be set before jax starts its backend)
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

_CACHE = Path(os.environ.get("MAXDIFFUSION_TEST_CACHE", Path(__file__).parent.parent / ".cache" / "xla"))
jax.config.update("jax_compilation_cache_dir", str(_CACHE / f"jax-{jax.__version__}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traced programs are many small objects that live on: looking through all of them again and again costs a tenth.
gc.set_threshold(100_000, 50, 100)


_RUNS = ("cli", "docs", "pipelines", "train")
"""Folders whose tests are about whole runs, with meshes of their own."""

_COMPOSED = (*_RUNS, "tools")
"""Folders whose tests make meshes of their own."""

_NOTHING_RUNS = (
    "cli/test_explain.py",
    "cli/test_traffic.py",
    "models/test_remat.py",
    "tools/test_aot.py",
    "tools/test_budget.py",
    "tools/test_explain.py",
    "tools/test_flops.py",
    "tools/test_hlo.py",
    "tools/test_measure.py",
    "tools/test_traffic.py",
)
"""Files that only compile for several devices, or run on one of them: no device waits for another."""


class _TwoProcessesForMeshes(LoadScopeScheduling):
    """Programs on eight devices stay in two scopes, one for each of pytest-xdist's processes on a machine of two cores.

    Whole runs (with the run that many of their tests share) are one, parts of models the other; what runs on one device
    goes, file by file, to the process that is free. More than two processes of eight devices would only wait for cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        path = self.config.rootpath / file
        if not _on_devices(path):
            return file
        return "eight devices: " + ("runs" if path.parent.name in _RUNS else "parts")


@functools.cache
def _on_devices(file: Path) -> bool:
    """By what the file names: devices, a mesh, or a fixture of one."""
    if file.as_posix().endswith(_NOTHING_RUNS):
        return False
    words = ("devices", "Mesh", "data_model", "fsdp_tensor")
    return file.parent.name in _COMPOSED or any(word in file.read_text() for word in words)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """The scheduler of `pytest -n 2`."""
    return _TwoProcessesForMeshes(config, log)


@pytest.fixture(scope="session")
def devices() -> np.ndarray:
    """The eight virtual devices."""
    found = np.array(jax.devices())
    assert found.size == 8, f"the tests need 8 devices, found {found.size}: is XLA_FLAGS overridden?"
    return found


@pytest.fixture(scope="session")
def data_model(devices: np.ndarray) -> Mesh:
    """The mesh of the parallelism page: (4, 2) over ("data", "model")."""
    return Mesh(devices.reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="session")
def fsdp_tensor(devices: np.ndarray) -> Mesh:
    """(4, 2) over ("fsdp", "tensor")."""
    return Mesh(devices.reshape(4, 2), ("fsdp", "tensor"))
