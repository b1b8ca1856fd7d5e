"""Planted defects, one at a time, and the tests that notice them: `make mutants`.

Each area has a file of them, as differences. `mutant.py` says how they are written and which promises must have some;
`run.py` runs the tests on each. tests/test_mutants.py holds that every mutant applies to the code as it is.
"""
