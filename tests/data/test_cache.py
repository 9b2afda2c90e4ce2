"""An entry is made once, read afterwards, and never taken for another content or another encoder."""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxdiffusion.data.cache import Arrays, EncodedCache, content_key, encoder_key
from maxdiffusion.errors import UsageError

TEXTS = ["a red apple", "a fox", "a lemon"]
KEYS = [content_key(text) for text in TEXTS]


class Encoder:
    """Counts what it is asked for."""

    def __init__(self, scale: float = 1.0) -> None:
        self.weights = {"layer": {"kernel": np.full((2, 3), scale, np.float32)}, "bias": np.zeros(3, np.float32)}
        self.asked: list[str] = []

    @property
    def key(self) -> str:
        return encoder_key(self.weights, {"name": "lengths", "dtype": "float32"})

    def __call__(self, texts: list[str]) -> list[Arrays]:
        self.asked += texts
        kernel = self.weights["layer"]["kernel"]
        return [{"states": len(text) * kernel, "mask": np.array([True, text != ""])} for text in texts]


def encoded(root: Path, encoder: Encoder, texts: list[str] = TEXTS, **arguments) -> list[Arrays]:
    cache = EncodedCache(root, name="lengths", key=encoder.key, **arguments)
    keys = [content_key(text) for text in texts]
    return cache(keys, lambda rows: encoder([texts[row] for row in rows]))


def same(one: list[Arrays], other: list[Arrays]) -> bool:
    return all(
        mine.keys() == its.keys()
        and all(mine[name].dtype == its[name].dtype and np.array_equal(mine[name], its[name]) for name in mine)
        for mine, its in zip(one, other, strict=True)
    )


def test_made_once_and_read_by_others(tmp_path: Path) -> None:
    first, second = Encoder(), Encoder()
    before = encoded(tmp_path, first)
    after = encoded(tmp_path, second, [*TEXTS[::-1], "", TEXTS[0]])
    assert first.asked == TEXTS and second.asked == [""]
    assert same(after[:3], before[::-1]) and same(after[4:], before[:1])
    assert not list(tmp_path.rglob("*.tmp"))


def test_rows_of_one_content_are_asked_for_once(tmp_path: Path) -> None:
    encoder = Encoder()
    found = encoded(tmp_path, encoder, ["a", "b", "a"])
    assert encoder.asked == ["a", "b"] and same(found[2:], found[:1])


def test_another_encoder_or_content_is_another_key(tmp_path: Path) -> None:
    encoded(tmp_path, Encoder())
    other = Encoder(scale=1.0000001)
    (found, *_) = encoded(tmp_path, other)
    assert other.asked == TEXTS and found["states"][0, 0] == np.float32(1.0000001) * 11
    keys = {
        encoder_key({"a": {"b": np.zeros(2)}}, {}),
        encoder_key({"a": {"c": np.zeros(2)}}, {}),
        encoder_key({"a": {"b": np.zeros(2, np.float32)}}, {}),
        encoder_key({"a": {"b": np.zeros((2, 1))}}, {}),
        encoder_key({"a": {"b": np.zeros(2)}}, {"crop": 1}),
    }
    assert len(keys) == 5
    one, two = np.zeros(1), np.ones(1)
    assert encoder_key({"a": one, "b": two}, {"c": 1, "d": 2}) == encoder_key({"b": two, "a": one}, {"d": 2, "c": 1})
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), (np.frombuffer(b"abc", np.uint8),), ("abc", "")]
    assert len({content_key(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_entry_is_made_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = encoded(tmp_path, Encoder())
    path = next(tmp_path.rglob(f"{KEYS[1]}.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"empty": b"", "cut": content[:-2], "flipped": bytes(content)}[damage])
    encoder = Encoder()
    with caplog.at_level(logging.WARNING):
        assert same(encoded(tmp_path, encoder), before)
    assert encoder.asked == [TEXTS[1]] and "is damaged, so it is made anew" in caplog.text
    assert same(encoded(tmp_path, Encoder()), before)


def test_dtypes_and_shapes_come_back(tmp_path: Path) -> None:
    arrays = {
        "bfloat16": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
        "half": np.arange(3, dtype=np.float16),
        "scalar": np.array(3, np.int32),
        "none": np.zeros((0, 4), np.float32),
    }
    cache = EncodedCache(tmp_path, name="x", key="0")
    cache(["ab"], lambda rows: [arrays])
    (found,) = cache(["ab"], lambda rows: pytest.fail("it is there"))
    assert same([found], [arrays])
    assert (cache.read, cache.made) == (1, 1) and "1 read, 1 made" in str(cache)


def test_over_the_limit_nothing_is_written_and_all_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [f"text {number}" for number in range(20)]
    with caplog.at_level(logging.WARNING):
        found = encoded(tmp_path, Encoder(), texts, limit_bytes=1000)
    assert same(found, Encoder()(texts))
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0 < taken <= 1000
    assert caplog.text.count("is full") == 1 and "raise the limit" in caplog.text
    again = Encoder()
    assert same(encoded(tmp_path, again, texts, limit_bytes=1000), found)
    assert 0 < len(again.asked) < 20


def _host(root: Path, host: int) -> int:
    encoder = Encoder()
    for _ in range(3):
        for start in range(0, 40, 4):
            texts = [f"text {(start + row + host * 7) % 40}" for row in range(4)]
            assert same(encoded(root, encoder, texts), Encoder()(texts))
    return len(encoder.asked)


def test_hosts_and_threads_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda host: _host(tmp_path, host), range(8)))
    assert sum(asked) >= 40 and all(number <= 40 for number in asked)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 40 and not list(tmp_path.rglob("*.tmp"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_host, (tmp_path, 3)) == 0, "another process finds all of it"


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be JSON"):
        encoder_key({}, {"dtype": np.float32})
    with pytest.raises(UsageError, match="gave 1 results for 3 rows"):
        EncodedCache(tmp_path, name="x", key="0")(KEYS, lambda rows: [{}])
