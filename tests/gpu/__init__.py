"""`make test-gpu`: rows for a machine with one GPU, each in processes of its own; with DRY=1 on the CPU and gloo.

A row is a function of a `Rank` with the decorator `@row`. It checks numbers against the CPU, and times and memory
against goals.

row.py, rank.py, measuring.py   what a row is, and what it gets
calls.py, streams.py            what several rows, and the tests on the test device, call
__main__.py, runner.py, machine.py   the command and its table, its processes, the GPU and NCCL
thin_nccl.py                    makes an NCCL that lets several ranks share the GPU
all other files                 rows
"""
