"""Configuration of the reducer: one Struct per stage, composed into ``ReducerConfig``.

The gateway embeds it in its TOML under ``[reducer]``; a misspelt key is an error with its path.
"""

from typing import Literal

import msgspec

DocumentOrder = Literal["input", "best_first", "best_last", "cache"]
VolatilePolicy = Literal["report", "move"]
FailureMode = Literal["open", "closed"]


def _check_share(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def _check_at_least(name: str, value: float, limit: float) -> None:
    """Raise ``ValueError`` unless ``value >= limit``."""
    if not value >= limit:
        raise ValueError(f"{name} must be at least {limit}, got {value}")


class RecogniseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Passages that an application writes into its messages itself."""

    enabled: bool = True
    """Look for them where a request names no documents; ``False`` leaves messages as they are."""
    system: bool = False
    """Look into system messages as well; otherwise these are byte-equal in the prompt."""
    min_passages: int = 2
    """Fewer are left as they are."""
    min_chars: int = 80
    """Where the median passage is shorter, they are left as they are: they may be choices to answer with."""
    separators: tuple[str, ...] = ()
    """Texts that stand between passages, e.g. ``"\\n---\\n"``; what is between two of them is a passage."""

    def __post_init__(self) -> None:
        _check_at_least("min_passages", self.min_passages, 1)
        _check_at_least("min_chars", self.min_chars, 1)
        if any(not separator.strip() for separator in self.separators):
            raise ValueError("separators must not hold an empty one or white space alone")


class CleanConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Removal of markup and page furniture; what stays is spans of the received text."""

    enabled: bool = True
    """``False`` keeps every readable passage as received."""
    html: bool = True
    """HTML passages become their text; the main content by trafilatura."""
    min_html_chars: int = 20
    """HTML with less text than this, and less than a twentieth of its source, is kept as received: it is an example."""
    boilerplate: bool = True
    """Lines of navigation words, cookie notices, copyright and licence lines go."""
    min_repeats: int = 3
    """Passages that must share a first or last line for it to be a running header or footer; 0 leaves them."""
    white_space: bool = True
    """Runs of white space in prose become one character of themselves."""

    def __post_init__(self) -> None:
        _check_at_least("min_html_chars", self.min_html_chars, 0)
        if self.min_repeats != 0:
            _check_at_least("min_repeats", self.min_repeats, 2)


class DedupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Removal of passages that say what another passage already says."""

    enabled: bool = True
    """``False`` keeps every readable passage."""
    shingle_size: int = 5
    """Characters of one shingle, counted after white space and punctuation are removed."""
    num_bands: int = 32
    """Bands of the MinHash LSH index; more bands propose more pairs. A sketch has ``num_bands * band_size`` values."""
    band_size: int = 2
    """Values of one band that must agree for a pair to be proposed."""
    min_containment: float = 0.6
    """Share of the shorter passage's shingles that the longer one must hold before the two texts are aligned."""
    min_length_share: float = 0.5
    """A passage inside one more than ``1 / min_length_share`` times as long stays: it says the same in fewer tokens."""
    max_alignments: int = 4000
    """Pairs aligned for one request; the most similar go first, the rest are kept apart."""
    max_merged_share: float = 0.9
    """Most of the different texts of one request that may be merged, from ``MIN_CAPPED`` texts on: more points to a
    template that makes them look alike. The best of the rest are kept apart, and the stage says so."""
    stitch: bool = True
    """Whether chosen windows of one source that overlap become one passage."""
    min_overlap_chars: int = 60
    """Characters that two windows must share to be stitched (Latin letters; a CJK character counts as four)."""
    semantic: bool = True
    """Whether pairs with similar embeddings are verified too. The embeddings are the ones that ranking needs."""
    min_similarity: float = 0.85
    """Similarity of two embeddings from which the texts are aligned."""
    max_neighbours: int = 8
    """Most similar passages that one passage is aligned with."""

    def __post_init__(self) -> None:
        _check_at_least("shingle_size", self.shingle_size, 2)
        _check_at_least("num_bands", self.num_bands, 1)
        _check_at_least("band_size", self.band_size, 1)
        _check_share("min_containment", self.min_containment)
        _check_share("min_length_share", self.min_length_share)
        _check_at_least("max_alignments", self.max_alignments, 1)
        _check_share("max_merged_share", self.max_merged_share)
        _check_at_least("min_overlap_chars", self.min_overlap_chars, 8)
        _check_share("min_similarity", self.min_similarity)
        _check_at_least("max_neighbours", self.max_neighbours, 1)


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relevance of a passage for the question: three signals, each on its own scale, then a weighted mean."""

    lexical_weight: float = 0.3
    """Weight of BM25."""
    semantic_weight: float = 0.6
    """Weight of the embedding similarity; without an encoder its share goes to BM25."""
    encoder_languages: tuple[str, ...] = ("en",)
    """Languages the encoder was trained for; for a question in another one half of its weight goes to BM25. Empty means
    all languages."""
    retriever_weight: float = 0.1
    """Weight of the score that came with the passage; without scores its share goes to the others."""
    window_chars: int = 1200
    """A passage longer than this is scored by its best window (Latin letters; a CJK character counts as four)."""
    max_windows: int = 8
    """Windows of one passage that are embedded; a longer passage embeds the lexically best ones."""
    named_weight: float = 0.1
    """Weight, beside 1 for relevance, of a passage whose subject the question names."""
    link_weight: float = 0.5
    """Share of a best passage's score that goes to a passage whose subject it names; 0 switches these links off."""
    sibling_weight: float = 0.4
    """Share of a best passage's score that goes to the few other passages of its source."""
    num_link_sources: int = 2
    """Best passages whose links are followed."""
    num_mutual_sources: int = 6
    """The next best ones, whose links are followed where they go both ways."""
    max_embedded: int = 512
    """Windows embedded for one request, the lexically best ones: ten thousand passages must not cost minutes."""
    reranker_weight: float = 0.5
    """Share of the cross-encoder's judgement, where one is loaded, beside the fused score."""
    max_reranked: int = 32
    """Passages the cross-encoder reads, the best ones by the fused score."""
    context_weight: float = 0.25
    """Weight of the previous user turn beside a short question that leans on it."""

    def __post_init__(self) -> None:
        for name in ("lexical_weight", "semantic_weight", "retriever_weight"):
            _check_at_least(name, getattr(self, name), 0.0)
        if self.lexical_weight + self.semantic_weight <= 0.0:
            raise ValueError("lexical_weight and semantic_weight must not both be 0")
        _check_at_least("window_chars", self.window_chars, 200)
        _check_at_least("max_windows", self.max_windows, 1)
        _check_at_least("max_embedded", self.max_embedded, 1)
        for name in ("named_weight", "link_weight", "sibling_weight"):
            _check_share(name, getattr(self, name))
        _check_at_least("num_link_sources", self.num_link_sources, 0)
        _check_at_least("num_mutual_sources", self.num_mutual_sources, 0)
        _check_share("context_weight", self.context_weight)
        _check_share("reranker_weight", self.reranker_weight)
        _check_at_least("max_reranked", self.max_reranked, 1)


class SelectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which passages, and how much of them, go into the prompt."""

    relative_threshold: float = 0.7
    """A passage scored below this share of the second best one is noise and is dropped even when budget is free. Counts
    in full when all passages would fit, and less the more the budget cuts by itself."""
    linked_threshold: float = 0.45
    """The same where one of the best passages names another one: the question may need a chain of passages."""
    min_passages: int = 6
    """As many passages, best first, stay at a lower score,"""
    min_passages_threshold: float = 0.3
    """which is this share of the second best one."""
    top_k: int | None = None
    """Most passages in the prompt; ``None`` leaves it to threshold and budget."""
    min_trimmed_tokens: int = 16
    """A passage is cut to sentences only if at least this many tokens of it fit."""

    def __post_init__(self) -> None:
        _check_share("relative_threshold", self.relative_threshold)
        _check_share("linked_threshold", self.linked_threshold)
        _check_at_least("min_passages", self.min_passages, 0)
        _check_share("min_passages_threshold", self.min_passages_threshold)
        _check_at_least("min_trimmed_tokens", self.min_trimmed_tokens, 1)
        if self.top_k is not None:
            _check_at_least("top_k", self.top_k, 1)


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which earlier turns go into the prompt."""

    num_recent_messages: int = 2
    """Messages right before the question that stay verbatim, while they take at most half of the room."""
    max_share: float = 0.5
    """Most of the tokens left beside system, tools and question that history may take while passages need the rest."""
    max_tokens: int = 4096
    """A longer history is compacted even when budget is free."""
    summarizer: Literal["extractive", "model"] = "extractive"
    """``extractive`` takes clauses of the turns word for word; ``model`` asks the served model and checks for facts."""
    summarizer_timeout_s: float = 20.0
    """Most seconds that all summaries of one request by the model may take; then extracts take their place."""
    tool_results: Literal["verbatim", "extract"] = "verbatim"
    """Old tool calls with their results stay whole or go whole; ``extract`` summarises them like other turns."""
    min_recall_score: float = 0.7
    """Relevance for the question, 0 to 1, from which an older turn comes back verbatim."""
    recall_share: float = 0.15
    """Most of the room that the record leaves to what the question needs of older turns; less the more facts there are.
    It stands behind the prefix that requests share: 0 has the most cached, and recalls what there is room for."""

    def __post_init__(self) -> None:
        _check_at_least("num_recent_messages", self.num_recent_messages, 0)
        _check_share("max_share", self.max_share)
        _check_at_least("max_tokens", self.max_tokens, 0)
        _check_at_least("summarizer_timeout_s", self.summarizer_timeout_s, 0.0)
        _check_share("min_recall_score", self.min_recall_score)
        _check_share("recall_share", self.recall_share)


class TemplateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the passages are written into the prompt."""

    document_order: DocumentOrder = "input"
    """``input`` keeps the caller's order, ``best_first`` and ``best_last`` sort by score, ``cache`` shares the longest
    beginning with recently served prompts of the same scope."""
    max_rank_loss: float = 0.5
    """Most that ``cache`` may go against the order by score: 0 is best last, 1 is best first."""
    canonical_tools: bool = True
    """Tools by name and their keys in one order, so that equal tools are equal bytes."""
    volatile_fields: VolatilePolicy = "report"
    """What happens to clock, date, ids, user name and counters in system text: ``report`` leaves the text as it is,
    ``move`` writes their lines behind the documents, where they cost no cached prefix."""
    block_size: int = 16
    """Tokens of one block of the engine's prefix cache."""

    def __post_init__(self) -> None:
        _check_share("max_rank_loss", self.max_rank_loss)
        _check_at_least("block_size", self.block_size, 1)


class FailureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows where a stage fails in a way that nobody foresaw; an expired deadline or a model that fails is none.

    ``open`` leaves the stage out: what came in goes on to the next stage, the budget holds by whole passages and turns
    in order, and the answer says so. ``closed`` refuses the request with an error that names the stage.
    """

    access: Literal["closed"] = "closed"
    """Fixed: what nobody has checked reaches no prompt."""
    recognise: FailureMode = "open"
    """``open``: passages inside plain messages stay as they are."""
    clean: FailureMode = "open"
    dedup: FailureMode = "open"
    rank: FailureMode = "open"
    """``open``: passages stay in the order in which they came."""
    history: FailureMode = "open"
    """``open``: the last turns that fit."""
    select: FailureMode = "open"
    """``open``: whole passages, best first, that fit."""
    template: FailureMode = "closed"
    """``open``: system text and tools stay as they came, and nothing is known of the stable prefix."""


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the embedding model runs."""

    max_cache_bytes: int = 64 * 1024 * 1024
    """Memory for cached vectors, keyed by content; the least recently used go first. 0 switches the cache off."""
    max_batch_tokens: int = 1024
    """Padded tokens of one forward pass; larger batches pad more."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto`` takes bfloat16 where the processor computes it natively."""
    num_threads: int | None = None
    """Threads of one forward pass in this process; ``None`` leaves torch's own choice."""

    def __post_init__(self) -> None:
        _check_at_least("max_cache_bytes", self.max_cache_bytes, 0)
        _check_at_least("max_batch_tokens", self.max_batch_tokens, 1)
        if self.num_threads is not None:
            _check_at_least("num_threads", self.num_threads, 1)


class ReducerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All stages of the reducer."""

    min_prompt_tokens: int = 100
    """A prompt that fits its budget and is no longer than this passes through: less than it costs is to be gained."""
    deadline_s: float | None = None
    """Time limit of one reduction in seconds, unless the request sets one; then the best partial result is sent."""
    recognise: RecogniseConfig = RecogniseConfig()
    clean: CleanConfig = CleanConfig()
    dedup: DedupConfig = DedupConfig()
    rank: RankConfig = RankConfig()
    selection: SelectionConfig = SelectionConfig()
    history: HistoryConfig = HistoryConfig()
    template: TemplateConfig = TemplateConfig()
    encoder: EncoderConfig = EncoderConfig()
    failure: FailureConfig = FailureConfig()

    def __post_init__(self) -> None:
        _check_at_least("min_prompt_tokens", self.min_prompt_tokens, 0)
        if self.deadline_s is not None:
            _check_at_least("deadline_s", self.deadline_s, 0.0)
