"""What is wrong with an installation or a machine, one line of cause and cure each; it runs where nothing else does.

jax is started in a process of its own with a time limit: a driver that hangs or aborts is a finding, not the end.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.paths import as_path, is_remote
from maxdiffusion.specs import THREADS_PER_DEVICE

State = Literal["ok", "note", "broken"]

NEWEST_TOO_OLD = (3, 10)
"""Python up to this one is too old."""

LITTLE_DISK = 2 * 2**30
"""Bytes below which a run folder's disk is called full: less than a checkpoint of a small model."""

PATIENCE = 180.0
"""Seconds that jax may take to start all devices and add a number on them."""

EXTRAS = {
    "tpu": "training on TPUs",
    "cuda": "training on NVIDIA GPUs",
    "aot": "compiling for TPUs and GPUs that are not here",
    "data": "data sets in files of records and tables",
    "hub": "reading published weights",
    "serve": "serving pictures over HTTP",
    "video": "reading and writing video",
    "track": "TensorBoard",
    "parity": "making goldens from the original implementations",
}
"""What each extra is for."""

PLATFORMS = {"cpu": "", "tpu": "libtpu", "cuda": "jax-cuda", "gpu": "jax-cuda", "rocm": "jax-rocm"}
"""Platforms of `JAX_PLATFORMS`, and the beginning of the name of the package that brings each."""

_FAILURES = (ImportError, OSError, RuntimeError, ValueError, AttributeError, KeyError, TypeError)
"""What a check may meet on a broken installation: it is then itself a finding."""

