"""The one exception that a user, not a developer, is meant to read."""


class UserError(Exception):
    """Bad input: one line that says what is wrong and what to do. The command line exits with 2."""


class Overloaded(UserError):
    """Too many requests wait already: try again later."""
