"""Gemma 4 text in pure JAX."""