_PROBE = """
import json, sys, time
began = time.perf_counter()
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
started = time.perf_counter()
mesh = Mesh(np.array(devices), ("all",))
ones = jax.device_put(np.ones(len(devices), np.float32), NamedSharding(mesh, P("all")))
add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P())).lower(ones).compile()
compiled = time.perf_counter()
total = float(add(ones))
again = time.perf_counter()
add(ones).block_until_ready()
stats = devices[0].memory_stats() or {}
json.dump({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices), "total": total,
    "memory": stats.get("bytes_limit"), "start": started - began, "compile": compiled - started,
    "sum": time.perf_counter() - again, "x64": bool(jax.config.jax_enable_x64), "jax": jax.__version__,
}, sys.stdout)
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line about an installation.

    Attributes:
        check: what was looked at.
        state: `ok`, `note` (it works, but may surprise), or `broken`.
        found: what there is, or the cause.
        cure: what to do; empty where nothing is to be done.
    """

    check: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is examined; a test makes its own.

    Attributes:
        environ: variables.
        run: a folder that a run would write to.
        packages: installed packages and their versions, names in small letters with `-`.
        devices: folder of the machine's devices.
        meminfo: file in which Linux says how much memory there is; other systems have none.
        probe: starts jax in a process of its own: exit status, standard output and standard error.
    """

    environ: Mapping[str, str]
    run: Path
    packages: Mapping[str, str]
    devices: Path
    probe: Callable[[], tuple[int, str, str]]
    meminfo: Path = Path("/proc/meminfo")


def examine(scene: Scene) -> tuple[Finding, ...]:
    """Every finding, in the order of the checks; a check that fails itself is a finding that says so."""
    found: list[Finding] = []
    for name, check in _CHECKS.items():
        try:
            found.extend(check(scene))
        except _FAILURES as error:
            found.append(
                Finding(check=name, state="broken", found=f"cannot be examined: {type(error).__name__}: {_line(error)}")
            )
    return tuple(found)


def this_machine(run: str | Path = "runs") -> Scene:
    """The machine and the environment of this process.

    Args:
        run: a folder that a run would write to.
    """
    packages = {
        _normal(entry.metadata["Name"]): entry.version
        for entry in importlib.metadata.distributions()
        if entry.metadata["Name"]
    }
    return Scene(environ=os.environ, run=Path(run), packages=packages, devices=Path("/dev"), probe=_start_jax)


# --- The checks -------------------------------------------------------------------------------------------------------


def _python(scene: Scene) -> Iterator[Finding]:
    version, bits = platform.python_version(), 64 if sys.maxsize > 2**32 else 32
    text = f"{version}, {bits} bits, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] <= NEWEST_TOO_OLD or bits == 32:
        yield Finding(check="python", state="broken", found=text, cure="take Python 3.11 or newer with 64 bits")
    else:
        yield Finding(check="python", state="ok", found=text)


def _packages(scene: Scene) -> Iterator[Finding]:
    requirements = importlib.metadata.requires("maxdiffusion") or []
    lacking: dict[str, list[str]] = {}
    for text in requirements:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[([a-z]*)[^]]*\])?\s*(?:>=\s*([0-9.]+))?", text)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", text)
        assert match is not None, text
        name, least = _normal(match[1]), match[3]
        have = scene.packages.get(name)
        group = extra[1] if extra else ""
        lacking.setdefault(group, [])
        brings = PLATFORMS.get(match[2] or "")  # jax[tpu] is jax and what it brings for TPUs
        if have is None or (brings and not any(package.startswith(brings) for package in scene.packages)):
            lacking[group].append(brings or match[1])
        elif least and _numbers(have) < _numbers(least):
            lacking[group].append(f"{match[1]}>={least} ({have} is here)")
    broken = lacking.pop("", [])
    if broken:
        cure = "pip install -U maxdiffusion (in this environment), or what is named"
        yield Finding(check="packages", state="broken", found=f"missing or too old: {', '.join(broken)}", cure=cure)
    else:
        yield Finding(check="packages", state="ok", found="everything that is needed is here")
    for name, purpose in EXTRAS.items():
        absent = lacking.get(name)
        if absent:
            text = f"{name} ({purpose}) is not installed: {', '.join(absent)}"
            yield Finding(check="extras", state="ok", found=text, cure=f"pip install 'maxdiffusion[{name}]', if wanted")
        elif absent is not None:
            yield Finding(check="extras", state="ok", found=f"{name} ({purpose}) is here")


def _jax(scene: Scene) -> Iterator[Finding]:
    have = scene.packages
    jax, jaxlib = have.get("jax"), have.get("jaxlib")
    if jax is None or jaxlib is None:
        gone = "jax" if jax is None else "jaxlib"
        yield Finding(check="jax", state="broken", found=f"{gone} is not installed", cure="pip install -U jax jaxlib")
        return
    if _numbers(jaxlib) > _numbers(jax):
        text = f"jax {jax} does not go with the newer jaxlib {jaxlib}"
        yield Finding(check="jax", state="broken", found=text, cure=f"pip install -U jax=={jaxlib} jaxlib=={jaxlib}")
    else:
        yield Finding(check="jax", state="ok", found=f"jax {jax}, jaxlib {jaxlib}")
    plugins = {name: version for name, version in have.items() if re.match(r"jax-(cuda|rocm)\d*-(plugin|pjrt)$", name)}
    for name, version in plugins.items():
        if _numbers(version)[:3] != _numbers(jaxlib)[:3]:
            text = f"{name} {version} does not go with jaxlib {jaxlib}"
            yield Finding(check="jax", state="broken", found=text, cure=f"pip install -U {name}=={jaxlib}")
    kinds = sorted({name.rpartition("-")[0] for name in plugins})
    if len(kinds) > 1:
        text = f"{' and '.join(kinds)} are installed at once; jax loads one of them, or none"
        yield Finding(check="jax", state="broken", found=text, cure=f"pip uninstall {kinds[0]}-plugin {kinds[0]}-pjrt")
    if kinds and "libtpu" in have and not scene.environ.get("JAX_PLATFORMS"):
        text = (
            f"{kinds[0]} and libtpu are both installed, and JAX_PLATFORMS is not set: jax looks for both at every start"
        )
        yield Finding(check="jax", state="note", found=text, cure="set JAX_PLATFORMS=cuda or JAX_PLATFORMS=tpu")


def _platforms(scene: Scene) -> Iterator[Finding]:
    """The variable JAX_PLATFORMS, and accelerators that jax cannot use."""
    wanted = [name.strip() for name in scene.environ.get("JAX_PLATFORMS", "").split(",") if name.strip()]
    for name in wanted:
        if name not in PLATFORMS:
            yield Finding(
                check="platforms",
                state="broken",
                found=f"JAX_PLATFORMS names '{name}', which does not exist",
                cure=nearest(name, PLATFORMS),
            )
        elif not any(package.startswith(PLATFORMS[name]) for package in scene.packages):
            extra = {"tpu": "tpu", "cuda": "cuda", "gpu": "cuda"}.get(name)
            cure = (
                f"pip install 'maxdiffusion[{extra}]', or set JAX_PLATFORMS=cpu" if extra else "set JAX_PLATFORMS=cpu"
            )
            text = f"JAX_PLATFORMS names {name}, but no package for it is installed"
            yield Finding(check="platforms", state="broken", found=text, cure=cure)
    cuda = any(package.startswith("jax-cuda") for package in scene.packages)
    if any(scene.devices.glob("nvidia[0-9]*")) and not cuda:
        text = "an NVIDIA GPU is here, but jax was installed without CUDA and will not use it"
        yield Finding(check="platforms", state="note", found=text, cure="pip install 'maxdiffusion[cuda]'")
    tpu = any(scene.devices.glob("accel[0-9]*")) or any(scene.devices.glob("vfio/[0-9]*"))
    if tpu and "libtpu" not in scene.packages:
        text = "a TPU is here, but libtpu is not installed and jax will not use it"
        yield Finding(check="platforms", state="note", found=text, cure="pip install 'maxdiffusion[tpu]'")
    if "libtpu" in scene.packages:
        holder = _holder(Path(tempfile.gettempdir()) / "libtpu_lockfile")
        if holder:
            text = f"{holder}: only one process can use the TPU"
            cure = "end that process; where none runs any more, delete the file"
            yield Finding(check="platforms", state="note", found=text, cure=cure)
    library = scene.environ.get("LD_LIBRARY_PATH", "")
    if cuda and re.search(r"cuda|cudnn", library, re.IGNORECASE):
        text = f"LD_LIBRARY_PATH={library} puts other CUDA libraries before those that jax brings"
        yield Finding(check="platforms", state="note", found=text, cure="unset LD_LIBRARY_PATH")


def _flags(scene: Scene) -> Iterator[Finding]:
    """XLA_FLAGS: overridden or not flags at all; whether XLA knows them shows when jax starts."""
    written = scene.environ.get("XLA_FLAGS", "").split()
    for word in written:
        if not word.startswith("--"):
            text = f"XLA_FLAGS holds '{word}', which is no flag: XLA ignores it, or reads it as a file"
            yield Finding(check="flags", state="broken", found=text, cure=f"write --{word.lstrip('-')}")
    names = [word.partition("=")[0] for word in written]
    for name in dict.fromkeys(names):
        values = [word for word in written if word.partition("=")[0] == name]
        if len(set(values)) > 1:
            text = f"XLA_FLAGS has {' and '.join(values)}: the last one wins"
            yield Finding(check="flags", state="note", found=text, cure="keep one")
    forced = _forced(scene.environ)
    number = scene.environ.get("JAX_NUM_CPU_DEVICES")
    if forced is not None and number is not None and number != str(forced):
        text = f"XLA_FLAGS asks for {forced} CPU devices and JAX_NUM_CPU_DEVICES for {number}"
        yield Finding(check="flags", state="broken", found=text, cure="unset one of them")
    devices, threads = forced or int(number or 1), scene.environ.get("NPROC")
    if devices > 1 and int(threads or os.cpu_count() or 1) < THREADS_PER_DEVICE * devices:
        text = (
            f"{devices} CPU devices share {threads or os.cpu_count()} threads, and collectives that wait can hold all"
        )
        cure = f"set NPROC={THREADS_PER_DEVICE * devices}, or use --virtual-devices {devices}, which does"
        yield Finding(check="flags", state="note", found=text, cure=cure)
    if scene.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "on", "yes", "t", "y"):
        text = "JAX_ENABLE_X64 is set: numbers become float64, at twice the memory and more than twice the time"
        yield Finding(check="flags", state="note", found=text, cure="unset JAX_ENABLE_X64")
    collectives = scene.environ.get("JAX_CPU_COLLECTIVES_IMPLEMENTATION")
    if collectives is not None and collectives not in ("gloo", "mpi", "megascale"):
        text = f"JAX_CPU_COLLECTIVES_IMPLEMENTATION={collectives} is unknown"
        cure = nearest(collectives, ("gloo", "mpi"))
        yield Finding(check="flags", state="broken", found=text, cure=cure)
    if collectives == "mpi" and (forced or int(number or 1)) > 1:
        text = "MPI collectives with several CPU devices a process end in a segmentation fault"
        yield Finding(check="flags", state="broken", found=text, cure="set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo")
    if platform.system() == "Darwin" and collectives in (None, "gloo"):
        text = "gloo, which joins CPU processes, does not start on macOS in some versions of jax"
        yield Finding(check="flags", state="note", found=text, cure="train with one process (--virtual-devices N)")


def _devices(scene: Scene) -> Iterator[Finding]:
    """jax starts, has the devices that were asked for, and they can add."""
    status, out, err = scene.probe()
    unknown = re.search(r"Unknown flags? in XLA_FLAGS:\s*(.*)", err)
    if unknown:
        text = f"XLA does not know these flags and ends the program: {unknown[1]}"
        yield Finding(check="devices", state="broken", found=text, cure="correct the spelling, or take them out")
        return
    if status != 0:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit status {status}")
        cure = "JAX_PLATFORMS=cpu shows whether the accelerator is the cause"
        yield Finding(check="devices", state="broken", found=f"jax does not start: {last[:300]}", cure=cure)
        return
    seen: dict[str, Any] = json.loads(out)
    memory = "" if seen["memory"] is None else f", {seen['memory'] / 2**30:.1f} GiB each"
    text = f"{seen['count']} x {seen['kind']} ({seen['platform']}){memory}, ready after {seen['start']:.1f} s"
    yield Finding(check="devices", state="ok", found=text)
    asked = _forced(scene.environ) or int(scene.environ.get("JAX_NUM_CPU_DEVICES") or 0)
    if asked and seen["platform"] == "cpu" and seen["count"] != asked:
        text = f"{asked} CPU devices were asked for and {seen['count']} are here: something starts jax before"
        yield Finding(check="devices", state="broken", found=text, cure="look for jax in sitecustomize or .pth files")
    if asked and seen["platform"] != "cpu":
        text = f"{asked} CPU devices were asked for, but jax runs on {seen['platform']}"
        yield Finding(check="devices", state="note", found=text, cure="set JAX_PLATFORMS=cpu for virtual devices")
    if seen["total"] == seen["count"]:
        text = f"a sum over {seen['count']} devices: {seen['sum'] * 1e3:.1f} ms, {seen['compile']:.1f} s to compile"
        yield Finding(check="collective", state="ok", found=text)
    else:
        text = f"a sum of {seen['count']} ones over the devices gave {seen['total']:g}"
        yield Finding(
            check="collective", state="broken", found=text, cure="do not trust this machine; update its drivers"
        )


def _hosts(scene: Scene) -> Iterator[Finding]:
    from maxdiffusion.parallel.multihost import find_hosts

    try:
        hosts = find_hosts(scene.environ)
    except UsageError as error:
        yield Finding(check="hosts", state="broken", found=str(error))
        return
    text = "one" if hosts is None else f"{hosts.num_hosts or 'several'}, found by {hosts.launcher}"
    yield Finding(check="hosts", state="ok", found=text)
    proxies = [name for name in scene.environ if "_proxy" in name.lower() and name.lower() != "no_proxy"]
    if hosts is not None and proxies:
        text = f"{', '.join(proxies)} may lead the hosts' connections astray"
        yield Finding(check="hosts", state="note", found=text, cure=f"unset {' '.join(proxies)}, if they cannot join")


def _memory(scene: Scene) -> Iterator[Finding]:
    told = scene.meminfo.read_text() if scene.meminfo.exists() else ""
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", told, re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        size = _all_memory()
        text = (
            f"{size / 2**30:.1f} GiB; how much is free is not known" if size else "this system does not tell its size"
        )
        yield Finding(check="memory", state="ok" if size else "note", found=text)
        return
    total, free = (int(rows[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < 2**30:
        yield Finding(check="memory", state="note", found=text, cure="end other programs: compiling alone needs a GiB")
    else:
        yield Finding(check="memory", state="ok", found=text)


def _all_memory() -> int | None:
    """Bytes of this machine, where the system says so in POSIX's way."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _disk(scene: Scene) -> Iterator[Finding]:
    yield _run_folder(scene.run)
    home = Path(scene.environ.get("HOME", "/"))
    trouble = _unwritable(home)
    if trouble:
        text = f"the home folder {home} cannot be written: {trouble}; libraries keep caches there"
        yield Finding(check="disk", state="note", found=text, cure="set HOME to a folder of your own")


