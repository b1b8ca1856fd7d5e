"""Nothing here is collected: rows are run by `make test-gpu`."""

collect_ignore_glob = ["*.py"]
