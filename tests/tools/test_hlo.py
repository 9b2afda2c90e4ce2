"""A program's text is walked as it runs: called computations inside, loops by their trips, operands by their shapes."""

from __future__ import annotations

from maxdiffusion.tools.hlo import arrays_of, instructions

TEXT = """HloModule test

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner (p: f32[4,8]) -> f32[4,8] {
  ROOT %sine = f32[4,8]{1,0} sine(%p)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %again = (s32[], f32[4,8]{1,0}) while(%p), condition=%never, body=%deep, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %f = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%inner
}

%deep (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  ROOT %cosine = f32[4,8]{1,0} cosine(%p)
}

%never (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %l = pred[] constant(true)
}

ENTRY %main (x: f32[4,8]) -> f32[4] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = (s32[], f32[4,8]{1,0}) while(%t), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %u = (s32[], f32[4,8]{1,0}) while(%t), condition=%never, body=%deep
  %c = f32[4,8]{1,0} conditional(%x, %x), branch_computations={%inner, %deep}
  ROOT %r = f32[4]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add
}
"""


def test_called_computations_run_as_often_as_they_are_called() -> None:
    found = list(instructions(TEXT))
    sines = [(one.computation, one.count, one.in_loop_of_unknown_length) for one in found if one.operation == "sine"]
    assert sines == [("inner", 3, False), ("inner", 1, False)]  # in the loop, and in a branch as if it were taken
    cosines = [(one.count, one.in_loop_of_unknown_length) for one in found if one.operation == "cosine"]
    assert cosines == [(3 * 5, False), (1, True), (1, False)]  # a loop in a loop, one of unknown length, a branch


def test_a_computation_goes_on_behind_an_attribute_of_several_lines() -> None:
    """A Pallas kernel's metadata is written so for TPUs; its last line begins with a brace."""
    kernel = """  %k = f32[4,8]{1,0} custom-call(%x), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}, backend_config={"known_trip_count":{"n":"7"}}
"""
    text = TEXT.replace("  %w = (s32[]", kernel + "  %w = (s32[]")
    found = [(one.computation, one.name, one.count) for one in instructions(text)]
    assert ("main", "k", 1) in found
    assert [one for one in found if one[1] != "k"] == [
        (one.computation, one.name, one.count) for one in instructions(TEXT)
    ]


def test_tuples_of_tuples_are_shapes() -> None:
    """As TPUs write what an asynchronous call takes, makes and keeps."""
    started = "((f32[4,8]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}), (f32[4]{0:T(256)}), u32[]{:T(128)S(2)})"
    text = TEXT.replace("  %u = (s32[]", f"  %a = {started} all-gather-start(%x), dimensions={{0}}\n  %u = (s32[]")
    (found,) = (one for one in instructions(text) if one.operation == "all-gather-start")
    assert found.shape == started and found.operands() == ["f32[4,8]{1,0}"]


def test_what_reductions_apply_to_single_numbers_is_left_out() -> None:
    assert not [one for one in instructions(TEXT) if one.operation == "add"]


def test_operands_have_shapes() -> None:
    (reduced,) = (one for one in instructions(TEXT) if one.operation == "reduce")
    assert (reduced.name, reduced.shape, reduced.operand(0)) == ("r", "f32[4]{0}", "f32[4,8]{1,0}")
    (chosen,) = (one for one in instructions(TEXT) if one.operation == "conditional")
    assert chosen.operands() == ["f32[4,8]{1,0}"] * 2  # and none of its branches


def test_arrays_of_a_shape() -> None:
    assert arrays_of("(f32[4,8]{1,0:T(8,128)}, s32[], /*index=2*/bf16[3]{0})") == [
        ("f32", (4, 8)),
        ("s32", ()),
        ("bf16", (3,)),
    ]