def _run_folder(run: Path) -> Finding:
    """Whether a run could write there, in a local folder or in an object store."""
    other = "write run=FOLDER with another"
    try:
        place = as_path(run)
    except UsageError as error:
        return Finding(check="disk", state="broken", found=str(error))
    if is_remote(place):
        trouble = _unwritable_remote(place)
        if trouble:
            text = f"{place} cannot be written: {trouble}"
            return Finding(check="disk", state="broken", found=text, cure=f"look at the bucket's rights, or {other}")
        return Finding(check="disk", state="ok", found=f"{place}: a file was written, read and deleted")
    there = place.absolute()
    while not there.exists():
        there = there.parent
    trouble = _unwritable(there)
    if trouble:
        return Finding(check="disk", state="broken", found=f"{run} cannot be written: {trouble}", cure=other)
    free = shutil.disk_usage(there).free
    text = f"{run}: {free / 2**30:.1f} GiB free"
    if free < LITTLE_DISK:
        return Finding(check="disk", state="broken", found=text, cure="make room, or write run=FOLDER on another disk")
    return Finding(check="disk", state="ok", found=text)


def _cache(scene: Scene) -> Iterator[Finding]:
    folder = scene.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        text = "no compilation cache: every start compiles everything anew"
        yield Finding(check="cache", state="note", found=text, cure="set JAX_COMPILATION_CACHE_DIR=FOLDER")
        return
    if "://" in folder:
        yield Finding(check="cache", state="ok", found=folder)
        return
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    trouble = _unwritable(there)
    if trouble:
        text = f"the compilation cache {folder} cannot be written: {trouble}"
        yield Finding(check="cache", state="broken", found=text, cure="set JAX_COMPILATION_CACHE_DIR to another folder")
    else:
        yield Finding(check="cache", state="ok", found=folder)


