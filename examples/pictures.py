"""matplotlib for the examples that draw: into a file, without a display."""

from typing import Any


def pyplot() -> Any:
    """Return matplotlib.pyplot; if it is not installed, end the program with what to install."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        need = "matplotlib is not installed; from a checkout of diffcoll: pip install '.[examples]'"
        raise SystemExit(need) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
