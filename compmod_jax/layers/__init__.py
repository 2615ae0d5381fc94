"""Attention, feed-forward and embedding layers that models are built from."""
