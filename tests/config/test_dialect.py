"""YAML scalars are what a user means, and what is written is read back the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maxdiffusion.config import dialect
from maxdiffusion.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("010", 10),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'1e-4'", "1e-4"),
        ("[a, 1, null, [b]]", ("a", 1, None, ("b",))),
        (".inf", math.inf),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
    ],
)
def test_a_scalar_is_what_it_looks_like(text: str, value: object) -> None:
    found = dialect.parse(text, "here")
    assert found == value
    assert type(found) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(dialect.parse(".nan", "here"))


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True), _SCALARS | st.lists(_SCALARS, max_size=3), max_size=4
    )
)
@example({"a": "\x85", "b": "x\u2028", "c": " a", "d": "1e4", "e": "yes", "f": "\n", "g": "\ufeff", "h": ""})
def test_what_is_written_is_read_back(values: dict) -> None:
    mapping = dialect.parse(dialect.dump(values), "here")
    expected = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    assert mapping.plain() == expected


def test_a_key_given_twice_is_an_error_with_both_lines() -> None:
    with pytest.raises(UsageError, match=r"file:4: 'steps' is given twice \(first on line 2\)"):
        dialect.parse("train:\n  steps: 1\n  batch_size: 2\n  steps: 3\n", "file")


@pytest.mark.parametrize("text", ["[1", "a: b: c", "a: 1\n---\nb: 2", "a: &x [*y]", "\x00", "a:\n\t- 1"])
def test_what_is_not_yaml_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="not valid YAML") as error:
        dialect.parse(text, "file")
    assert len(str(error.value).splitlines()) == 1


def test_a_mapping_keeps_lines() -> None:
    mapping = dialect.parse("a: 1\n\nb:\n  c: 2\n", "file")
    assert [(key, line) for key, line, _ in mapping.entries] == [("a", 1), ("b", 3)]
    assert mapping.plain() == {"a": 1, "b": {"c": 2}}
