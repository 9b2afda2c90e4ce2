"""Aspect-ratio buckets: pictures of about one shape share a size, so that little of each is cropped away.

The sizes of `aspect` are all that are multiples of a step, hold no more pixels than the budget, and are as large as
that allows; ratios go up to 3. A picture belongs to the size whose ratio is nearest to its own, on a logarithmic scale.
While more sizes are in use than allowed, the rarest is given up and its pictures go to the next nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

LARGEST_RATIO = 3.0
"""Of the longer side to the shorter, among the sizes of `aspect_sizes`."""


@dataclass(frozen=True, kw_only=True)
class BucketRule:
    """Which sizes there may be.

    Attributes:
        sizes: height and width of each, in pixels.
        limit: how many may be in use; None for all.
    """

    sizes: tuple[tuple[int, int], ...]
    limit: int | None = None

    def sort(self, shapes: Int[np.ndarray, "n 2"]) -> Buckets:
        """The buckets of pictures with these heights and widths.

        Only sizes in use are left, in the order of their ratio; the same shapes always give the same buckets.
        """
        if not len(shapes):
            return Buckets(sizes=(), of=np.zeros(0, np.int32))
        sizes = sorted(dict.fromkeys(self.sizes), key=lambda size: (size[1] / size[0], size))
        ratios = np.log(shapes[:, 1] / shapes[:, 0])
        different, where, counts = np.unique(ratios, return_inverse=True, return_counts=True)
        while True:
            nearest = _nearest(different, sizes)
            pictures = np.bincount(nearest, weights=counts, minlength=len(sizes)).astype(int)
            if pictures.all() and (self.limit is None or len(sizes) <= self.limit):
                break
            del sizes[int(pictures.argmin())]
        return Buckets(sizes=tuple(sizes), of=nearest[where].astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The sizes in use, and which of them each picture has.

    Attributes:
        sizes: height and width of each bucket, in pixels.
        of: the bucket of each picture.
    """

    sizes: tuple[tuple[int, int], ...]
    of: Int32[np.ndarray, " n"]

    @property
    def counts(self) -> tuple[int, ...]:
        """Pictures in each bucket."""
        return tuple(np.bincount(self.of, minlength=len(self.sizes)).tolist())

    def __str__(self) -> str:
        """Every size with its number of pictures."""
        pairs = zip(self.sizes, self.counts, strict=True)
        return ", ".join(f"{height} x {width} ({count} pictures)" for (height, width), count in pairs)

    def rare(self, batch_size: int) -> str | None:
        """What is to be said about buckets with fewer pictures than a batch; None where there are none."""
        pairs = zip(self.sizes, self.counts, strict=True)
        found = [f"{height} x {width} ({count})" for (height, width), count in pairs if count < batch_size]
        if not found or len(self.sizes) == 1:
            return None
        return (
            f"{len(found)} of {len(self.sizes)} buckets have fewer pictures than a batch of {batch_size}, so a batch "
            f"of theirs holds some of them more than once: {', '.join(found)}. Allow fewer buckets (data.max_buckets, "
            "or a shorter list in data.buckets), or take a smaller train.batch_size"
        )


def aspect_sizes(size: int, step: int) -> tuple[tuple[int, int], ...]:
    """All sizes of about `size * size` pixels, at most: multiples of `step`, as large as that allows.

    Args:
        size: side of the square, a multiple of `step`.
        step: what heights and widths are multiples of.
    """
    found: set[tuple[int, int]] = set()
    for short in range(step, size + 1, step):
        long = size * size // short // step * step
        if long <= LARGEST_RATIO * short:
            found |= {(short, long), (long, short)}
    return tuple(sorted(found))


def _nearest(ratios: Int[np.ndarray, " n"], sizes: Sequence[tuple[int, int]]) -> Int[np.ndarray, " n"]:
    """Which size is nearest in ratio; of two that are as near, the first."""
    own = np.log([width / height for height, width in sizes])
    return np.abs(ratios[:, None] - own[None]).argmin(axis=1)
