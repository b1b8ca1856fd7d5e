"""Averages of gradients over ranks: the averager that attaches to parameters, and functions."""
