"""Puts the repository's root on the path, so that tests can import `train` and `configs`."""
