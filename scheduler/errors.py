"""The errors that engine and front end share: those that end a process. What ends a call is in `service/errors.py`."""

from __future__ import annotations


class EmberlineError(Exception):
    """Base of all errors of this project; its text is written by us and holds no user text."""


class ConfigurationError(EmberlineError):
    """The flags cannot be served. The process ends with exit code 2 and this message as its one line."""


class ModelUnsupportedError(ConfigurationError):
    """The engine cannot run this model family exactly; the message names the family and the reason."""


class StartupError(EmberlineError):
    """The server could not start for a reason outside its flags: model files, memory, port. Exit code 3."""
