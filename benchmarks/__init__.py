"""What measures the library: time, bytes and memory of its calls beside others'.

    python -m benchmarks --help

Not installed; run in a checkout. README.md explains the tables.
"""
