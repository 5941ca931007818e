"""Recover the trained 4-bit grid and write it as an exact W4A16 folder."""
