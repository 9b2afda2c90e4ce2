"""What tells two sets of samples apart without reading a picture: how many, their names, captions and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from maxdiffusion.data.source import Source


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The samples of a source in their order; what a source does not say has the hash of nothing.

    Attributes:
        number: how many.
        names: hash of their names.
        captions: hash of their captions.
        sizes: hash of the heights and widths that their pictures are stored with.
    """

    number: int
    names: str
    captions: str
    sizes: str

    @classmethod
    def of(cls, source: Source) -> Fingerprint:
        """The fingerprint of a source, from what its index holds."""
        shapes = np.asarray(getattr(source, "shapes", ()), "<i4")
        return cls(
            number=len(source),
            names=_hash(name.encode() for name in getattr(source, "keys", ())),
            captions=_hash(text.encode() for text in getattr(source, "captions", ())),
            sizes=_hash([shapes.tobytes()]),
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def change(self, before: Mapping[str, Any]) -> str | None:
        """What is not as it was, in a few words; None if nothing is.

        Args:
            before: from `as_dict`; a key that is missing is not compared.
        """
        now = self.as_dict()
        changed = [name for name in now if before.get(name, now[name]) != now[name]]
        if "number" in changed:
            return f"{before['number']} samples then, {self.number} now"
        return f"{self.number} samples as then, but other {' and '.join(changed)}" if changed else None


def _hash(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:16]
