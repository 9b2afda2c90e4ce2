"""The command line, one small file a verb: it parses, and calls a function of a lower layer."""
