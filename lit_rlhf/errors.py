"""Errors that speak to the user: one message that says what was given, where, and what is allowed.

``lit-rlhf`` prints them without a traceback; in a script they are ordinary exceptions.
"""


class LitRLHFError(Exception):
    """Base class of every error that this library raises on purpose."""


class ConfigurationError(LitRLHFError, ValueError):
    """Options that are out of range or contradict each other. Raised before any model is loaded where possible."""


class DataError(LitRLHFError, ValueError):
    """A file, a row or a column that cannot be used. The message names the file and the row."""


class RewardError(LitRLHFError, RuntimeError):
    """A reward function that raised or broke its contract. The message names the function and the row."""


class DivergedError(LitRLHFError, RuntimeError):
    """The policy's weights or log-probs are no longer finite."""
