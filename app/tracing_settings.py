"""Settings of OpenTelemetry spans; where they go is said by the standard ``OTEL_*`` variables of the environment."""

from typing import Literal

import msgspec


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry spans of requests. Off, the tracer is not imported; ``traceparent`` still passes on."""

    enabled: bool = False
    """Make spans; needs ``pip install 'firsttoken[otel]'``. ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``,
    ``OTEL_TRACES_SAMPLER``, ``OTEL_TRACES_EXPORTER``, ``OTEL_PROPAGATORS``, ``OTEL_BSP_*`` say how and where to."""
    content: bool = False
    """Put the messages sent to the model and its answer into spans. Never what the caller may not read."""
    names: Literal["latest", "1.36"] = "latest"
    """Version of the GenAI conventions; ``OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental`` means latest."""
