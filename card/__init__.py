"""The model card: README.md of a build, written from its result files only."""
