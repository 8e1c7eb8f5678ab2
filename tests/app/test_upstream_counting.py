"""Counts for upstreams: exact where tokenizer and template are known, else never too low."""

import random
from pathlib import Path
from typing import Any

import pytest
from factories_tokenizer import find_smollm2, write_byte_level_folder

from app.backend_settings import BackendSettings, CountingSettings, ReplicaSettings
from app.backends import upstream_counting
from app.backends.upstream_counting import (
    EstimatingEncoder,
    count_bytes,
    load_counting_encoder,
    openai_encoding,
)
from app.errors import ConfigError, InvalidRequestError
from engine.chat_template import ChatTokenizer
from engine.tokenizer import Tokenizer

SMOLLM2 = find_smollm2()
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Woohoo! It's 3:45 p.m., isn't it?",
    "Straße, Größe, naïve façade — łódź; Việt Nam; İstanbul",
    "快速的棕色狐狸跳过懒狗。東京都は日本の首都です。서울은 대한민국의 수도이다.",
    "Быстрая коричневая лиса. Η γρήγορη αλεπού. الثعلب البني السريع. השועל החום. สุนัขจิ้งจอก नमस्ते",
    "def f(x):\n\t\treturn {'a': [1, 2.50, 0xFF]}  # ok\n\n\n    if x != None:    pass",
    "SGVsbG8gd29ybGQhIFRoaXMgaXMgYmFzZTY0Lg== 550e8400-e29b-41d4-a716-446655440000",
    "👩‍👩‍👧 😀🇧🇪 ㋿ ﷽ ��� \x00\x01 <|im_start|><|endoftext|>",
    "zxqvkj QWERTZ aBcDeF xylophonist queue rhythm syzygy zzz aaaa jazz",
    "    \n\n\n\t\t   ",
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}},
            "required": ["city"],
        },
    },
}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": text} for text in TEXTS],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXTS[0]}],
    [{"role": role, "content": "ok"} for _ in range(40) for role in ("user", "assistant")],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Gent"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": "And tomorrow?"},
    ],
)

# What widespread templates write, with the control tokens of the tokenizer at hand.
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% "
    "endfor %}</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
TEMPLATES = {
    "qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
        "You are a helpful "
        "assistant.{% if tools %}\n\n" + QWEN_TOOLS + "{% endif %}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>\n{{ m.content "
        "}}\n</tool_response>{% else %}"
        "{{ m.content }}" + CALLS + "{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "llama 3": (
        "<|endoftext|><|im_start|>system<|im_end|>\n\n{% if tools %}Environment: ipython\n{% endif %}Cutting Knowledge "
        "Date: December 2023\nToday Date: 26 Jul 2024\n\n<|im_end|>{% if tools %}Given the following functions, please "
        "respond with a JSON for a function call with its proper arguments that best answers the given "
        "prompt.\n\nRespond "
        'in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use '
        "variables.\n\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}<|im_end|>\n\n{{ m.content }}" + CALLS + "<|im_end|>{% endfor %}"
        "<|im_start|>assistant<|im_end|>\n\n"
    ),
    "gpt-oss": (
        "<|im_start|>system<|im_end|>You are ChatGPT, a large language model trained by "
        "OpenAI.\nKnowledge cutoff: 2024-06"
        "\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
        "Channel must be "
        "included for every message.{% if tools %}\nCalls to these tools must go to the commentary "
        "channel: 'functions'."
        "{% endif %}<|im_end|>{% if tools %}<|im_start|>developer<|im_end|># Tools\n\n## "
        "functions\n\nnamespace functions "
        "{{ '{' }}\n\n{% for t in tools %}{{ t | tojson }}{% endfor %}\n\n}<|im_end|>{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}<|im_end|>{{ m.content }}" + CALLS + "<|im_end|>{% endfor %}<|im_start|>assistant"
    ),
}


def make_settings(**counting: Any) -> BackendSettings:
    replicas = (ReplicaSettings(url="http://replica/v1"),)
    return BackendSettings(kind="openai", model="m", replicas=replicas, tokenizer=CountingSettings(**counting))


