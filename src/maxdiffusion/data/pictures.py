"""The built-in picture set: 1,594 concepts, each drawn in four styles, captioned as in `a red apple, flat style`.

The pictures come from the icon sets Fluent Emoji (`fluent`, `flat`), Noto Emoji (`noto`) and Twemoji (`twemoji`);
NOTICE names their authors and licences; `scripts/build_pictures.py` in the repository makes the two files read here.

One pair (concept, style) in ten is held out: never in the split `train`, so that asking a trained model for it asks
whether the model can put together a concept and a style that it has only seen apart.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from maxdiffusion.data.source import Sample
from maxdiffusion.errors import UsageError, nearest

Style = Literal["fluent", "flat", "noto", "twemoji"]
Split = Literal["train", "held_out", "all"]
STYLES: tuple[Style, ...] = get_args(Style)

SMALLEST, STORED = 4, 64  # sides in pixels: the smallest that is offered, and what the wheel carries
HELD_OUT_SHARE = 0.1  # of all pairs, as an expectation over the hash


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A selection of the built-in set, decoded in memory: a `Source` that also says what each picture is of.

    Attributes:
        images: uint8 RGB on white, `(number, size, size, 3)`.
        captions: one a picture, as `caption(concept, style)` makes them.
        concepts: the concept of each picture.
        styles: the style of each picture.
    """

    images: UInt8[np.ndarray, "number size size 3"]
    captions: tuple[str, ...]
    concepts: tuple[str, ...]
    styles: tuple[Style, ...]

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int, /) -> Sample:
        key = f"{self.concepts[index]}/{self.styles[index]}"
        return Sample(image=self.images[index], caption=self.captions[index], key=key)

    @property
    def size(self) -> int:
        """Side of each picture in pixels."""
        return self.images.shape[1]


@dataclass(frozen=True, kw_only=True)
class _Archive:
    """What the wheel carries: names, noun phrases and undecoded pictures, concept by concept and style by style."""

    phrases: dict[str, str]  # concept -> noun phrase, in the order of the pictures
    pictures: tuple[bytes, ...]


@functools.cache
def _archive() -> _Archive:
    folder = files("maxdiffusion.data").joinpath("builtin")
    index = json.loads(folder.joinpath("pictures.json").read_text(encoding="utf-8"))
    blob = folder.joinpath("pictures.webps").read_bytes()
    if hashlib.sha256(blob).hexdigest() != index["pictures_sha256"]:
        raise UsageError("the built-in pictures are damaged: install maxdiffusion again")
    pictures = []
    start = 0
    while start < len(blob):
        # A WebP file is a RIFF file: "RIFF", then the number of bytes that follow as a little-endian uint32.
        end = start + 8 + int.from_bytes(blob[start + 4 : start + 8], "little")
        pictures.append(blob[start:end])
        start = end
    phrases = {name: phrase for name, phrase, _ in index["concepts"]}
    assert index["size"] == STORED and tuple(index["styles"]) == STYLES
    assert len(pictures) == len(phrases) * len(STYLES)
    return _Archive(phrases=phrases, pictures=tuple(pictures))


def concept_names() -> tuple[str, ...]:
    """Every concept of the built-in set, in its order."""
    return tuple(_archive().phrases)


@functools.cache
def concept_lists() -> dict[str, tuple[str, ...]]:
    """The named lists of concepts, each in its own order: `demo-160`, and `all`."""
    lists = {"all": concept_names()}
    for entry in files("maxdiffusion.data").joinpath("builtin").iterdir():
        if entry.name.endswith(".txt"):
            lists[entry.name.removesuffix(".txt")] = tuple(entry.read_text(encoding="utf-8").splitlines())
    return lists


def caption(concept: str, style: str) -> str:
    """The caption of one picture of the set: `caption("red apple", "flat")` is `a red apple, flat style`.

    Raises:
        UsageError: unknown concept or style; the message has the nearest name.
    """
    (name,) = _select_concepts([concept])
    return f"{_archive().phrases[name]}, {_check_style(style)} style"


def is_held_out(concept: str, style: str) -> bool:
    """Whether the pair belongs to the compositional test.

    Each pair has a number in [0, 1) that is a hash of its two names. Of a concept's four pairs the one with the lowest
    number is held out if that number is below a threshold. So a concept loses one style at most, the answer depends on
    nothing but the two names, and with the threshold 1 - (1 - 4 p)^(1/4) a share p of all pairs is held out on average.

    Raises:
        UsageError: unknown concept or style; the message has the nearest name.
    """
    (name,) = _select_concepts([concept])
    numbers = {other: _number(name, other) for other in STYLES}
    lowest = min(numbers, key=numbers.__getitem__)
    threshold = 1 - (1 - len(STYLES) * HELD_OUT_SHARE) ** (1 / len(STYLES))
    return lowest == _check_style(style) and numbers[lowest] < threshold


