"""Tensors in files: read, write, manifest, and the Hub as a source."""
