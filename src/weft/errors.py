"""Errors for users: one line with the value, the limit and the way out. The CLI prints them unchanged."""

EMPTY_PROMPT = "the prompt is empty: at least one token is needed to predict the next one"


class WeftError(Exception):
    """Base class of everything that weft raises on purpose."""


class ModelError(WeftError):
    """The model directory, its config, its weights or its tokenizer cannot be used."""


class RequestError(WeftError, ValueError):
    """One request is malformed or can never fit. The engine goes on without it."""


class PromptError(RequestError):
    """One prompt of a batch is invalid. `number` is its index, counted from 0."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"prompt {number}: {reason}")
        self.number = number
        self.reason = reason


class QueueFullError(RequestError):
    """Too much is waiting already. The same request may be accepted later."""


class EngineError(WeftError):
    """The engine could not finish a request, through no fault of the request."""


class OptionError(WeftError, ValueError):
    """An option of the engine or of the command line has an invalid value."""
