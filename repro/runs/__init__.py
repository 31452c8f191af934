"""Runs: cells of params.yaml built from their task, trained with each of their seeds, recorded, tuned and pooled."""
