"""Data parallelism without a wrapper: the reduction of gradients is a block, `GradientAverager`."""
