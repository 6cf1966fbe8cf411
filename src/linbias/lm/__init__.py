"""Experiments: language models trained short and tested long."""
