"""Functions that are composed of collectives; all derivatives come from those."""
