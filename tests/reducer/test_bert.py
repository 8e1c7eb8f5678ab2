"""The own forward pass of BERT encoders against transformers and sentence-transformers."""

import pytest
import torch
from factories_models import model_path, needs_model
from transformers import BertConfig, BertModel

from reducer.bert import BertForward, read_bert


def small_bert(**changes: object) -> BertModel:
    torch.manual_seed(3)
    settings = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    return BertModel(BertConfig(**{**settings, **changes}), add_pooling_layer=False).eval()


def token_ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def reference(model: BertModel, texts: list[list[int]]) -> torch.Tensor:
    """Each text alone, mean of its tokens."""
    return torch.stack([model(torch.tensor([text])).last_hidden_state[0].mean(0) for text in texts])


@pytest.mark.parametrize("lengths", [(1,), (5, 9, 9, 9, 30), (64, 3, 64), (7,) * 20], ids=str)
def test_vectors_equal_those_of_transformers(lengths: tuple[int, ...]) -> None:
    model, texts = small_bert(), token_ids(*lengths)
    with torch.inference_mode():
        found = BertForward(model, torch.float32).embed(texts)
        torch.testing.assert_close(found, reference(model, texts), atol=2e-5, rtol=1e-4)


def test_a_text_has_one_vector_whatever_stands_beside_it() -> None:
    texts = token_ids(12, 12, 40)
    forward = BertForward(small_bert(), torch.float32)
    with torch.inference_mode():
        together = forward.embed(texts)
        alone = torch.cat([forward.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)


def test_bfloat16_is_close() -> None:
    model, texts = small_bert(), token_ids(5, 9, 30)
    with torch.inference_mode():
        found = BertForward(model, torch.bfloat16).embed(texts)
        assert torch.cosine_similarity(found, reference(model, texts)).min() > 0.999


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"is_decoder": True}], ids=str)
def test_other_models_are_left_to_their_own_code(changes: dict[str, object]) -> None:
    assert BertForward.can_run(small_bert())
    assert not BertForward.can_run(small_bert(**changes))


@needs_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_encoder_is_run_here_and_agrees_with_sentence_transformers(dtype: torch.dtype) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_path()), device="cpu", local_files_only=True)
    texts = [
        "",
        "A cat.",
        "東京は日本の首都です。",
        "The harbour was quiet, and 3 boats were moored. " * 8,
        "word " * 900,
    ]
    expected = torch.tensor(model.encode(texts))
    encoder = read_bert(model, dtype)
    assert encoder is not None
    inputs, lengths = encoder.read(texts)
    assert max(lengths) == model.max_seq_length
    with torch.inference_mode():
        assert torch.cosine_similarity(encoder.embed(inputs), expected).min() > 0.999


@needs_model
def test_a_model_with_another_pooling_is_left_to_its_own_code() -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling

    model = SentenceTransformer(str(model_path()), device="cpu", local_files_only=True)
    other = SentenceTransformer(modules=[model[0], Pooling(384, pooling_mode="cls")], device="cpu")
    assert read_bert(other, torch.float32) is None
