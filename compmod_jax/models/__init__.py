"""Models: a configuration and a Linen module a file."""
