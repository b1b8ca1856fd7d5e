"""Averages of gradients over ranks: `GradientAverager` and functions."""
