"""Small tokenizers for tests, written as real GGUF files and Hugging Face folders, and texts hard to encode."""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BackendTokenizer

from engine.chat_template import ChatTokenizer
from engine.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKENS = ("<think>", "</think>")

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 9 o'clock; we'll see, they've said I'd go.",
    "Größe, café, naïve, Ångström, Ærø, İstanbul, ŁÓDŹ, ñandú",
    "Быстрая коричневая лиса перепрыгивает через ленивую собаку.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "השועל החום המהיר קופץ מעל הכלב העצלן",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ٠١٢٣٤٥٦٧٨٩",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है। १२३",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "敏捷的棕色狐狸跳过了懒狗。价格是 １２３４ 元，2024年5月3日。",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ、ひらがな、漢字。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다.",
    "ជ្រូក እንስሳ ქართული հայերեն বাংলা தமிழ் తెలుగు ಕನ್ನಡ",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ☃︎ ♥️ 🧑🏿‍🚀 e\u0301 \u200d\u200b\ufeff",
    "def f(x):\n\tif x != 0:\n        return {'a': [1, 2.5e-3], \"b\": x**2}  # note\n\n\n    pass\r\n",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0xDEADBEEF 2024-01-31T23:59:59Z ½ ² Ⅷ",
    " ",
    "  \t \n\n  \n\n\n\t\t   x  \u00a0\u3000\u2003 y   \r\n\r\n",
    "a\n\n2024\n   2024\n\n\n 7",
    "!!!???...---___***///\\\\\\|||~~~```\"\"\"'''«»“”‘’„…—–",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt",
    "\x00\x01\x07\x1b[0m\x7f\x85 \U0010ffff \ue000\uf8ff \ufffd",
    "antidisestablishmentarianism" * 5 + "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n<think> hm </think><|im_end|><|endoftext|><|im_st <|",
)


@functools.cache
def _trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def write_gguf_tokenizer(
    path: Path,
    *,
    pre: str = "gpt-2",
    model: str = "gpt2",
    template: str | None = None,
    control_tokens: Sequence[str] = CONTROL_TOKENS,
    user_defined_tokens: Sequence[str] = USER_DEFINED_TOKENS,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    add_bos: bool | None = None,
) -> Path:
    """A GGUF file with a byte-level BPE vocabulary of about 700 tokens and no tensors."""
    vocab, merges = _trained()
    tokens = [*control_tokens, *user_defined_tokens, *sorted(vocab, key=lambda token: vocab[token])]
    types = [gguf.TokenType.CONTROL] * len(control_tokens) + [gguf.TokenType.USER_DEFINED] * len(user_defined_tokens)
    types += [gguf.TokenType.NORMAL] * len(vocab)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(tokens.index(eos))
    if bos is not None:
        writer.add_bos_token_id(tokens.index(bos))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gemma_gguf(path: Path) -> Path:
    """A GGUF file with a small vocabulary as of Gemma 3: no merges, runs of spaces, byte fallback."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, "[multimodal]", "\n", "\n\n", "\n\n\n", "  ", "   ", "    "]
    tokens += [*(f"<0x{byte:02X}>" for byte in range(256)), "er", "the", "▁the", "in", "ing", "▁quick", "th", "qu"]
    tokens += [
        "▁t",
        "▁th",
        "▁q",
        "▁qu",
        "ick",
        "ck",
        "▁quic",
        "▁▁▁▁▁",
        "<end_of_turn>",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    control = {*special, "<end_of_turn>"}
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    kinds = dict.fromkeys(control, gguf.TokenType.CONTROL) | {"[multimodal]": gguf.TokenType.USER_DEFINED}
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level_folder(path: Path, *, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A Hugging Face folder with byte-level BPE; ``files`` are further JSON files by stem."""
    vocab, merges = _trained()
    backend = BackendTokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in USER_DEFINED_TOKENS])
    return _write_folder(path, backend, config if config is not None else {"eos_token": "<|im_end|>"}, files)


def write_sentencepiece_folder(path: Path, *, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A Hugging Face folder as of Llama 2: word-start marks, byte fallback, BOS by post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁fox", *"abcdefghijklmnopqrstuvwxyz<>/.,"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for word in ("▁the", "▁fox"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
            merges.append((word[: end - 1], word[end - 1]))
    backend = BackendTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    default = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    return _write_folder(path, backend, config if config is not None else default, files)


def write_unigram_folder(path: Path) -> Path:
    """A Hugging Face folder with a vocabulary that is searched without merges, control tokens included."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((character, -3.0) for character in "abcdefgs</>")]
    backend = BackendTokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "</s>")])
    return _write_folder(path, backend, {"eos_token": "</s>", "unk_token": "<unk>"}, {})


def _write_folder(path: Path, backend: BackendTokenizer, config: dict[str, Any], files: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for stem, value in {"tokenizer_config": config, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


def make_chat_tokenizer(folder: Path, *, template: str | None = None, **options: Any) -> ChatTokenizer:
    """Chat tokenizer over a small GGUF vocabulary; ``options`` as for ``write_gguf_tokenizer``."""
    return ChatTokenizer(Tokenizer.from_path(write_gguf_tokenizer(folder / "tiny.gguf", **options)), template)


def find_smollm2() -> Path | None:
    """The default language model in the cache folder, if it has been pulled."""
    base = os.environ.get("XDG_CACHE_HOME")
    default = (Path(base) if base else Path.home() / ".cache") / "firsttoken"
    cache = Path(os.environ.get("FIRSTTOKEN_CACHE") or default)
    file = cache / "models" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return file if file.is_file() else None
