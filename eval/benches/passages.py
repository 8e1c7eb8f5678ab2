"""A case's chunks as the reducer takes them; for the benches that call it without a gateway."""

from eval.prompts import case_documents
from eval.samples import Case
from reducer.prompt import Passage


def passages_of(case: Case) -> tuple[Passage, ...]:
    """The case's chunks as the reducer takes them."""
    return tuple(Passage(**document) for document in case_documents(case))
