"""What measures the library: time, bytes and memory of its calls beside others', and a model of their costs.

    python -m benchmarks --help

Not installed; run in a checkout. README.md explains the tables.
"""
