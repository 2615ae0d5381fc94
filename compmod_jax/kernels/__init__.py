"""Kernels, one folder each: the reference that defines it, the Pallas files, the dispatch."""
