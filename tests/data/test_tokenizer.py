"""Words to ids: what counts as a word, fixed length, unknown words by name, the same after saving."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.data.pictures import pictures
from maxdiffusion.data.tokenizer import BEGIN_ID, PAD_ID, UNKNOWN_ID, WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning, UsageError

CAPTIONS = ["a red apple, flat style", "a fox, noto style", "a man's shoe, flat style", "a keycap #, flat style"]


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer.train(CAPTIONS, max_length=8)


def test_ids_and_mask(tokenizer: WordTokenizer):
    ids, mask = tokenizer.encode(["a red apple, flat style", "fox"])
    assert ids.shape == mask.shape == (2, 8)
    assert ids.dtype == np.int32 and mask.dtype == np.bool_
    words = ("<pad>", "<unk>", "<begin>", *tokenizer.words)
    assert [words[i] for i in ids[0]] == ["<begin>", "a", "red", "apple", "flat", "style", "<pad>", "<pad>"]
    assert mask.sum(axis=1).tolist() == [6, 2]
    assert (ids[~mask] == PAD_ID).all() and (ids[mask] != PAD_ID).all()
    assert tokenizer.vocab_size == len(words) and ids.max() < tokenizer.vocab_size


def test_the_empty_text_is_the_begin_token_alone(tokenizer: WordTokenizer):
    ids, mask = tokenizer.encode(["", " , "])
    assert ids[:, 0].tolist() == [BEGIN_ID, BEGIN_ID]
    assert mask.sum(axis=1).tolist() == [1, 1]


@pytest.mark.parametrize(
    "text",
    ["A Red APPLE flat style.", "a réd apple -- flat  style", '"a red apple" (flat style)', "a red-apple;flat/style"],
)
def test_case_accents_and_punctuation_do_not_matter(tokenizer: WordTokenizer, text: str):
    expected, _ = tokenizer.encode([CAPTIONS[0]])
    found, _ = tokenizer.encode([text])
    assert np.array_equal(found, expected)


def test_what_carries_meaning_stays(tokenizer: WordTokenizer):
    assert tokenizer.split("a man’s 'old' keycap #") == ("a", "man's", "old", "keycap", "#")
    assert tokenizer.split("ON! x-ray 日本 3") == ("on", "!", "x", "ray", "日本", "3")


def test_too_long_a_text_is_an_error_never_cut(tokenizer: WordTokenizer):
    seven = "a red apple flat style red apple"
    assert tokenizer.encode([seven])[1].all()
    with pytest.raises(UsageError, match="has 8 words and 7 fit"):
        tokenizer.encode(["fox", f"{seven} fox"])
    with pytest.raises(UsageError, match="has 5 words and 3 fit"):
        WordTokenizer.train(CAPTIONS, max_length=4)


def test_one_text_in_place_of_a_list_is_an_error(tokenizer: WordTokenizer):
    with pytest.raises(UsageError, match=r"encode\(\[text\]\)"):
        tokenizer.encode("fox")


def test_unknown_words_are_named_with_their_nearest(tokenizer: WordTokenizer):
    assert tokenizer.unknown_words("a red apple, flat style") == {}
    unknown = tokenizer.unknown_words("a rad aple, noto styles, zzzz")
    assert list(unknown) == ["rad", "aple", "styles", "zzzz"]
    assert unknown["aple"][0] == "apple" and unknown["styles"][0] == "style" and unknown["zzzz"] == ()
    assert tokenizer.encode(["zzzz"])[0][0, :2].tolist() == [BEGIN_ID, UNKNOWN_ID]


def test_names_of_special_tokens_in_a_text_are_mere_words(tokenizer: WordTokenizer):
    ids, mask = tokenizer.encode(["fox <pad> <begin>"])
    assert ids[0, 2:4].tolist() == [UNKNOWN_ID, UNKNOWN_ID]
    assert mask[0].sum() == 4
    assert list(tokenizer.unknown_words("<pad> fox")) == ["pad"]


def test_words_do_not_depend_on_the_order_of_the_captions(tokenizer: WordTokenizer):
    assert WordTokenizer.train(reversed(CAPTIONS), max_length=8).words == tokenizer.words
    assert tokenizer.words[:2] == ("a", "style"), "the most frequent first, then by spelling"


def test_max_words_keeps_the_most_frequent():
    with pytest.warns(MaxDiffusionWarning) as said:
        small = WordTokenizer.train(CAPTIONS, max_length=8, max_words=3)
    number = len(WordTokenizer.train(CAPTIONS, max_length=8).words)
    (line,) = [str(one.message) for one in said]
    assert line.startswith(f"the captions have {number} different words and the 3 most frequent are learnt")
    assert f"the other {number - 3} are all the same ('" in line and line.endswith(", ...)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(WordTokenizer.train(CAPTIONS, max_length=8, max_words=number).words) == number
    assert small.words == ("a", "style", "flat")


def test_saved_and_loaded_it_is_the_same(tokenizer: WordTokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    json.loads((tmp_path / "tokenizer.json").read_text())
    loaded = WordTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.words == tokenizer.words and loaded.max_length == 8
    texts = [*CAPTIONS, "", "Zzzz’s #!", "<pad>"]
    for one, other in zip(loaded.encode(texts), tokenizer.encode(texts), strict=True):
        assert np.array_equal(one, other)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("content", ["not json", "[]", '{"format": 99, "tokenizer": {}}'])
def test_loading_something_else_is_an_error(content: str, tmp_path: Path):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UsageError, match=r"other\.json"):
        WordTokenizer.load(tmp_path / "other.json")


def test_captions_without_words_are_an_error():
    with pytest.raises(UsageError, match="no words"):
        WordTokenizer.train(["", "..."])


def test_every_caption_of_the_picture_set_is_told_from_every_other():
    captions = pictures(size=4).captions
    ids, mask = WordTokenizer.train(captions).encode(captions)
    assert len(np.unique(ids, axis=0)) == len(captions)
    assert not (ids == UNKNOWN_ID).any() and mask.any(axis=1).all()
