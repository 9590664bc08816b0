"""A true server on a small random model, for the tests that want one."""

import anthropic
import openai
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


@pytest.fixture(scope="module")
def chat(base):
    """The openai client of the module's server."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(base):
    """The anthropic client of the module's server."""
    with anthropic.Anthropic(base_url=base, api_key="key", max_retries=0) as client:
        yield client
