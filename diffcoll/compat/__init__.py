"""The names that others use, on the rules of this library."""
