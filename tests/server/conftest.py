"""A true server on a small random model, for the tests that want one."""

import pytest

from tests.server.small_model import assert_idle, served, small_engine


@pytest.fixture(scope="module")
def real_engine():
    return small_engine()


@pytest.fixture(scope="module")
def real_base(real_engine):
    """Its address."""
    with served(real_engine) as address:
        yield address


@pytest.fixture
def nothing_is_left(real_engine, real_base):
    """P63: after the test the ledger closes."""
    yield
    assert_idle(real_engine)
