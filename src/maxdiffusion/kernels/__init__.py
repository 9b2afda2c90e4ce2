"""Arrays in, arrays out: the computations worth a kernel of their own."""
