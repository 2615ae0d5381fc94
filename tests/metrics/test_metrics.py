"""Scores against sacreBLEU and by hand; intervals and tests on data whose answer is known."""

import math

import numpy as np
import pytest
import sacrebleu

from compmod_jax.core.errors import UserError
from compmod_jax.metrics import bootstrap, text

WORDS = ("the", "a", "dog", "sees", "that", "big", "house", "in", ",", ".", "runs", "Öko", "'", "s")


def corpus(seed: int, sentences: int = 60, noise: float = 0.3):
  """References, and hypotheses in which `noise` of the words are others."""
  rng = np.random.default_rng(seed)
  references, hypotheses = [], []
  for _ in range(sentences):
    words = rng.choice(WORDS, size=rng.integers(1, 14))
    wrong = np.where(rng.random(len(words)) < noise, rng.choice(WORDS, size=len(words)), words)
    references.append(" ".join(words).capitalize())
    hypotheses.append(" ".join(wrong[: rng.integers(len(words) - 1, len(words) + 1)]))
  hypotheses[3] = ""
  return hypotheses, references


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_exactly_those_of_sacrebleu(seed):
  hypotheses, references = corpus(seed)
  expected = {
    "bleu": sacrebleu.corpus_bleu(hypotheses, [references]).score,
    "bleu_lowercase": sacrebleu.corpus_bleu(hypotheses, [references], lowercase=True).score,
    "chrf": sacrebleu.corpus_chrf(hypotheses, [references]).score,
  }
  for metric, value in expected.items():
    assert text.score(metric, hypotheses, references).value == value
  assert expected["bleu"] < expected["bleu_lowercase"]


@pytest.mark.parametrize("metric", ["bleu", "bleu_lowercase", "chrf", "exact_match"])
def test_summed_statistics_of_any_part_give_the_score_of_that_part(metric):
  hypotheses, references = corpus(1, noise=0.1)
  whole = text.sentence_statistics(metric, hypotheses, references)
  part = np.random.default_rng(0).integers(60, size=45)
  chosen = text.Statistics(metric, whole.signature, whole.rows[part])
  direct = text.score(metric, [hypotheses[i] for i in part], [references[i] for i in part])
  assert chosen.score() == direct


def test_signatures_tell_the_settings():
  pair = (["a b"], ["a b"])
  assert "case:mixed|eff:no|tok:13a|smooth:exp|version:" in text.bleu(*pair).signature
  assert "case:lc" in text.bleu_lowercase(*pair).signature
  assert text.chrf(*pair).signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6")
  assert "whitespace:normalised" in text.exact_match(*pair).signature
  assert str(text.exact_match(*pair)).startswith("exact match 100.00 [nrefs:1")


def test_exact_match_is_the_percentage_of_equal_lines():
  score = text.exact_match(["I_RUN I_JUMP", "I_RUN", " a  b ", ""], ["I_RUN I_JUMP", "", "a b", ""])
  assert score.value == 75.0
  assert text.exact_match(["Run"], ["run"]).value == 0.0


@pytest.mark.parametrize("metric", ["bleu", "bleu_lowercase", "chrf", "exact_match"])
def test_the_ends_of_the_scale(metric):
  references = ["the dog sees a cat in the house .", "a small dog runs ."]
  assert text.score(metric, references, references).value == pytest.approx(100)
  assert text.score(metric, ["", ""], references).value == 0


def test_scoring_tokenised_text_prints_nothing(capsys, caplog):
  text.bleu(["the dog runs ."] * 150, ["the dog runs ."] * 150)
  assert capsys.readouterr() == ("", "")
  assert not caplog.records


@pytest.mark.parametrize("metric", ["bleu", "chrf", "exact_match"])
def test_unequal_or_missing_sentences_are_an_error(metric):
  with pytest.raises(UserError, match="1 hypotheses for 2 references"):
    text.score(metric, ["a"], ["a", "b"])
  with pytest.raises(UserError, match="0 references"):
    text.score(metric, [], [])


def test_an_unknown_metric_is_an_error_with_the_nearest_name():
  with pytest.raises(UserError, match="Did you mean 'bleu'"):
    text.score("blue", ["a"], ["a"])  # type: ignore[arg-type]


def test_perplexity_per_token_and_per_word():
  found = text.perplexity(12 * math.log(4), tokens=12, words=6)
  assert found.per_token == pytest.approx(4)
  assert found.per_word == pytest.approx(16)
  assert text.perplexity(1e9, tokens=1, words=1).per_token == math.inf
  assert text.count_words(["a b", "", " c "]) == 3
  with pytest.raises(UserError, match="tokens is 0"):
    text.perplexity(1.0, tokens=0, words=1)


def test_the_interval_of_an_accuracy_is_the_binomial_one():
  rows = np.ones((2000, 2))
  rows[:400, 0] = 0  # 80 % of 2000: standard error sqrt(.8 * .2 / 2000) = 0.894 points
  statistics = text.Statistics("exact_match", "", rows)
  found = text.bootstrap_interval(statistics, seed=1, samples=4000)
  assert found.value == 80.0
  assert found.low == pytest.approx(80 - 1.96 * 0.894, abs=0.15)
  assert found.high == pytest.approx(80 + 1.96 * 0.894, abs=0.15)
  wide = text.bootstrap_interval(statistics, seed=1, samples=4000, level=0.99)
  assert wide.low < found.low < found.high < wide.high


