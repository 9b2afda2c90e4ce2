"""The tiny run and the single device that the tests of training share."""

from tests.train.conftest import one_device, trained

__all__ = ["one_device", "trained"]
