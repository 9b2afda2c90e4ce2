"""Meshes: sizes, what is left, slices, and errors that show the equation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from maxdiffusion.errors import MeshError
from maxdiffusion.parallel.mesh import abstract_mesh, auto, build_mesh, describe, written
from maxdiffusion.specs import MESH_AXES, MeshSpec


def test_all_six_axes_in_order(devices):
    mesh = build_mesh(MeshSpec(data=4, tensor=2), devices)
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"stage": 1, "data": 4, "fsdp": 1, "cfg": 1, "context": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_one_axis_takes_what_is_left(devices):
    assert build_mesh(MeshSpec(fsdp=-1, tensor=2, data=1), devices).shape["fsdp"] == 4
    assert build_mesh(MeshSpec(tensor=2), devices).shape["data"] == 4
    assert build_mesh(None, devices).shape["data"] == 8


def test_own_axis_names(devices):
    mesh = build_mesh(MeshSpec(axes=("data", "model"), model=2), devices)
    assert dict(mesh.shape) == {"data": 4, "model": 2}


def test_a_wrong_product_shows_the_equation_and_legal_shapes(devices):
    with pytest.raises(MeshError) as error:
        build_mesh(MeshSpec(data=3, tensor=2), devices)
    assert "data 3 x tensor 2 = 6 devices, but there are 8" in str(error.value)
    assert "data=4,tensor=2" in str(error.value)


@given(data=st.integers(1, 12), tensor=st.integers(1, 12), total=st.sampled_from([1, 2, 6, 8, 12, 64]))
def test_suggested_shapes_are_legal(data, tensor, total):
    try:
        assert np.prod(list(MeshSpec(data=data, tensor=tensor).shape(total).values())) == total
    except MeshError as error:
        text = str(error).split("nearest to it: ")[1]
        for shape in text.split("; "):
            assert np.prod(list(MeshSpec.parse(shape).shape(total).values())) == total


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dta=4", "did you mean 'data'"),
        ("data=0", "1 or more, or -1"),
        ("data=-1,tensor=-1", "only one axis can take what is left"),
        ("data:4", "is not AXIS=SIZE"),
        ("fsdp=--8", "is not AXIS=SIZE"),
        ("fsdp=\u00b2", "is not AXIS=SIZE"),
        ("axes=2", "mesh axis 'axes' is unknown"),
        ("data=4,data=2", "given twice"),
        ("dcn.data=-1", "whole number of slices"),
        ("dcn.dta=2", "did you mean 'data'"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec.parse(text)


def test_text_round_trip():
    spec = MeshSpec.parse("data=2,tensor=2,dcn.data=2")
    assert MeshSpec.parse(str(spec)) == spec
    assert spec.shape(8)["data"] == 4


def test_slices_lie_outermost_on_their_axis(devices):
    mesh = build_mesh(MeshSpec(data=2, tensor=2, dcn={"data": 2}), devices)
    assert mesh.shape["data"] == 4
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    # data rows 0 and 1 are the first slice (devices 0-3), rows 2 and 3 the second
    assert set(ids[:2].ravel()) == {0, 1, 2, 3}
    assert set(ids[2:].ravel()) == {4, 5, 6, 7}


def test_abstract_mesh_needs_no_devices():
    assert abstract_mesh(MeshSpec(fsdp=512)).size == 512
    with pytest.raises(MeshError):
        abstract_mesh(MeshSpec(fsdp=3, data=1), 8)


def test_auto_and_describe(devices):
    import jax

    explicit = jax.make_mesh((4, 2), ("data", "model"))
    assert set(auto(explicit).axis_types) == {AxisType.Auto}
    assert describe(explicit) == "data=4,model=2 (8 devices)"


def test_a_written_mesh_is_read_again(devices):
    for axes, sizes in ((("data", "tensor"), "data=4,tensor=2"), (("b", "a"), "b=1"), (("model", "data"), "data=1")):
        mesh = abstract_mesh(MeshSpec.parse(sizes, axes=axes))
        assert written(mesh) == sizes
    assert describe(mesh) == "one device"
