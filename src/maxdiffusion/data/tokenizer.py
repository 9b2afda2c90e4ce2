"""A word-level tokenizer learnt from captions: few words, fixed length, and it tells which words it does not know."""

from __future__ import annotations

import difflib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.paths import as_path, write_whole

PAD, UNKNOWN, BEGIN = "<pad>", "<unk>", "<begin>"
PAD_ID, UNKNOWN_ID, BEGIN_ID = 0, 1, 2
FORMAT = 1
# Kept besides letters and digits: what tells two names apart ("keycap #" and "keycap *", "up! button").
SYMBOLS = "#*!?$%&+"


@dataclass(frozen=True, kw_only=True, eq=False)
class WordTokenizer:
    """Captions to ids: lower case, no accents, no punctuation, one id a word, a begin token first, padding at the end.

    Commas, full stops, quotes, brackets and hyphens only separate words (`a red apple flat style` means the same as
    `a red apple, flat style`); a few symbols that carry meaning (`# * ! ? $ % & +`) are words of their own.

    Attributes:
        model: the tokenizer of the `tokenizers` library, which knows words but neither begin token nor length.
        max_length: ids of every encoded text, begin token and padding included.
    """

    model: Tokenizer
    max_length: int

    @classmethod
    def train(cls, captions: Iterable[str], *, max_length: int = 16, max_words: int = 30_000) -> WordTokenizer:
        """Learn the words of the captions; the order of the captions does not matter.

        Args:
            captions: all texts to be known.
            max_length: ids of an encoded text; one is the begin token.
            max_words: keep this many of the most frequent words.

        Warns:
            MaxDiffusionWarning: there are more words; the rest become one unknown word.

        Raises:
            UsageError: no words at all, or a caption that is longer than `max_length` allows.
        """
        captions = list(captions)
        learner = _with_word_rules(Tokenizer(models.WordLevel(unk_token=UNKNOWN)))
        learner.train_from_iterator(captions, trainers.WordLevelTrainer(vocab_size=max_words, show_progress=False))
        learnt = learner.get_vocab()
        words = [PAD, UNKNOWN, BEGIN, *sorted(learnt, key=learnt.__getitem__)]
        # A fresh model with the three as mere entries: "special tokens" would be recognised in what users write.
        model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
        model = _with_word_rules(model)
        tokenizer = cls(model=model, max_length=max_length)
        if tokenizer.vocab_size == 3:
            raise UsageError("the captions have no words: a tokenizer cannot be learnt from them")
        tokenizer.encode(captions)
        if len(learnt) >= max_words:
            tokenizer._warn_of_lost_words(captions)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids: the words, and three for padding, unknown words and the beginning."""
        return self.model.get_vocab_size()

    @property
    def pad_id(self) -> int:
        """The id behind the end of a text."""
        return PAD_ID

    @property
    def words(self) -> tuple[str, ...]:
        """The known words in the order of their ids (frequent ones first, equally frequent ones by spelling)."""
        ids = self.model.get_vocab()
        return tuple(sorted(ids.keys() - {PAD, UNKNOWN, BEGIN}, key=ids.__getitem__))

    def split(self, text: str) -> tuple[str, ...]:
        """The words of a text, known or not, as they are looked up."""
        normalized = self.model.normalizer.normalize_str(text)  # type: ignore[union-attr]
        return tuple(word for word, _ in self.model.pre_tokenizer.pre_tokenize_str(normalized))  # type: ignore[union-attr]

    def encode(
        self, texts: Sequence[str]
    ) -> tuple[Int32[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]:
        """Ids and the mask of those that are not padding.

        The empty text, which stands for "no condition", is the begin token alone, so no row of the mask is all false.

        Raises:
            UsageError: a text has more words than fit; nothing is ever cut off.
        """
        if isinstance(texts, str):
            raise UsageError("encode takes a list of texts, not one text: write encode([text])")
        ids = np.full((len(texts), self.max_length), self.pad_id, np.int32)
        mask = np.zeros((len(texts), self.max_length), np.bool_)
        for row, encoding in enumerate(self.model.encode_batch(list(texts), add_special_tokens=False)):
            found = [BEGIN_ID, *encoding.ids]
            if len(found) > self.max_length:
                raise UsageError(
                    f"'{texts[row]}' has {len(found) - 1} words and {self.max_length - 1} fit: shorten it "
                    "or train with a larger max_length"
                )
            ids[row, : len(found)] = found
            mask[row, : len(found)] = True
        return ids, mask

    def unknown_words(self, text: str) -> dict[str, tuple[str, ...]]:
        """The words of the text that were in no caption, each with up to three known words spelt like it.

        To the model every unknown word is the same, so a prompt that has some deserves a warning with their names.
        """
        known = self.words
        return {
            word: tuple(difflib.get_close_matches(word, known, n=3, cutoff=0.6))
            for word in self.split(text)
            if self.model.token_to_id(word) is None
        }

    def _warn_of_lost_words(self, captions: Iterable[str]) -> None:
        """Says how many words of the captions are not known, and the most frequent of them."""
        lost = Counter(
            word for caption in captions for word in self.split(caption) if self.model.token_to_id(word) is None
        )
        if lost:
            known = self.vocab_size - len((PAD, UNKNOWN, BEGIN))
            some = ", ".join(f"'{word}'" for word, _ in lost.most_common(3))
            text = (
                f"the captions have {known + len(lost):,} different words and the {known:,} most frequent are learnt: "
                f"to the model the other {len(lost):,} are all the same ({some}{', ...' if len(lost) > 3 else ''})"
            )
            warnings.warn(text, MaxDiffusionWarning, stacklevel=3)

    def as_text(self) -> str:
        """The JSON that `load` reads."""
        content = {"format": FORMAT, "max_length": self.max_length, "tokenizer": json.loads(self.model.to_str())}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all."""
        write_whole(as_path(path), self.as_text())

    @classmethod
    def load(cls, path: str | Path) -> WordTokenizer:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            UsageError: the file is something else.
        """
        text = as_path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not JSON ({error}): give the file that WordTokenizer.save wrote") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT or "tokenizer" not in content:
            raise UsageError(f"{path} is no tokenizer of format {FORMAT}: give the file that WordTokenizer.save wrote")
        return cls(model=Tokenizer.from_str(json.dumps(content["tokenizer"])), max_length=int(content["max_length"]))


def _with_word_rules(model: Tokenizer) -> Tokenizer:
    """The tokenizer with the rules by which texts become words; the class's docstring says them in prose."""
    model.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[’‘`]"), "'"),
        ]
    )
    symbols = "".join(f"\\{symbol}" for symbol in SYMBOLS)
    model.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(f"[^\\w'{symbols}]+|\\B'|'\\B"), "removed"),
            pre_tokenizers.Split(Regex(f"[{symbols}]"), "isolated"),
        ]
    )
    return model
