"""Texts beside the training data that are only scored."""

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.zero_shot import Unseen, WithUnseen


@pytest.fixture
def data(tmp_path):
  (tmp_path / "other.valid.txt").write_text("One line.\nAnother line.\n")
  own = GrammarDocuments(GrammarData(train=20, valid=4, test=4, shifted=4))
  other = TextDocuments(folder=str(tmp_path), valid=("other.valid*",), unit="line")
  return WithUnseen(own, (Unseen("other", other),))


def test_an_unseen_text_is_a_split_after_those_of_the_data(data):
  assert data.splits() == (*data.data.splits(), "other")
  assert list(data.load("other")) == ["One line.", "Another line."]
  assert list(data.load("valid")) == list(data.data.load("valid"))
  assert data.load("valid").fingerprint == data.data.load("valid").fingerprint


def test_without_unseen_texts_there_are_the_splits_of_the_data():
  own = GrammarDocuments()
  assert WithUnseen(own).splits() == own.splits()
  assert WithUnseen(own).describe() == own.describe()


def test_names_of_splits_are_told_apart(data):
  with pytest.raises(UserError, match="give each text of"):
    WithUnseen(data.data, (Unseen("valid", data.unseen[0].data),))
  with pytest.raises(UserError, match="split"):
    data.load("none")