def pictures(
    concepts: str | Sequence[str] | None = None,
    *,
    styles: str | Sequence[str] | None = None,
    size: int = STORED,
    split: Split = "all",
) -> Pictures:
    """Select from the built-in set and decode it; needs no network.

    Args:
        concepts: None or `all`, the name of a list (`demo-160`), one concept, several with commas between, or a
            sequence of concepts. The order does not matter: pictures come in the order of the set.
        styles: any of `fluent`, `flat`, `noto`, `twemoji`; None is all four.
        size: side in pixels, 4 to 64; below 64 each pixel is the mean of the area that it covers.
        split: `train` leaves out the held-out pairs, `held_out` is those pairs only, `all` is both.

    Raises:
        UsageError: an unknown concept, style or split (with the nearest name), a size out of range, nothing selected.
    """
    if split not in get_args(Split):
        raise UsageError(f"unknown split '{split}': {nearest(split, get_args(Split))}")
    if not isinstance(size, int) or not SMALLEST <= size <= STORED:
        raise UsageError(f"pictures are stored at {STORED} x {STORED}: size must be {SMALLEST} to {STORED}, not {size}")
    if isinstance(styles, str):
        styles = [style.strip() for style in styles.split(",")]
    wanted_styles = {_check_style(style) for style in (STYLES if styles is None else styles)}
    wanted_concepts = _select_concepts("all" if concepts is None else concepts)
    archive = _archive()
    rows: list[tuple[int, str, Style]] = [
        (row * len(STYLES) + column, concept, style)
        for row, concept in enumerate(archive.phrases)
        if concept in wanted_concepts
        for column, style in enumerate(STYLES)
        if style in wanted_styles and split in ("all", "held_out" if is_held_out(concept, style) else "train")
    ]
    if not rows:
        raise UsageError(
            f"no picture left: {len(wanted_concepts)} concepts in {len(wanted_styles)} styles have no pair in split "
            f"'{split}'; choose more concepts or styles, or split 'all'"
        )
    return Pictures(
        images=np.stack([_decode(archive.pictures[number], size) for number, _, _ in rows]),
        captions=tuple(f"{archive.phrases[concept]}, {style} style" for _, concept, style in rows),
        concepts=tuple(concept for _, concept, _ in rows),
        styles=tuple(style for _, _, style in rows),
    )


def fixed_choice(source: Pictures, number: int) -> Pictures:
    """At most `number` of these pictures, chosen by the hash of their pair, so that they are the same ones for ever."""
    by_hash = sorted(range(len(source)), key=lambda row: _number(source.concepts[row], source.styles[row]))
    rows = sorted(by_hash[:number])
    return Pictures(
        images=source.images[rows],
        captions=tuple(source.captions[row] for row in rows),
        concepts=tuple(source.concepts[row] for row in rows),
        styles=tuple(source.styles[row] for row in rows),
    )


def _decode(data: bytes, size: int) -> UInt8[np.ndarray, "size size 3"]:
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(picture if size == STORED else picture.resize((size, size), Image.Resampling.BOX))


def _number(concept: str, style: str) -> float:
    """A number in [0, 1) that is the same for ever, on every machine."""
    digest = hashlib.sha256(f"{concept}\n{style}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _check_style(style: str) -> Style:
    for known in STYLES:
        if style == known:
            return known
    raise UsageError(f"unknown style '{style}': {nearest(style, STYLES)}")


@functools.cache
def _folded_names() -> dict[str, str]:
    """Concepts by what is compared: case and the number of spaces are not looked at."""
    return {_fold(name): name for name in _archive().phrases}


def _fold(name: str) -> str:
    return " ".join(name.casefold().split())


def _select_concepts(concepts: str | Sequence[str]) -> frozenset[str]:
    """The concepts meant, by the names that the set gives them."""
    known = _folded_names()
    if isinstance(concepts, str):
        if concepts in concept_lists():
            return frozenset(concept_lists()[concepts])
        concepts = concepts.split(",")
    if not concepts:
        raise UsageError("no concepts given: name some, or write 'all' or 'demo-160'")
    unknown = [name for name in concepts if _fold(name) not in known]
    if unknown:
        hints = "; ".join(f"unknown concept '{name.strip()}'{_hint(name)}" for name in unknown[:5])
        more = f"; and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UsageError(f"{hints}{more}")
    return frozenset(known[_fold(name)] for name in concepts)


def _hint(name: str) -> str:
    """The nearest names of concepts and lists: those spelt like it, and those that have it as a word."""
    options = [*_folded_names(), *concept_lists()]
    folded = _fold(name)
    close = difflib.get_close_matches(folded, options, n=2, cutoff=0.7)
    close += [option for option in options if set(folded.split()) < set(option.split()) and option not in close][:3]
    if not close:
        return " (maxdiffusion.data.pictures.concept_names() has them all)"
    return f": did you mean {' or '.join(repr(option) for option in close)}?"
