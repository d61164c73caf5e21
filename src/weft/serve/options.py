"""ServeOptions: the server options that are not engine options."""

import json
import math
import os
import re
import ssl
from dataclasses import dataclass

from weft.engine.params import MAX_LOGPROBS
from weft.errors import OptionError

LEAST_RECORD_BYTES = 16 << 20
CONTENT_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    host: str = "127.0.0.1"  # reachable from this machine only, unless changed
    port: int = 8000  # 0: any free port
    served_model_name: tuple[str, ...] = ()  # names that requests may use; empty: the model option as given
    api_key: tuple[str, ...] = ()  # empty: no key is needed
    # Origins of web pages that may send requests from a browser; "*": all; None: pages of this machine.
    allowed_origins: tuple[str, ...] | None = None
    page: bool = True  # the page at "/"
    response_store: bool = True  # responses can be continued and retrieved by id
    share_prefix_cache: bool = False  # between API keys
    chat_template: str | None = None  # a file or the template text; None: the model's template
    chat_template_content_format: str = "auto"  # type of message content for the template: "string", "openai" (a list)
    max_logprobs: int = MAX_LOGPROBS  # most alternatives per token that a request may ask for
    return_tokens_as_token_ids: bool = False  # in logprobs; a request may override it
    enable_force_include_usage: bool = False  # every stream ends with a usage chunk
    root_path: str = ""  # path prefix under which a proxy serves the API: "", or with a leading and no trailing "/"
    ssl_certfile: str | None = None  # PEM; None: no TLS
    ssl_keyfile: str | None = None  # PEM; None: the key is in ssl_certfile
    max_body_mb: float = 8.0  # megabytes; larger bodies are refused
    requests_per_minute: int | None = None  # per API key; None: no limit
    max_concurrent_requests: int | None = None  # per API key; None: no limit
    shutdown_timeout: float = 30.0  # seconds that running requests have to finish
    tool_call_parser: str | None = None  # None: detected from the chat template
    reasoning_parser: str | None = None  # None: detected from the chat template
    otlp_traces_endpoint: str | None = None  # where spans are sent; None: no tracing
    record: str | None = None  # file for the recording; None: only the last minutes are kept, in memory
    record_max_bytes: int = 1 << 30  # of the recording's file, and the file before, together
    record_steps: str | None = None  # file for the engine's StepRecords, as JSON lines; None: no recording

    def __post_init__(self) -> None:
        if self.allowed_origins is not None:
            origins = tuple(origin for given in self.allowed_origins for origin in _origins(given))
            object.__setattr__(self, "allowed_origins", origins)
        object.__setattr__(self, "root_path", _root_path(self.root_path))
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port={self.port} must be 0 to 65535; 0 takes any that is free")
        if not 0 < self.max_body_mb <= 1024:
            raise OptionError(f"max_body_mb={self.max_body_mb:g} must be above 0 and at most 1024")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise OptionError(f"shutdown_timeout={self.shutdown_timeout:g} must be a number of seconds, 0 or more")
        for name in ("requests_per_minute", "max_concurrent_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value} must be at least 1; leave it out for no limit")
        if self.record_max_bytes < LEAST_RECORD_BYTES:
            raise OptionError(
                f"record_max_bytes={self.record_max_bytes} must be at least {LEAST_RECORD_BYTES}: less holds no minute"
            )
        if any(not key.strip() or not key.isascii() for key in self.api_key):
            raise OptionError("an api_key must be non-empty ASCII text")
        self._check_vllm()
        if any(not name.strip() for name in self.served_model_name):
            raise OptionError("a served_model_name must not be empty")

    def _check_vllm(self) -> None:
        """Checks options that vLLM has too."""
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise OptionError(f"max_logprobs={self.max_logprobs} must be 0 to {MAX_LOGPROBS}")
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise OptionError(
                f"chat_template_content_format={self.chat_template_content_format!r:.100} is unknown: choose "
                f"{', '.join(CONTENT_FORMATS)}"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise OptionError(f"ssl_keyfile={self.ssl_keyfile!r} is of no use alone: give ssl_certfile too")
        if self.ssl_certfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)


def _check_certificate(certificate: str, key: str | None) -> None:
    """Checks the TLS files before the model is loaded. Refuses a key with a password instead of asking for it."""
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file is not None and not os.path.isfile(file):
            raise OptionError(f"{name}={file!r} is not a file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        files = f"ssl_certfile={certificate!r}" + ("" if key is None else f" and ssl_keyfile={key!r}")
        raise OptionError(
            f"{files} cannot be used ({reason}): a certificate and its key are needed, PEM, without a password"
        ) from None


def _root_path(given: str) -> str:
    """The path prefix without a trailing "/". Raises if it is not a valid path."""
    path = given.strip().rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise OptionError(
            f"root_path={given!r:.100} must be a path like /llm/v2: letters, digits and -._~ behind each /"
        )
    return path


def _origins(given: str) -> list[str]:
    """The origins of one option value: a single origin, or a JSON list of origins as in vLLM."""
    found = [given]
    if given.lstrip().startswith("["):
        try:
            found = list(json.loads(given))
        except ValueError:
            found = [""]
    if not all(isinstance(origin, str) and origin.strip() for origin in found):
        raise OptionError(f"allowed_origins={given!r:.100} is neither an origin nor a JSON list of origins")
    return found
