"""The model and the engines that the engine's tests share."""

import pytest

from tests.engine.engines import assert_idle, debug_model, make_engine, poison_freed_pages


@pytest.fixture(scope="module")
def model():
    return debug_model()


@pytest.fixture
def make(model):
    """Makes engines whose free pages hold NaN. At the end each must be idle, its ledger closed."""
    made = []

    def make(of=model, **options):
        made.append(make_engine(of, **options))
        poison_freed_pages(made[-1])
        return made[-1]

    yield make
    for engine in made:
        assert_idle(engine)
        engine.close()


@pytest.fixture
def engine(make):
    return make()
