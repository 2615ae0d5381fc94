"""Data that others made: text files, and TensorFlow Datasets."""
