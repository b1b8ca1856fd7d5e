"""Planted defects, one at a time, and the tests that notice them: `make mutants`.

Each area has a file with the list `MUTANTS`. `mutant.py` says what a mutant is and which promises must have some;
`run.py` runs the tests on each. tests/test_mutants.py holds that every mutant applies to the code as it is.
"""
