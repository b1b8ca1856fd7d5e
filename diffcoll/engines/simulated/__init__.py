"""Ranks that are threads of one process, of which one runs at a time."""
