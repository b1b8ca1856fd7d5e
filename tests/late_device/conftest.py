"""The tests here make the test device this process's accelerator, for good: they run in a process of their own."""

import os

import pytest

ON = os.environ.get("DIFFCOLL_TEST_DEVICE") == "late"
#: None of these files is imported elsewhere.
collect_ignore_glob = [] if ON else ["*.py"]

if ON:
    import late

    late.register()

    @pytest.fixture(params=late.ORDERS)
    def order(request):
        """Both orders in which the device may run what nobody has waited for."""
        with late.order(request.param):
            yield request.param
