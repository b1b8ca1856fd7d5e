"""A plugin, `-p tests.late_device.on`: pytest runs on the test device, as with DIFFCOLL_TEST_DEVICE=late."""

import os

os.environ["DIFFCOLL_TEST_DEVICE"] = "late"
