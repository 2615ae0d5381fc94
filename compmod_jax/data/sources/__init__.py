"""Data that others made: text files, classes of pictures, and TensorFlow Datasets."""
