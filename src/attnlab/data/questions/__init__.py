"""Question sets in their published layouts: HotpotQA, FEVER, Bias in Bios, and WikidataQA of BIG-bench."""

from attnlab.data.questions.base import Question, QuestionSet
from attnlab.data.questions.bios import BiosProfession
from attnlab.data.questions.fever import Fever
from attnlab.data.questions.hotpotqa import HotpotQA
from attnlab.data.questions.loading import Questions, question_set
from attnlab.data.questions.wikidata import WikidataQA

__all__ = [
    "BiosProfession",
    "Fever",
    "HotpotQA",
    "Question",
    "QuestionSet",
    "Questions",
    "WikidataQA",
    "question_set",
]
