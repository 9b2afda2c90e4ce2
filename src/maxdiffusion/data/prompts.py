"""Prompts against the words that a model knows: every unknown word is named, with known words spelt like it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import MaxDiffusionWarning


def unknown_words(tokenizer: WordTokenizer, prompts: Iterable[str], styles: Sequence[str] = ()) -> list[str]:
    """The words of the prompts that were in no caption, each once; to the model they are all the same.

    Args:
        tokenizer: of the model.
        prompts: to look through.
        styles: that the model has learnt; they are named beside an unknown word.

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
        if styles:
            hint += f"{'' if near else ';'} its styles are {', '.join(styles)}, as in 'a fox, {styles[0]} style'"
        text = f"'{word}' was in no caption that the model learnt from, so it does not know the word{hint}"
        warnings.warn(text, MaxDiffusionWarning, stacklevel=2)
    return list(found)


def unknown_in_captions(tokenizer: WordTokenizer, captions: Iterable[str], origin: str) -> None:
    """Says how many words of captions a tokenizer that was learnt elsewhere does not know, and some of them.

    Args:
        tokenizer: whose words are known.
        captions: of the training.
        origin: where the words come from, for the message.

    Warns:
        MaxDiffusionWarning: there are any.
    """
    unknown = list(dict.fromkeys(word for caption in captions for word in tokenizer.unknown_words(caption)))
    if unknown:
        some = ", ".join(f"'{word}'" for word in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        text = (
            f"{len(unknown)} words of the captions are not among those of {origin}, and stay all the same to the "
            f"model: {some}"
        )
        warnings.warn(text, MaxDiffusionWarning, stacklevel=2)
