"""The tests here run if they are named, `pytest tests/late_device`: the device is a process's accelerator for good."""

import late
import pytest


def is_named(config):
    return any("tests/late_device" in argument for argument in config.args)


def pytest_configure(config):
    if is_named(config):
        late.register()


def pytest_ignore_collect(config):
    return None if is_named(config) else True


@pytest.fixture(params=late.ORDERS)
def order(request):
    """Both orders in which the device may run what nobody has waited for."""
    with late.order(request.param):
        yield request.param
