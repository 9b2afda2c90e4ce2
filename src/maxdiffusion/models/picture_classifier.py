"""A small classifier of the built-in pictures, by concept and style; its features compare pictures with each other.

Its figures are comparable with each other only: it is no Inception network and knows nothing but these pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jaxtyping import Array, Float

SIZE = 64
"""Height and width that it looks at, in pixels; other sizes are resized."""

FOLD = 4
"""Pixels a position, in each direction."""


@struct.dataclass
class Classified:
    """What the classifier sees, float32.

    Attributes:
        features: what the two heads read; not normalised.
        concepts: logits of the concepts, in the order of `data.pictures.concept_names()`.
        styles: logits of the styles, in the order of `data.pictures.STYLES`.
    """

    features: Float[Array, "batch features"]
    concepts: Float[Array, "batch concepts"]
    styles: Float[Array, "batch styles"]


class PictureClassifier(nn.Module):
    """Residual convolutions on folded pixels at three resolutions; features see what is where: pictures are centred.

    Concepts are told by the cosine between features and a direction for each (Wang et al. 2018, CosFace, without its
    margin), so that pictures of one concept in different styles point in one direction.

    Attributes:
        num_concepts: classes of the first head.
        num_styles: classes of the second.
        widths: channels at 16, 8 and 4 positions a side.
        num_features: numbers that a picture becomes.
        dropout: share of the features that are dropped in training.
    """

    num_concepts: int
    num_styles: int
    widths: Sequence[int] = (64, 96, 128)
    num_features: int = 128
    dropout: float = 0.2

    @nn.compact
    def __call__(self, images: Float[Array, "batch height width 3"], *, training: bool = False) -> Classified:
        """Classifies pictures.

        Args:
            images: from -1 to 1.
            training: drops features; needs the random stream `dropout`.
        """
        if images.shape[1:3] != (SIZE, SIZE):
            images = jax.image.resize(images, (images.shape[0], SIZE, SIZE, images.shape[3]), "bilinear")
        x = rearrange(images, "b (h p) (w q) c -> b h w (p q c)", p=FOLD, q=FOLD)
        for level, width in enumerate(self.widths):
            x = nn.Conv(width, (3, 3), strides=1 if level == 0 else 2, name=f"conv_{level}")(x)
            inner = nn.gelu(nn.GroupNorm(num_groups=8, name=f"norm_{level}_1")(x))
            inner = nn.Conv(width, (3, 3), name=f"block_{level}_1")(inner)
            inner = nn.gelu(nn.GroupNorm(num_groups=8, name=f"norm_{level}_2")(inner))
            x = x + nn.Conv(width, (3, 3), name=f"block_{level}_2")(inner)
        x = nn.gelu(nn.GroupNorm(num_groups=8, name="norm_out")(x))
        features = nn.Dense(self.num_features, name="features")(x.reshape(x.shape[0], -1))
        seen = nn.Dropout(self.dropout, deterministic=not training)(features)
        towards = self.param("concepts", nn.initializers.normal(1.0), (self.num_concepts, self.num_features))
        scale = jnp.exp(self.param("scale", nn.initializers.constant(2.5), ()))
        return Classified(
            features=features,
            concepts=scale * unit(seen) @ unit(towards).T,
            styles=nn.Dense(self.num_styles, name="styles")(seen),
        )


def unit(vectors: Float[Array, "... features"]) -> Float[Array, "... features"]:
    """Vectors of length 1; zero stays zero."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-6)
