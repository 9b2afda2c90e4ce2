"""One training program for each size of pictures, and what is said of the sizes before they are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config.schema import DataSection
from maxdiffusion.data.buckets import Buckets
from maxdiffusion.data.shards import ShardedPictures
from maxdiffusion.data.source import Source
from maxdiffusion.errors import UsageError
from maxdiffusion.models.pictures import Pictures
from maxdiffusion.train.feed import Feed
from maxdiffusion.train.state import TrainState
from maxdiffusion.train.step import Examples, Step, StepResult


def buckets_of(source: Source) -> Buckets | None:
    """The buckets of a source; None where all its pictures have one size."""
    return source.buckets if isinstance(source, ShardedPictures) and len(source.buckets.sizes) > 1 else None


def image_shapes(source: Source) -> list[tuple[int, int, int]]:
    """Height, width and channels of every size of picture that a source gives."""
    buckets = buckets_of(source)
    return [source[0].image.shape] if buckets is None else [(*size, 3) for size in buckets.sizes]  # type: ignore[list-item]


def check_sizes(model: Pictures, images: list[tuple[int, int, int]], section: DataSection) -> None:
    """Refuses sizes of pictures that the model cannot take.

    Raises:
        UsageError: with the nearest sizes that it can.
    """
    fold, size = model.fold, section.size
    wrong = [one for one in images if one[0] % fold or one[1] % fold]
    if not wrong:
        return
    cause = f"the model folds {fold} x {fold} pixels into one position (model_config.fold)"
    if section.buckets == "aspect":
        legal = sorted(
            (step for step in range(fold, size + 1, fold) if size % step == 0),
            key=lambda step: (abs(step - section.bucket_step), step),
        )
        raise UsageError(f"data.bucket_step={section.bucket_step}: {cause}: take {' or '.join(map(str, legal[:2]))}")
    near = [[max(round(side / fold), 1) * fold for side in one[:2]] for one in wrong]
    raise UsageError(
        f"data.buckets: {cause}, and {', '.join(f'{one[0]}x{one[1]}' for one in wrong)} cannot be cut so: take "
        f"{', '.join(f'{height}x{width}' for height, width in near)}"
    )


def told(source: Source, batch_size: int) -> list[str]:
    """What the user should know of a source before training: its notes, its sizes, and which of them are rare."""
    if not isinstance(source, ShardedPictures):
        return []
    lines, buckets = [f"data: {note}" for note in source.report.notes], buckets_of(source)
    if buckets is not None:
        lines.append(f"buckets: {len(buckets.sizes)} training programs, height x width: {buckets}")
        rare = buckets.rare(batch_size)
        lines += [f"buckets: {rare}"] if rare else []
    return lines


@dataclass(frozen=True, kw_only=True)
class SizedStep:
    """A step that runs the program of its batch's size.

    Attributes:
        programs: compiled, by height, width and channels.
    """

    programs: Mapping[tuple[int, ...], Any]

    def __call__(self, state: TrainState, examples: Examples) -> tuple[TrainState, StepResult]:
        """One step; the state is donated."""
        return self.programs[examples.images.shape[1:]](state, examples)


def compile_sizes(
    step: Step, shapes: TrainState, feed: Feed, *, batch_size: int, images: list[tuple[int, int, int]]
) -> SizedStep:
    """Compiles a jitted step for each size.

    Args:
        step: the jitted step.
        shapes: of the state.
        feed: says where a batch lies.
        batch_size: over all devices.
        images: height, width and channels of each size.
    """
    return SizedStep(
        programs={
            shape: step.lower(shapes, feed.shapes(batch_size, shape)).compile()  # type: ignore[attr-defined]
            for shape in images
        }
    )