@pytest.mark.skipif(SMOLLM2 is None, reason="SmolLM2 is not on this machine")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_allowance_covers_widespread_templates(name: str) -> None:
    assert SMOLLM2 is not None
    tokenizer = Tokenizer.from_path(SMOLLM2)
    exact = ChatTokenizer(tokenizer, TEMPLATES[name])
    for count in (lambda text: len(tokenizer.encode(text)), count_bytes):
        estimate = EstimatingEncoder(CountingSettings(), count, counting_name="x")
        for messages in CHATS:
            for tools in ((), [TOOL], [TOOL] * 20):
                assert estimate.count_prompt(messages, tools) >= exact.count_prompt(messages, tools)


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base", "smollm2"])
def test_bytes_are_never_too_few(name: str) -> None:
    if name == "smollm2":
        if SMOLLM2 is None:
            pytest.skip("SmolLM2 is not on this machine")
        encode = Tokenizer.from_path(SMOLLM2).encode
    else:
        encode = openai_encoding(name).encode
    rng = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 12))) for _ in range(6000)]
    words += ["".join(rng.choice("bcdfgklmnprst") + rng.choice("aeiou") for _ in range(4)) for _ in range(2000)]
    for text in (*TEXTS, *words, *(f" {word}" for word in words), *(f"({word.title()})" for word in words)):
        assert count_bytes(text) >= len(encode(text)), text


def test_english_by_bytes_is_at_most_four_times_too_high() -> None:
    encode = openai_encoding("o200k_base").encode
    text = "The committee met on Tuesday and decided to repair the old bridge before the winter. " * 20
    assert len(encode(text)) <= count_bytes(text) < 4 * len(encode(text))


def test_a_folder_with_a_template_is_exact(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "model", config={"chat_template": "{{ messages[0].content }}!"})
    encoder = load_counting_encoder(make_settings(name=str(folder)))
    assert encoder.counting == "exact"
    messages = [{"role": "user", "content": "hello"}]
    assert encoder.count_prompt(messages) == len(encoder.encode_chat(messages))
    image = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, image]}]
    assert encoder.count_prompt(parts) == encoder.count_prompt(messages) + 85
    without = load_counting_encoder(make_settings(name=str(folder), use_chat_template=False))
    assert "template estimated" in without.counting
    assert without.count_prompt(messages) > encoder.count_prompt(messages)


def test_openais_encodings_take_look_alikes_for_text_and_give_text_back() -> None:
    encoder = load_counting_encoder(make_settings(name="o200k_base"))
    text = "<|endoftext|> Grüße 你好 \ud800"
    assert encoder.count_text(text) == len(encoder.encode_text(text)) > 5
    assert encoder.decode(encoder.encode_text("Grüße 你好 😀")) == "Grüße 你好 😀"
    with pytest.raises(InvalidRequestError, match="template"):
        encoder.encode_chat([{"role": "user", "content": "x"}])


def test_without_a_tokenizer_there_are_counts_but_no_ids() -> None:
    encoder = load_counting_encoder(make_settings())
    assert encoder.counting == "utf-8 bytes by script (never too few)"
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        encoder.encode_text("x")
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        encoder.decode([1])


def test_names_arguments_and_schemas_count_as_well() -> None:
    encoder = load_counting_encoder(make_settings(name="o200k_base"))
    plain = encoder.count_prompt([{"role": "assistant", "content": "x"}])
    for fields in (
        {"name": "someone with a name"},
        {"refusal": "I cannot say that."},
        {"reasoning_content": "Let me think about it."},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ):
        assert encoder.count_prompt([{"role": "assistant", "content": "x", **fields}]) > plain + 4


def test_a_tokenizer_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match=r"backend\.tokenizer\.name '/nowhere'"):
        load_counting_encoder(make_settings(name="/nowhere"))


def test_a_long_text_has_the_same_tokens_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = openai_encoding("o200k_base").encode
    text = "Die Brücke, gebaut 1904 (und 1951), ist: 12 m breit… 桥 很 长。It's   wide!\n\n " * 400
    whole = encode(text)
    monkeypatch.setattr(upstream_counting, "MAX_ENCODED_CHARS", 5000)
    assert encode(text) == whole
    assert len(encode("字" * 20_000)) > 5000


@pytest.mark.parametrize("ending", ["", "\ud800"])
def test_a_text_with_more_tokens_than_the_package_takes_at_once_is_counted(ending: str) -> None:
    encode = openai_encoding("o200k_base").encode
    words = random.Random(0).choices([chr(number) for number in range(0x20000, 0x20400)], k=400)
    line = "".join(words) + " and "
    num_lines = 200_000 // len(encode(line)) + 2
    assert len(encode(line * num_lines + ending)) >= num_lines * len(encode(line)) > 200_000
