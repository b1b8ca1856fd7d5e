"""Where the frameworks are not installed, their tests are not collected: `make test-frameworks` installs them."""

import importlib.util
import os

from diffcoll.testing.spawn import PRELOADED

if importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob = ["*.py"]
else:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate warns that it sets this one itself
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Once in the server that forks ranks, not in each.
    PRELOADED += ["accelerate", "transformers", "lightning", "sentence_transformers"]
