"""How like generated pictures are to the real ones of their captions, by the features of the shipped classifier.

The figures are comparable with each other only. The Fréchet distance here is not the one on Inception features (FID).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from maxdiffusion.config.schema import SampleSection
from maxdiffusion.data.pictures import Pictures, fixed_choice
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.pipelines.picture_features import Seen, look
from maxdiffusion.pipelines.text_to_image import TextToImage, sampler

GALLERY = 100
"""Held-out pairs whose captions are painted, at most: always the same ones."""

Z95 = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""


@dataclass(frozen=True, kw_only=True)
class LikenessResult:
    """What was painted for held-out captions, compared with the real pictures.

    Attributes:
        pairs: captions that were painted, and targets in the gallery.
        seeds: pictures painted for each.
        retrieval: share of them whose nearest target is their own caption's.
        retrieval_interval: 95 % interval; pictures of one pair do not count as independent.
        chance: the share that pictures without any meaning would reach.
        other_styles: the share that the training pictures of the same concepts, in other styles, reach as they are.
        frechet: Fréchet distance to the training pictures (Heusel et al. 2017, equation 6), on features of length 1.
        frechet_of_real: that of the real pictures of the gallery; fewer pictures lie further away by chance.
    """

    pairs: int
    seeds: int
    retrieval: float
    retrieval_interval: tuple[float, float]
    chance: float
    other_styles: float
    frechet: float
    frechet_of_real: float

    def as_metrics(self) -> dict[str, float]:
        """Names and values for a line of metrics."""
        return {"retrieval": self.retrieval, "pictures_frechet": self.frechet}


class Likeness:
    """Paints held-out captions with weights and measures what came; compiled at the first call, then only run.

    Attributes:
        targets: the gallery.
    """

    def __init__(
        self,
        subject: TextToImage,
        tokenizer: WordTokenizer,
        *,
        held_out: Pictures,
        training: Pictures,
        section: SampleSection,
        num_seeds: int,
    ) -> None:
        """Looks at the real pictures.

        Args:
            subject: network and process.
            tokenizer: of the captions.
            held_out: pairs that the training does not see.
            training: pictures that it sees.
            section: solver, steps, guidance and seed.
            num_seeds: pictures for each pair.
        """
        self.targets = fixed_choice(held_out, GALLERY)
        self._sampler, self._tokenizer = sampler(subject, section), tokenizer
        self._seed, self._num_seeds = section.seed, num_seeds
        self._wanted, self._known = look(self.targets.images), look(training.images)
        self._other_styles = other_styles(self.targets, self._wanted, training, self._known)
        self._frechet_of_real = frechet_distance(self._wanted.features, self._known.features)

    def paint(self, params: Any) -> UInt8[np.ndarray, "pairs seeds height width 3"]:
        """Pictures for the captions of the gallery; every process takes part."""
        # Every picture has its own noise: the interval takes pairs to be independent.
        return self._sampler.pictures(
            params,
            self._tokenizer,
            self.targets.captions,
            num_images=self._num_seeds,
            seed=self._seed,
            indices=np.arange(len(self.targets) * self._num_seeds),
        )

    def of(self, made: UInt8[np.ndarray, "pairs seeds height width 3"]) -> LikenessResult:
        """Figures of what `paint` made."""
        pairs, seeds = made.shape[:2]
        seen = look(made.reshape(pairs * seeds, *made.shape[2:]))
        right = nearest_is_own(seen.features.reshape(pairs, seeds, -1), self._wanted.features)
        return LikenessResult(
            pairs=pairs,
            seeds=seeds,
            retrieval=float(right.mean()),
            retrieval_interval=clustered_interval(right),
            chance=1 / pairs,
            other_styles=self._other_styles,
            frechet=frechet_distance(seen.features, self._known.features),
            frechet_of_real=self._frechet_of_real,
        )

    def __call__(self, params: Any) -> LikenessResult:
        """Figures of these weights, laid out on the mesh."""
        return self.of(self.paint(params))


def other_styles(targets: Pictures, wanted: Seen, training: Pictures, known: Seen) -> float:
    """Share of the training pictures of the targets' concepts whose nearest target is that of their own concept.

    What a copier of the concept in a style that it knows would reach; `nan` where there is no such picture.
    """
    of_concept = {concept: row for row, concept in enumerate(targets.concepts)}
    rows = [row for row, concept in enumerate(training.concepts) if concept in of_concept]
    if not rows:
        return math.nan
    own = np.array([of_concept[training.concepts[row]] for row in rows])
    return float((_cosines(known.features[rows], wanted.features).argmax(axis=1) == own).mean())


def nearest_is_own(
    made: Float[np.ndarray, "pairs seeds features"], targets: Float[np.ndarray, "pairs features"]
) -> Bool[np.ndarray, "pairs seeds"]:
    """Whether the target nearest to each picture, by the cosine between features, is that of its own pair.

    A picture that is as near to another target counts as wrong.
    """
    pairs, seeds = made.shape[:2]
    cosines = _cosines(made.reshape(pairs * seeds, -1), targets).reshape(pairs, seeds, pairs)
    own = np.take_along_axis(cosines, np.arange(pairs)[:, None, None], axis=2)
    return (cosines >= own).sum(axis=2) == 1


def frechet_distance(a: Float[np.ndarray, "n features"], b: Float[np.ndarray, "m features"]) -> float:
    """The Fréchet distance of two normal distributions fitted to features, squared as is usual (Dowson & Landau 1982).

    `|mean_a - mean_b|^2 + trace(C_a + C_b - 2 (C_a C_b)^(1/2))` with the covariances C, in float64; `nan` for fewer
    than two pictures. Few pictures raise it: compare equal numbers of them only.
    """
    if min(len(a), len(b)) < 2:
        return math.nan
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(axis=0), np.cov(x, rowvar=False)) for x in map(np.float64, (a, b)))
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    # The product of two covariances has the eigenvalues of this symmetric matrix.
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ cov_b @ root), 0)).sum()
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared)


def clustered_interval(right: Bool[np.ndarray, "pairs seeds"]) -> tuple[float, float]:
    """The 95 % Wilson interval of the share of True, for pictures that come in clusters.

    Wilson (1927) at the effective sample size of cluster sampling (Kish 1965): the number of pictures over the design
    effect, which is the variance of the mean as the spread between the pairs shows it, over that of independent
    pictures. It is kept between the number of pairs and the number of pictures.
    """
    pairs, number = right.shape[0], right.size
    share = float(right.mean())
    between = float(right.mean(axis=1).var(ddof=1)) / pairs if pairs > 1 else 0.0
    effective = share * (1 - share) / between if between > 0 else float(pairs)
    return wilson_interval(share, min(max(effective, float(pairs)), float(number)))


def wilson_interval(share: float, number: float) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in `number` independent trials."""
    scale = 1 + Z95**2 / number
    middle = (share + Z95**2 / (2 * number)) / scale
    spread = Z95 * math.sqrt(share * (1 - share) / number + Z95**2 / (4 * number**2)) / scale
    return max(0.0, middle - spread), min(1.0, middle + spread)


def _cosines(a: Float[np.ndarray, "n features"], b: Float[np.ndarray, "m features"]) -> Float[np.ndarray, "n m"]:
    """Products of features of length 1, in float64, each a sum of its own: equal features give equal numbers."""
    return np.einsum("nf,mf->nm", a.astype(np.float64), b.astype(np.float64))
