"""Functions of other libraries, with their names and signatures, on diffcoll's collectives."""
