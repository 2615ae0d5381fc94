"""Data that the project makes itself: a grammar, small worlds, SCAN, string edits, characters."""
