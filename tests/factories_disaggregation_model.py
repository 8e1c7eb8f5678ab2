"""A tiny model on disk that an engine can load as it loads a real one."""

from pathlib import Path

from factories_model import make_llama, save_llama
from factories_tokenizer import write_byte_level_folder

from engine.chat_template import ChatTokenizer


def save_tiny_llama(folder: Path) -> Path:
    """A Hugging Face folder: byte-level tokenizer, config, random weights, a window of 512."""
    write_byte_level_folder(folder)
    vocab_size = ChatTokenizer.from_path(folder).tokenizer.vocab_size
    return save_llama(folder, make_llama(vocab_size=vocab_size))
