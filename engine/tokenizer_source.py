"""Finds and builds what a tokenizer is made of: from GGUF metadata, from ``tokenizer.json``, or through transformers.

Byte-level BPE vocabularies and Gemma's inside GGUF files are built directly with the ``tokenizers`` library: a gateway
starts without torch and in seconds at most. The oracle is transformers: ids equal those of
``AutoTokenizer.from_pretrained(folder, gguf_file=...)`` on every text, including its choice to split ``smollm`` text
like GPT-2. Other GGUF vocabularies (sentencepiece, unigram) and folders without ``tokenizer.json`` go through
transformers itself, imported only then.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from engine.errors import ModelError
from engine.gguf_metadata import read_gguf_metadata

END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "</s>",
)
"""Tokens that end the model's turn where the chat template writes them, besides the end-of-sequence id itself."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
"""How each ``tokenizer.ggml.pre`` cuts text before merging; ``None`` is the GPT-2 pattern of ``ByteLevel``."""

_PRE_WITH_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
_GEMMA = frozenset({"gemma", "gemma2", "gemma3"})
_CONTROL, _USER_DEFINED = 3, 4
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Everything a model says about its tokens."""

    backend: BackendTokenizer
    vocab_size: int
    named_tokens: dict[str, str]
    """``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` as far as the model has them; templates use them."""
    bos_token_id: int | None
    add_bos_token: bool
    """A prompt starts with the beginning-of-sequence token."""
    eos_token_ids: frozenset[int]
    chat_template: str | None


def bytes_to_unicode() -> dict[int, str]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for characters above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + index) for index, byte in enumerate(others)}


def load_tokenizer_source(path: Path) -> TokenizerSource:
    """Read a ``.gguf`` file, a folder with one, or a Hugging Face folder. Raises ModelError naming the file."""
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} holds no tokenizer: expected a .gguf file or a folder")
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return _from_folder(path, _backend_from_json(path / "tokenizer.json"))
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return _from_gguf(gguf_files[0])
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files)
        raise ModelError(f"{path} holds several GGUF files, name one of them: {names}")
    return _from_folder(path, _backend_from_transformers(path, None))


def _from_gguf(path: Path) -> TokenizerSource:
    metadata = read_gguf_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path} holds no vocabulary (tokenizer.ggml.tokens)")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    if is_byte_level and pre in BYTE_LEVEL_SPLITS and "tokenizer.ggml.merges" in metadata:
        backend = _byte_level_backend(metadata, tokens, BYTE_LEVEL_SPLITS[pre], path)
    elif metadata.get("general.architecture") in _GEMMA and metadata.get("tokenizer.ggml.model") == "llama":
        backend = _gemma_backend(metadata, tokens, path)
    else:
        backend = _backend_from_transformers(path.parent, path.name)

    named = {}
    for name, key in _NAMED_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    default_bos = pre in _PRE_WITH_BOS if is_byte_level else metadata.get("tokenizer.ggml.model") == "llama"
    template = metadata.get("tokenizer.chat_template")
    declared = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    bos_token_id = metadata.get("tokenizer.ggml.bos_token_id")
    return TokenizerSource(
        backend=backend,
        vocab_size=len(tokens),
        named_tokens=named,
        bos_token_id=bos_token_id,
        add_bos_token=bos_token_id is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)),
        eos_token_ids=_eos_token_ids(backend, declared, template),
        chat_template=template,
    )


def _byte_level_backend(metadata: dict[str, Any], tokens: list[str], split: str | None, path: Path) -> BackendTokenizer:
    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())
    token_types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    named_ids = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _NAMED_TOKENS.values()}
    vocab: dict[str, int] = {}
    added: list[AddedToken] = []
    for token_id, (token, token_type) in enumerate(zip(tokens, token_types, strict=True)):
        is_control = token_type == _CONTROL or token_id in named_ids
        if is_control or token_type == _USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=is_control))
        elif not alphabet.issuperset(token):
            # some converters write plain text where the byte alphabet is meant
            token = "".join(spelling[byte] for byte in token.encode("utf-8"))
        vocab[token] = token_id
    try:
        merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
        backend = BackendTokenizer(models.BPE(vocab, merges))
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise ModelError(f"{path} holds an inconsistent vocabulary: {error}") from error
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    return backend


def _gemma_backend(metadata: dict[str, Any], tokens: list[str], path: Path) -> BackendTokenizer:
    """Sentencepiece with byte fallback over a vocabulary that lists no merges: they follow from the order of tokens.

    A token can be joined from any two parts that are tokens as well; of two tokens the earlier one is joined first.
    """
    # runs of spaces are written as such, and looked up with the mark that stands for a space everywhere else
    spelled = ["▁" * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(spelled)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=lambda token: vocab[token])
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = spelled[unknown] if isinstance(unknown, int) and 0 <= unknown < len(spelled) else "<unk>"
    try:
        backend = BackendTokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} holds an inconsistent vocabulary: {error}") from error
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    named_ids = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _NAMED_TOKENS.values()}
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL or token_id in named_ids)
            for token_id, (token, token_type) in enumerate(zip(tokens, token_types, strict=True))
            if token in vocab and (token_type in (_CONTROL, _USER_DEFINED) or token_id in named_ids)
        ]
    )
    return backend


def _from_folder(path: Path, backend: BackendTokenizer) -> TokenizerSource:
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _read_json(path / "special_tokens_map.json") | config
    named = {}
    for name in _NAMED_TOKENS:
        token = special_tokens.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    bos_token_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    declared_bos = config.get("add_bos_token")
    if not isinstance(declared_bos, bool):
        # no flag: the post-processor of tokenizer.json tells, by what it puts around nothing
        declared_bos = backend.encode("").ids[:1] == [bos_token_id]
    template = _folder_template(path, config)
    declared: list[Any] = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for file in ("generation_config.json", "config.json"):
        eos = _read_json(path / file).get("eos_token_id")
        declared.extend(eos if isinstance(eos, list) else [eos])
    return TokenizerSource(
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        named_tokens=named,
        bos_token_id=bos_token_id,
        add_bos_token=bos_token_id is not None and declared_bos,
        eos_token_ids=_eos_token_ids(backend, declared, template),
        chat_template=template,
    )


def _folder_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(backend: BackendTokenizer, declared: Iterable[Any], template: str | None) -> frozenset[int]:
    ids = {token_id for token_id in declared if isinstance(token_id, int)}
    for token in END_OF_TURN_TOKENS:
        token_id = backend.token_to_id(token)
        if token_id is not None and template is not None and token in template:
            ids.add(token_id)
    return frozenset(ids)


def _backend_from_json(file: Path) -> BackendTokenizer:
    try:
        return BackendTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ModelError(f"cannot read {file}: {error}") from error


def _backend_from_transformers(folder: Path, gguf_file: str | None) -> BackendTokenizer:
    from transformers import AutoTokenizer  # late: heavy, and it may import torch

    named = folder / gguf_file if gguf_file else folder
    try:
        loaded = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
    except Exception as error:  # whatever a foreign folder makes it raise
        raise ModelError(f"cannot build a tokenizer from {named}: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, BackendTokenizer):
        raise ModelError(f"the tokenizer of {named} has no fast form; convert it to tokenizer.json")
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object")
    return value
