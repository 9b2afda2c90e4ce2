"""From a request to pictures: encode, sample, decode."""
