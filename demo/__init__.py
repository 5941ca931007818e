"""The embedded checkpoint: a small, really trained QAT model of the real layout."""
