"""Fixtures of the cache's tests."""

import pytest

from tests.cache.transfer_rig import Rig


@pytest.fixture
def rig(request, tmp_path):
    made = []

    def make(disk: bool = False, **options):
        made.append(Rig(tmp_path / "disk" if disk else None, **options))
        return made[-1]

    yield make
    for each in made:
        each.transfers.close()
