"""Where answers are generated: the embedded engine, or replicas of an OpenAI-compatible server.

[backend]
kind = "openai"
flavour = "vllm"
model = "Qwen/Qwen3-8B"

[[backend.replicas]]
url = "http://10.0.0.5:8000/v1"
api_key_env = "VLLM_KEY"
"""

from typing import Literal
from urllib.parse import urlsplit

import msgspec

BackendKind = Literal["embedded", "openai"]
Flavour = Literal["vllm", "sglang", "dynamo", "openai"]


def _require(name: str, value: float, lowest: float) -> None:
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest:g}, got {value:g}")


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server that has the model."""

    url: str
    """Base URL of its API, ``/v1`` included where it has one."""
    api_key_env: str | None = None
    """Environment variable that holds the key for it; ``None`` sends none."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ValueError(f"url must be an http or https URL, got {self.url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("url must hold neither a user, a query nor a fragment; name a key in api_key_env")
        if self.api_key_env is not None and not self.api_key_env.strip():
            raise ValueError("api_key_env must not be empty")

    @property
    def name(self) -> str:
        """Host and port, for logs and metrics."""
        return urlsplit(self.url).netloc


class CountingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts are counted before they are sent. Counts that are not exact are never too low for text."""

    name: str | None = None
    """A Hugging Face id, a local folder or ``.gguf`` file with the served model's tokenizer, or an OpenAI encoding such
    as ``o200k_base``. ``None`` counts UTF-8 bytes by script: more tokens than there are, never fewer."""
    use_chat_template: bool = True
    """Count with the chat template that comes with the tokenizer; off where the server has another one."""
    tokens_per_message: int = 8
    """Of a message beside its text, where the template is not known."""
    tokens_per_prompt: int = 96
    """Of a prompt beside its messages, where the template is not known: date lines and default system texts."""
    tokens_per_tool: int = 24
    """Of a tool beside its JSON, where the template is not known."""
    tokens_per_tool_prompt: int = 320
    """Of the instructions that a template adds where there are tools."""
    tokens_per_image: int = 1445
    """Of an image part, whatever its size; one with ``detail: low`` counts ``tokens_per_small_image``."""
    tokens_per_small_image: int = 85
    tokens_per_file: int = 4096
    """Of every other part that is no text: audio, files."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool):
                _require(name, value, 0)


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which replica gets a request."""

    load_bound: float = 1.25
    """A replica takes at most this many times the mean number of requests; above it the next one on the ring does."""
    virtual_nodes: int = 64
    """Places of each replica on the ring."""

    def __post_init__(self) -> None:
        _require("load_bound", self.load_bound, 1.0)
        _require("virtual_nodes", self.virtual_nodes, 1)


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What generates the answers. All but ``kind`` concerns ``openai``."""

    kind: BackendKind = "embedded"
    flavour: Flavour = "openai"
    """Whose extensions the replicas know. It decides where the cache salt goes and how health is asked for."""
    model: str = ""
    """The model's name at the replicas."""
    replicas: tuple[ReplicaSettings, ...] = ()
    max_model_len: int | None = None
    """Window in tokens, prompt and output together; ``None`` asks the replicas, of which vLLM and SGLang tell."""
    tokenizer: CountingSettings = CountingSettings()
    routing: RoutingSettings = RoutingSettings()

    cache_salt_field: str | None = None
    """Where in the body the tenant's salt goes, with dots, e.g. ``nvext.cache_salt``; ``""`` is nowhere. ``None`` is
    the flavour's: ``cache_salt`` for vLLM and SGLang, nowhere for OpenAI, which refuses fields it does not know."""
    cache_salt_header: str | None = None
    """Header that carries the salt; ``""`` is none, ``None`` is the flavour's: ``x-tenant-id`` for Dynamo."""

    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 300.0
    """From the request to the first event of its stream, or to its whole answer where it does not stream."""
    idle_timeout_s: float = 60.0
    """Longest silence inside a stream."""
    max_attempts: int = 3
    """Replicas that one request is sent to until one begins to answer; a request is never repeated after that."""
    health_interval_s: float = 5.0
    """Between two health checks of a replica; 0 asks for none."""
    health_path: str | None = None
    """Path that answers 200, from the root of the replica; ``None`` is the flavour's: ``/health``, for OpenAI the list
    of its models."""
    failure_threshold: int = 3
    """Failures in a row after which a replica is left alone,"""
    open_s: float = 5.0
    """for so long at first, twice as long after each failed trial,"""
    max_open_s: float = 60.0
    """and never longer than this."""
    max_connections: int = 1000
    """Connections to all replicas together."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "first_token_timeout_s", "idle_timeout_s", "open_s", "max_open_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name):g}")
        for name in ("max_attempts", "failure_threshold", "max_connections"):
            _require(name, getattr(self, name), 1)
        _require("health_interval_s", self.health_interval_s, 0)
        if self.max_model_len is not None:
            _require("max_model_len", self.max_model_len, 2)
        if self.health_path is not None and not self.health_path.startswith("/"):
            raise ValueError(f"health_path must start with a slash, got {self.health_path!r}")
        if self.kind != "openai":
            return
        if not self.model.strip():
            raise ValueError("model must name the model at the replicas")
        if not self.replicas:
            raise ValueError("replicas must hold at least one server")
        urls = [replica.url.rstrip("/") for replica in self.replicas]
        if len(set(urls)) < len(urls):
            raise ValueError("replicas must be different servers, got one URL twice")

    @property
    def salt_field(self) -> tuple[str, ...]:
        """Path of the salt in the body; empty for none."""
        default = "cache_salt" if self.flavour in ("vllm", "sglang") else ""
        path = default if self.cache_salt_field is None else self.cache_salt_field
        return tuple(part for part in path.split(".") if part)

    @property
    def salt_header(self) -> str | None:
        """Header of the salt."""
        default = "x-tenant-id" if self.flavour == "dynamo" else ""
        return (default if self.cache_salt_header is None else self.cache_salt_header) or None
