"""A finished folder to the Hub: checks before, one commit, the listing read back."""