def test_a_ratio_of_sums_has_the_interval_of_resampled_sentences():
  rng = np.random.default_rng(0)
  squares, sizes = rng.random(300), 1 + rng.random(300)
  found = bootstrap.ratio_interval(squares, sizes, seed=1, samples=500)
  again = np.random.default_rng(1)
  drawn = [again.integers(300, size=300) for _ in range(500)]
  ratios = [squares[part].sum() / sizes[part].sum() for part in drawn]
  assert found.value == pytest.approx(squares.sum() / sizes.sum())
  np.testing.assert_allclose([found.low, found.high], np.quantile(ratios, [0.025, 0.975]))


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_the_interval_agrees_with_rescoring_resampled_corpora(metric):
  hypotheses, references = corpus(2)
  statistics = text.sentence_statistics(metric, hypotheses, references)
  found = text.bootstrap_interval(statistics, seed=3, samples=300)
  rng = np.random.default_rng(3)
  rescored = []
  for _ in range(300):
    part = rng.integers(60, size=60)
    resampled = [hypotheses[i] for i in part], [references[i] for i in part]
    rescored.append(text.score(metric, *resampled).value)
  np.testing.assert_allclose([found.low, found.high], np.quantile(rescored, [0.025, 0.975]))
  assert found.low < found.value < found.high
  assert found == text.bootstrap_interval(statistics, seed=3, samples=300)
  assert found != text.bootstrap_interval(statistics, seed=4, samples=300)


def test_resampling_in_parts_gives_the_same_interval(monkeypatch):
  statistics = text.sentence_statistics("bleu", *corpus(2))
  at_once = text.bootstrap_interval(statistics, samples=50)
  monkeypatch.setattr(bootstrap, "_CELLS", 500)
  assert text.bootstrap_interval(statistics, samples=50) == at_once


def test_a_paired_test_finds_a_real_difference_and_none_between_equals():
  _, references = corpus(5, sentences=200)
  worse, better = (
    text.sentence_statistics("bleu", corpus(5, sentences=200, noise=noise)[0], references)
    for noise in (0.5, 0.2)
  )
  found = text.paired_bootstrap(worse, better)
  assert found.difference.value == better.score().value - worse.score().value
  assert 0 < found.difference.low < found.difference.value < found.difference.high
  assert found.p < 0.01
  back = text.paired_bootstrap(better, worse)
  assert back.difference.value == -found.difference.value
  same = text.paired_bootstrap(worse, worse)
  assert (same.difference.value, same.p) == (0.0, 1.0)


def test_a_paired_test_is_right_about_as_often_as_it_says():
  rng = np.random.default_rng(0)
  small = 0
  for seed in range(200):
    rows = [np.stack([rng.random(150) < 0.7, np.ones(150)], 1).astype(float) for _ in range(2)]
    pair = [text.Statistics("exact_match", "", part) for part in rows]
    small += text.paired_bootstrap(*pair, seed=seed, samples=200).p < 0.1
  assert 0.05 <= small / 200 <= 0.16


def test_sentences_without_a_token_change_no_test_and_a_test_set_of_them_has_none():
  nats = np.array([9.0, 8.0, 7.5])
  one, other = (text.loss_statistics(nats + more, [5, 4, 4]) for more in (0.0, [0.5, 0.1, -0.2]))
  # Of 64 resampled test sets one would have no token.
  longer = [
    text.Statistics(s.metric, s.signature, np.pad(s.rows, ((0, 3), (0, 0)))) for s in (one, other)
  ]
  assert text.paired_bootstrap(*longer) == text.paired_bootstrap(one, other)
  assert text.paired_bootstrap(longer[0], longer[0]).p == 1.0
  assert text.bootstrap_interval(longer[1]) == text.bootstrap_interval(other)
  nothing = longer[0].part(np.array([3, 4, 5]))
  assert math.isnan(text.paired_bootstrap(nothing, nothing).p)


def test_a_paired_test_needs_the_same_sentences_and_metric():
  hypotheses, references = corpus(0)
  found = text.sentence_statistics("bleu", hypotheses, references)
  with pytest.raises(UserError, match="one metric"):
    text.paired_bootstrap(found, text.sentence_statistics("chrf", hypotheses, references))
  with pytest.raises(UserError, match="same test set"):
    text.paired_bootstrap(found, text.sentence_statistics("bleu", hypotheses[:9], references[:9]))
  with pytest.raises(UserError, match="level"):
    text.bootstrap_interval(found, level=95)
  with pytest.raises(UserError, match="samples"):
    text.bootstrap_interval(found, samples=0)


def test_a_mean_loss_is_resampled_like_any_other_score():
  rng = np.random.default_rng(0)
  counts = rng.integers(3, 30, size=400)
  nats = rng.normal(2.0, 0.5, size=400) * counts
  statistics = text.loss_statistics(nats, counts)
  assert statistics.score().value == pytest.approx(nats.sum() / counts.sum())
  worse = text.loss_statistics(nats + 0.1 * counts, counts)
  found = text.paired_bootstrap(statistics, worse, samples=200)
  # The difference is the same in every sentence, so resampling cannot move it.
  assert found.difference.low == pytest.approx(0.1) == pytest.approx(found.difference.high)
  part = statistics.part(np.array([3, 3, 5]))
  assert part.score().value == pytest.approx((2 * nats[3] + nats[5]) / (2 * counts[3] + counts[5]))
  np.testing.assert_allclose(statistics.values(statistics.rows), nats / counts)
  with pytest.raises(UserError, match="2 losses for 1 counts"):
    text.loss_statistics([1.0, 2.0], [1.0])
  with pytest.raises(UserError, match="metric is 'loss'"):
    text.score("loss", ["a"], ["a"])
