"""Trained models in and out: folders that need nothing but safetensors to be read."""
