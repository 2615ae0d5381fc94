"""Tasks: what a batch means."""
