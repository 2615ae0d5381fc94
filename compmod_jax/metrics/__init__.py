"""Scores of outputs, how sure they are, and what a few seeds can tell."""
