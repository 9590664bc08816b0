"""When a restore is worth it."""

from megaspan.cache.restore_policy import RestorePolicy


def test_pages_are_loaded_only_where_that_is_faster():
    """P45: loading slower than computing is no hit."""
    policy = RestorePolicy(prior=1000.0)
    assert policy.worth(1000, recompute_seconds=1.1)
    assert not policy.worth(1000, recompute_seconds=0.9)


def test_the_estimate_follows_what_is_measured():
    policy = RestorePolicy(prior=1000.0)
    for _ in range(20):
        policy.measured(100, seconds=1.0)
    policy.measured(0, seconds=1.0)  # nothing was moved, which says nothing
    assert policy.worth(1000, recompute_seconds=10.1)
    assert not policy.worth(1000, recompute_seconds=9.9)


def test_one_slow_restore_is_not_held_against_the_tier_for_ever():
    """P44: a tier that is never asked again never shows that it has recovered."""
    policy = RestorePolicy(prior=1000.0)
    policy.measured(100, seconds=50.0)
    refusals = 0
    while not policy.worth(1000, recompute_seconds=2.0):
        refusals += 1
        assert refusals < 200
    assert refusals > 0
