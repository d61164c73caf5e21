"""Errors made for people: one line that names the value, the limit and the way out. The CLI prints them as they are."""


class WeftError(Exception):
    """Base of everything weft raises on purpose."""


class ModelError(WeftError):
    """The model directory, its config, its weights or its tokenizer cannot be used."""


class RequestError(WeftError, ValueError):
    """One request is malformed or cannot ever fit; the engine goes on without it."""


class PromptError(RequestError):
    """One prompt of a batch is at fault; `number` says which, counted from 0."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"prompt {number}: {reason}")
        self.number = number
        self.reason = reason


class QueueFullError(RequestError):
    """Too much waits already; the same request may be welcome later."""


class EngineError(WeftError):
    """The engine could not finish a request through no fault of the request."""


class OptionError(WeftError, ValueError):
    """An option of the engine or of the command line has a value that makes no sense."""
