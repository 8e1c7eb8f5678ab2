"""The encoder and its cache; the model itself only where it is unpacked."""

import numpy as np
import pytest
from factories_models import model_path, needs_model

from reducer.config import EncoderConfig
from reducer.encoder import SentenceTransformerEncoder, VectorCache


def vector(value: float, dim: int = 100) -> np.ndarray:
    return np.full(dim, value, dtype=np.float32)


def test_cache_forgets_the_least_recently_used_and_stays_within_its_bytes() -> None:
    cache = VectorCache(3 * 600)
    for key in (b"a", b"b", b"c"):
        cache.put(key, vector(1))
    assert cache.get(b"a") is not None
    cache.put(b"d", vector(2))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert cache.num_bytes == 3 * 600


def test_cache_of_size_0_keeps_nothing() -> None:
    cache = VectorCache(0)
    cache.put(b"a", vector(1))
    assert len(cache) == 0


def test_replacing_a_vector_counts_it_once() -> None:
    cache = VectorCache(10_000)
    cache.put(b"a", vector(1))
    cache.put(b"a", vector(2))
    assert cache.num_bytes == 600
    np.testing.assert_array_equal(cache.get(b"a"), vector(2))


@pytest.fixture(scope="module")
def encoder() -> SentenceTransformerEncoder:
    return SentenceTransformerEncoder(model_path(), EncoderConfig(num_threads=1))


@needs_model
def test_rows_have_length_1_and_similar_texts_are_close(encoder: SentenceTransformerEncoder) -> None:
    vectors = encoder.encode(["A cat sits on the mat.", "A kitten is sitting on a rug.", "Interest rates rose."])
    assert vectors.shape == (3, encoder.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


@needs_model
def test_second_call_comes_from_the_cache_and_is_equal(encoder: SentenceTransformerEncoder) -> None:
    texts = ["one", "two words", "one"]
    first = encoder.encode(texts)
    size = len(encoder.cache)
    np.testing.assert_array_equal(encoder.encode(texts[::-1]), first[::-1])
    assert len(encoder.cache) == size
    np.testing.assert_array_equal(first[0], first[2])


@needs_model
def test_words_beyond_the_model_window_count(encoder: SentenceTransformerEncoder) -> None:
    filler = "The harbour was quiet and the boats were moored. " * 60
    vectors = encoder.encode([filler, filler + "Quantum chromodynamics binds quarks. " * 20, "quarks and gluons"])
    assert vectors[1] @ vectors[2] > vectors[0] @ vectors[2]


@needs_model
def test_no_texts_and_empty_text(encoder: SentenceTransformerEncoder) -> None:
    assert encoder.encode([]).shape == (0, encoder.dim)
    assert np.isfinite(encoder.encode([""])).all()


@needs_model
def test_scopes_share_the_model_and_no_cached_vector() -> None:
    encoder = SentenceTransformerEncoder(model_path())
    acme, globex = encoder.for_scope("acme"), encoder.for_scope("globex")
    vectors = acme.encode(["The cat sat."])
    assert len(encoder.cache) == 1
    assert np.array_equal(globex.encode(["The cat sat."]), vectors)
    assert len(encoder.cache) == 2
    acme.encode(["The cat sat."])
    assert len(encoder.cache) == 2
