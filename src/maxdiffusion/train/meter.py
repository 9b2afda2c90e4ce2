"""How well a run uses its devices: model FLOPs over time and peak (MFU), and the memory that it takes."""

from __future__ import annotations

import dataclasses
import logging
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from maxdiffusion.kernels.flops import flops_of_gradients
from maxdiffusion.log import say_once
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, Objective

log = logging.getLogger(__name__)

PEAKS: Mapping[str, float] = {
    # Google Cloud's pages of each TPU version, "peak compute per chip (bf16)"; v2 and v3 have two devices a chip.
    "TPU v2": 22.5,
    "TPU v3": 61.5,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    # NVIDIA's data sheets, BF16 tensor cores, dense.
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}
"""Peak TFLOP/s of a device in bfloat16, by the beginning of its kind; the longest that fits counts."""


def peak_tflops(kind: str) -> float | None:
    """Peak TFLOP/s of a kind of device in bfloat16, as jax calls it; None for one that is not known."""
    fits = [name for name in PEAKS if f"{kind} ".startswith(f"{name} ") or kind.startswith(f"{name}-")]
    return PEAKS[max(fits, key=len)] if fits else None


def step_flops(objective: Objective, shapes: TrainState, examples: Examples) -> int:
    """FLOPs of products and convolutions in the model's forward and backward pass of a batch, over all devices.

    Counted on the model alone: what mesh, kernel and rematerialisation add is no work of the model.

    Args:
        objective: of the training.
        shapes: of the state.
        examples: of a batch, as `jax.ShapeDtypeStruct`s.
    """
    subject = objective.text_to_image
    alone = dataclasses.replace(subject, model=subject.model.alone())
    same = dataclasses.replace(objective, text_to_image=alone)

    def bare(tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype), tree)

    params = bare(shapes.params, jax.numpy.float32)
    return flops_of_gradients(same.losses, params, bare(examples), bare(shapes.key), bare(shapes.step))


@dataclass(kw_only=True)
class Meter:
    """Adds up the work of steps, and says what came of it at each line of metrics.

    Attributes:
        flops: of a step, by the shape of its pictures (height, width, channels), over all devices.
        peak: TFLOP/s of all devices together; None where it is not known.
        step_memory: bytes that the compiled step takes on a device; for devices that do not say what they use.
    """

    flops: Mapping[tuple[int, ...], int]
    peak: float | None
    step_memory: int | None = None
    _done: int = field(default=0, init=False)

    def step(self, image_shape: tuple[int, ...]) -> None:
        """A step on pictures of this shape was handed out."""
        self._done += self.flops[image_shape]

    def line(self, seconds: float) -> dict[str, float]:
        """Figures for a line of metrics, about the steps since the last call.

        Args:
            seconds: that they took.
        """
        rate, self._done = self._done / seconds / 1e12, 0
        found = {"tflops_per_second": rate, "mfu": math.nan if self.peak is None else rate / self.peak}
        return found | self.memory()

    def memory(self) -> dict[str, float]:
        """Bytes: `device_memory` is the peak of the fullest device, `step_memory` what the compiled step needs on one;
        `host_memory` is the peak of this process."""
        stats = [device.memory_stats() for device in jax.local_devices()]
        peaks = [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]
        found: dict[str, float] = {"host_memory": _host_memory()}
        if peaks:
            found["device_memory"] = max(peaks)
        elif self.step_memory is not None:
            found["step_memory"] = self.step_memory
        return found


def make_meter(
    objective: Objective, shapes: TrainState, batches: list[Examples], programs: list[Any], *, peak: float | None
) -> Meter:
    """The meter of a run; says once why there is no MFU.

    Args:
        objective: of the training.
        shapes: of the state.
        batches: one for each size of pictures, as `jax.ShapeDtypeStruct`s.
        programs: the compiled steps.
        peak: TFLOP/s of one device, where the user says so.
    """
    leaf = jax.tree.leaves(shapes.params)[0]
    devices = sorted(leaf.sharding.device_set, key=lambda device: device.id)
    kind = devices[0].device_kind
    each = peak_tflops(kind) if peak is None else peak
    if each is None:
        say_once(
            log,
            f"MFU is not told, because the peak of '{kind}' is not known: give the TFLOP/s of one device with "
            "track.peak_tflops=NUMBER (tflops_per_second is told)",
            logging.INFO,
        )
    return Meter(
        flops={one.images.shape[1:]: step_flops(objective, shapes, one) for one in batches},
        peak=None if each is None else each * len(devices),
        step_memory=_step_memory(programs),
    )


def _step_memory(programs: list[Any]) -> int | None:
    """Bytes that the largest of the compiled steps takes on a device; None where the compiler does not say."""
    found = [program.memory_analysis() for program in programs]
    if not found or any(one is None for one in found):
        return None
    return max(
        one.argument_size_in_bytes + one.output_size_in_bytes + one.temp_size_in_bytes - one.alias_size_in_bytes
        for one in found
    )


def _host_memory() -> int:
    """Peak of the resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
