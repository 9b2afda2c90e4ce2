"""Prompts against the words that a model knows: every unknown word is named, with known words spelt like it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning


def unknown_words(tokenizer: WordTokenizer, prompts: Iterable[str]) -> list[str]:
    """The words of the prompts that were in no caption, each once; to the model they are all the same.

    Warns:
        MaxDiffusionWarning: for each of them, and for a prompt that is not empty but has no word at all.
    """
    found: dict[str, tuple[str, ...]] = {}
    for prompt in prompts:
        found.update(tokenizer.unknown_words(prompt))
        if prompt.strip() and not tokenizer.split(prompt):
            text = f"'{prompt}' has no word that the model could read, so it counts as the empty prompt: write words"
            warnings.warn(text, MaxDiffusionWarning, stacklevel=2)
    for word, near in found.items():
        hint = f": did you mean {' or '.join(repr(option) for option in near)}?" if near else ""
        text = f"'{word}' was in no caption that the model learnt from, so it does not know the word{hint}"
        warnings.warn(text, MaxDiffusionWarning, stacklevel=2)
    return list(found)
