"""The one exception that a user, not a developer, is meant to read, and its kinds."""


class UserError(Exception):
    """Bad input: one line that says what is wrong and what to do. The command line exits with 2."""


class Overloaded(UserError):
    """Too many requests wait already: try again later."""


class BadPrompt(UserError):
    """A prompt that the model cannot read."""


class ContextTooLong(BadPrompt):
    """A prompt that does not fit. size: the prompt's, with its unit; limit: the context's, in tokens."""

    def __init__(self, size: str, limit: int) -> None:
        super().__init__(
            f"the prompt has {size}, and the maximum context length is {limit} tokens, "
            "the completion included: shorten it"
        )
