"""Model FLOPs are those of a formula and of the compiled program, on any mesh; peaks are found by the device's kind."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxdiffusion.kernels.flops import flops_of_gradients
from maxdiffusion.models.registry import lookup
from maxdiffusion.tools.flops import flops
from maxdiffusion.train.meter import Meter, make_meter, peak_tflops, step_flops
from tests.train.conftest import BATCH, make_subject

DEPTH, SINGLES = 3, 4
BATCH_OF_FLUX, SIDE, TEXT = 2, 8, 12


def _flux_formula(model, inputs) -> int:
    """FLOPs of a step of FLUX.1 by its products alone: (rows, in, out) of each, three passes but for the data's."""
    width = model.num_attention_heads * model.attention_head_dim
    image, text = inputs["hidden_states"].shape[1], inputs["encoder_hidden_states"].shape[1]
    both, ratio = image + text, 4
    batch = inputs["hidden_states"].shape[0]
    # Per sample: query, key, value, output; feed forward; modulations of both streams.
    double = sum(4 * rows * width**2 + 2 * rows * width * ratio * width + 6 * width**2 for rows in (image, text))
    single = both * width * (3 + ratio) * width + both * (1 + ratio) * width * width + 3 * width**2
    attention = 2 * both**2 * width
    learnt = DEPTH * (double + attention) + SINGLES * (single + attention)
    channels = inputs["hidden_states"].shape[2]
    last = 2 * width**2 + image * width * channels
    pooled, frequencies = inputs["pooled_projections"].shape[1], 256
    vectors = 2 + bool(model.guidance_embeds)
    # The first products read data, whose gradient nobody takes.
    first = image * channels * width + text * inputs["encoder_hidden_states"].shape[2] * width
    first += (vectors - 1) * frequencies * width + pooled * width
    second = vectors * width**2
    return 2 * batch * (3 * (learnt + last + second) + 2 * first)


def test_scanned_flux_has_the_flops_of_the_formula() -> None:
    model = lookup("flux-dev").build("tiny", num_layers=DEPTH, num_single_layers=SINGLES, scan_layers=True)
    inputs = model.call_shapes(BATCH_OF_FLUX, height=SIDE, width=SIDE, text=TEXT)
    params, _ = model.abstract_params()
    counted = flops_of_gradients(
        lambda params, inputs: model.apply({"params": params}, **inputs).sample, params, inputs
    )
    # The bound of the requirement; all that is left out are norms, activations and rotary angles.
    np.testing.assert_allclose(counted, _flux_formula(model, inputs), rtol=0.02)


def test_a_step_has_the_flops_of_its_compiled_program_on_every_mesh(one_device: Mesh, data_model: Mesh) -> None:
    subject = make_subject(one_device)
    examples = subject.feed.shapes(BATCH, (8, 8, 3))
    counted = step_flops(subject.objective, subject.shapes, examples)

    def loss(params, examples, key, step):
        return jnp.mean(subject.objective.losses(params, examples, key, step))

    shapes = subject.shapes
    compiled = jax.jit(jax.value_and_grad(loss)).lower(shapes.params, examples, shapes.key, shapes.step).compile()
    found = flops(compiled.as_text() or "")
    assert found.in_loops_of_unknown_length == 0 and not found.custom_calls
    # The compiler turns small products into sums and the like.
    np.testing.assert_allclose(found.total, counted, rtol=0.02)
    # What a mesh pads, gathers or computes again is no work of the model.
    other = make_subject(data_model, remat_policy="full", attention_kernel="flash", flash_min_seq_length=1)
    assert step_flops(other.objective, other.shapes, other.feed.shapes(BATCH, (8, 8, 3))) == counted


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("TPU v5 lite", 197.0),
        ("TPU v5", 459.0),
        ("TPU v6 lite", 918.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, wanted: float | None) -> None:
    assert peak_tflops(kind) == wanted


def test_a_line_says_what_the_steps_since_the_last_one_did() -> None:
    meter = Meter(flops={(8, 8, 3): 10**12, (8, 16, 3): 3 * 10**12}, peak=40.0, step_memory=1000)
    for shape in ((8, 8, 3), (8, 16, 3)):
        meter.step(shape)
    line = meter.line(0.5)
    assert (line["tflops_per_second"], line["mfu"]) == (8.0, 0.2)
    # The devices of a CPU do not say what they use.
    assert line["step_memory"] == 1000 and "device_memory" not in line
    assert 10**7 < line["host_memory"] < 10**12
    assert meter.line(0.5)["tflops_per_second"] == 0.0
    meter.peak = None
    assert math.isnan(meter.line(1.0)["mfu"])


def test_a_device_that_says_what_it_uses_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, peak: int) -> None:
            self._peak = peak

        def memory_stats(self) -> dict[str, int]:
            return {"peak_bytes_in_use": self._peak, "bytes_in_use": 1}

    monkeypatch.setattr("jax.local_devices", lambda: [Device(5), Device(7)])
    memory = Meter(flops={}, peak=None, step_memory=1000).memory()
    assert memory["device_memory"] == 7 and "step_memory" not in memory


def test_the_peak_is_that_of_all_devices_and_can_be_given(data_model: Mesh) -> None:
    subject = make_subject(data_model)
    examples = [subject.feed.shapes(BATCH, (8, 8, 3))]
    assert make_meter(subject.objective, subject.shapes, examples, [], peak=2.0).peak == 16.0
    assert make_meter(subject.objective, subject.shapes, examples, [], peak=None).peak is None
