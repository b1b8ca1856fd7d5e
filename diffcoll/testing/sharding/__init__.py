"""The check of sharded programs: ranks of a mesh with pieces of tensors, and one process with the whole ones."""
