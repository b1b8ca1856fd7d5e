"""What PyTorch has no public API for."""

from diffcoll.core.torch_private.names import require

require("every call")
