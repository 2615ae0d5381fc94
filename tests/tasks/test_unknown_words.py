"""The rate of unknown words stands beside the scores of translations and of answers."""

import dataclasses

import tiny_model

from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.tasks.base import Scoring
from compmod_jax.tasks.question_answering import AnsweringConfig


def scores(task, split, monkeypatch):
  """What evaluation says of a split, but for the loss, which is not computed."""
  monkeypatch.setattr(Scoring, "sums", lambda *_: [1.0, 1.0, 1.0])
  return task.evaluate({}, split, decode=False).values


def test_of_translations_it_counts_the_tokens_of_both_sides(tmp_path, monkeypatch):
  data = tiny_model.write_data(tmp_path / "data")
  (tmp_path / "data" / "test.de").write_text("der zebu schläft\nder hund\n")
  (tmp_path / "data" / "test.en").write_text("the zebu sleeps\nthe gnu\n")
  experiment = tiny_model.make_experiment(data)
  task = experiment.task.build(experiment.model)
  # Three of ten words and four ends.
  assert scores(task, "test", monkeypatch)["unknown"] == 100 * 3 / 14
  assert scores(task, "train", monkeypatch)["unknown"] == 0


def test_of_answers_it_counts_the_tokens_of_questions_and_passages(tmp_path, monkeypatch):
  line = '{"format": "extractive", "passage": "%s", "question": "who sleeps", "answers": ["%s"]}\n'
  (tmp_path / "train.jsonl").write_text(line % ("the dog sleeps", "dog") * 4)
  (tmp_path / "valid.jsonl").write_text(line % ("the dog sleeps", "dog"))
  (tmp_path / "test.jsonl").write_text(line % ("the zebu sleeps", "zebu"))
  files = {split: (f"{split}.jsonl",) for split in ("train", "valid", "test")}
  own = QASet("own", "jsonl", str(tmp_path), **files)
  tokens = dataclasses.replace(AnsweringConfig().tokenizer, kind="words", vocab_size=60)
  config = AnsweringConfig(
    data=Mixed((own,)), tokenizer=tokens, batch_questions=2, length=64, answer_length=4
  )
  model = DecoderConfig(decoder_layers=1, dim=8, heads=2, ffn_dim=8, max_length=64)
  task = config.build(model)
  assert scores(task, "valid", monkeypatch)["unknown"] == 0
  found = scores(task, "test", monkeypatch)["unknown"]
  # The word stands in the passage and in the answer.
  assert found == 100 * 2 / int(task.dataset.tokenized("test").tokens.lengths.sum())
