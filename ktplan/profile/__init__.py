"""Which experts a text uses: corpora, the recorder, the profile file and its report."""

from ktplan.profile.corpus import Corpus, CorpusFile, Document, documents, read_corpus
from ktplan.profile.profile import ActivationProfile

__all__ = ["ActivationProfile", "Corpus", "CorpusFile", "Document", "documents", "read_corpus"]