_CHECKS: Mapping[str, Callable[[Scene], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "jax": _jax,
    "platforms": _platforms,
    "flags": _flags,
    "devices": _devices,
    "hosts": _hosts,
    "memory": _memory,
    "disk": _disk,
    "cache": _cache,
}


def _start_jax() -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"it has not started after {PATIENCE:.0f} s: another process may hold the accelerator"
    return done.returncode, done.stdout, done.stderr


def _forced(environ: Mapping[str, str]) -> int | None:
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else None


def _holder(lock: Path) -> str | None:
    """Who holds libtpu's lock file."""
    if not lock.exists():
        return None
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(Path(os.readlink(link)) == lock for link in (entry / "fd").iterdir()):
                return f"process {entry.name} holds {lock}"
        except OSError:  # another user's, or it has ended
            continue
    return f"{lock} is there"


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be written, or None."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _unwritable_remote(folder: Path) -> str | None:
    """Why a folder of an object store cannot be written, or None; what is written is deleted again."""
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        probe.write_text("doctor", encoding="utf-8")
        wrong = None if probe.read_text(encoding="utf-8") == "doctor" else "what is read is not what was written"
        probe.unlink()
    except Exception as error:  # noqa: BLE001  each store's package has errors of its own
        return f"{type(error).__name__}: {_line(error)}"
    return wrong


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:4])


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
