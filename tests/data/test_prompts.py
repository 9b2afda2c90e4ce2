"""Unknown words of prompts are named."""

from __future__ import annotations

import pytest

from maxdiffusion.data.prompts import unknown_words
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning


def test_each_unknown_word_is_warned_of_once_with_the_nearest() -> None:
    tokenizer = WordTokenizer.train(["a red apple, flat style", "a green frog"])
    with pytest.warns(MaxDiffusionWarning) as warned:
        assert unknown_words(tokenizer, ["a red aple", "an aple"]) == ["aple", "an"]
    texts = [str(warning.message) for warning in warned]
    assert len(texts) == 2
    assert "'aple' was in no caption" in texts[0] and "did you mean 'apple'" in texts[0]


def test_known_words_are_not_warned_of() -> None:
    tokenizer = WordTokenizer.train(["a red apple, flat style"])
    assert unknown_words(tokenizer, ["a red apple", ""]) == []


def test_a_prompt_without_a_word_is_warned_of() -> None:
    tokenizer = WordTokenizer.train(["a red apple, flat style"])
    with pytest.warns(MaxDiffusionWarning, match="has no word that the model could read"):
        assert unknown_words(tokenizer, ["\U0001f600"]) == []


def test_the_styles_that_a_model_knows_are_named_beside_an_unknown_word() -> None:
    tokenizer = WordTokenizer.train(["a red apple, flat style"])
    with pytest.warns(MaxDiffusionWarning, match="'cubist' .*; its styles are flat, noto, as in 'a fox, flat style'"):
        unknown_words(tokenizer, ["a red apple, cubist style"], ("flat", "noto"))
