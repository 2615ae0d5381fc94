"""Beam search, greedy search and sampling on toy models whose every answer can be worked out."""

import itertools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import stats

from compmod_jax.core.errors import UserError
from compmod_jax.decoding import DecodeConfig, beam_search, decode, greedy, override, sample
from compmod_jax.decoding.candidates import block_size, top_candidates
from compmod_jax.decoding.config import DecodeOptions, GenerationOptions

PAD, BOS, EOS, VOCAB = 0, 1, 2, 7
NEVER = (PAD, BOS)
WIDTH, LONGEST = 6, 4
BATCH = 24


# Toy models. `logits[b]` of the table model depend on the last token only; the recurrent one has a
# real state, an input of its own for every example, and notes its states in the cache.


def table_cache(seed: int, batch: int = BATCH, sharpness: float = 2.0):
  rng = np.random.default_rng(seed)
  table = rng.normal(size=(batch, 1, VOCAB, VOCAB)) * sharpness
  return {"table": table.astype(np.float32)}


def table_step(cache, tokens):
  return jax.vmap(lambda table, row: table[0][row])(cache["table"], tokens), cache


def recurrent_weights():
  rng = np.random.default_rng(7)
  shapes = {"embed": (VOCAB, WIDTH), "recur": (WIDTH, WIDTH), "out": (WIDTH, VOCAB)}
  return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


WEIGHTS = recurrent_weights()


def recurrent_cache(seed: int, beams: int, batch: int = BATCH, longest: int = LONGEST):
  rng = np.random.default_rng(seed)
  return {
    "state": np.zeros((batch, beams, WIDTH), np.float32),
    "notes": np.zeros((batch, beams, longest, WIDTH), np.float32),
    "input": rng.normal(size=(batch, 1, WIDTH)).astype(np.float32),
    "position": np.zeros((), np.int32),
  }


def recurrent_step(cache, tokens):
  embedded = jnp.asarray(WEIGHTS["embed"])[tokens]
  state = jnp.tanh(cache["state"] @ WEIGHTS["recur"] + embedded + cache["input"])
  notes = cache["notes"].at[:, :, cache["position"]].set(state)
  cache = cache | {"state": state, "notes": notes, "position": cache["position"] + 1}
  return state @ WEIGHTS["out"] * 1.5, cache


def notes(cache):
  return {"notes": cache["notes"]}


def recurrent_rescore(inputs, tokens):
  """Log probability and states of one sequence (end token included), from scratch in numpy."""
  state, total, states = np.zeros(WIDTH), 0.0, []
  for before, token in itertools.pairwise([BOS, *tokens]):
    state = np.tanh(state @ WEIGHTS["recur"] + WEIGHTS["embed"][before] + inputs)
    logits = (state @ WEIGHTS["out"] * 1.5).astype(np.float64)
    total += logits[token] - np.logaddexp.reduce(logits)
    states.append(state)
  return total, np.stack(states)


def table_rescore(table, tokens):
  table = np.asarray(table, np.float64)
  log_probs = table - np.logaddexp.reduce(table, axis=-1, keepdims=True)
  return sum(log_probs[a, b] for a, b in itertools.pairwise([BOS, *tokens]))


def every_sequence(limit: int):
  """All sequences of allowed tokens that end in EOS and have at most `limit` tokens."""
  inner = [token for token in range(VOCAB) if token not in (*NEVER, EOS)]
  for length in range(limit):
    for prefix in itertools.product(inner, repeat=length):
      yield (*prefix, EOS)


def sequences(found, example: int) -> list[tuple[int, ...]]:
  """The hypotheses of an example that exist, without padding."""
  rows = zip(found.tokens[example], found.lengths[example], found.scores[example], strict=True)
  return [tuple(np.asarray(t)[: int(n)].tolist()) for t, n, score in rows if score > -np.inf]


def run(search, step, cache, **options):
  """`search` under jit, with this file's tokens; `limit` defaults to `LONGEST` for every row."""
  batch = jax.tree.leaves(cache)[0].shape[0]
  limit = np.asarray(options.pop("limit", np.full(batch, LONGEST)), np.int32)
  settings = {"batch": batch, "max_length": LONGEST, "bos": BOS, "eos": EOS, "forbidden": NEVER}
  traced = {name: options.pop(name) for name in ("rng",) if name in options}
  fn = jax.jit(
    lambda cache, limit, traced: search(step, cache, limit=limit, **settings | options, **traced)
  )
  return jax.device_get(fn(cache, limit, traced))


def plain_beam_search(table, beams: int, limit: int, penalty: float, stop: str):
  """The same algorithm as a loop over lists, in float64."""
  table = np.asarray(table, np.float64)
  log_probs = table - np.logaddexp.reduce(table, axis=-1, keepdims=True)
  living, finished = [((), 0.0)], []
  for place in range(1, limit + 1):
    allowed = [EOS] if place == limit else [t for t in range(VOCAB) if t not in NEVER]
    grown = [
      ((*tokens, t), score + log_probs[(BOS, *tokens)[-1], t])
      for tokens, score in living
      for t in allowed
    ]
    grown = sorted(grown, key=lambda item: -item[1])
    ended = [item for item in grown[:beams] if item[0][-1] == EOS]
    finished += [(tokens, score / len(tokens) ** penalty) for tokens, score in ended]
    living = [item for item in grown if item[0][-1] != EOS][:beams]
    if stop == "filled" and len(finished) >= beams:
      break
  return sorted(finished, key=lambda item: -item[1])[:beams]


# Beam search


@pytest.mark.parametrize(
  ("penalty", "stop"), [(0.0, "filled"), (1.0, "filled"), (1.0, "bound"), (2.0, "bound")]
)
def test_beam_search_with_enough_beams_is_exhaustive(penalty, stop):
  everything = list(every_sequence(LONGEST))
  beams = len(everything)
  cache = recurrent_cache(0, beams, batch=3)
  found = run(
    beam_search, recurrent_step, cache, beams=beams, n_best=9, length_penalty=penalty, stop=stop
  )
  for b in range(3):
    inputs = np.asarray(cache["input"][b, 0])
    scores = {s: recurrent_rescore(inputs, s)[0] / len(s) ** penalty for s in everything}
    best = sorted(scores, key=lambda s: -scores[s])[:9]
    assert sequences(found, b) == best
    np.testing.assert_allclose(found.scores[b], [scores[s] for s in best], rtol=1e-5)


@pytest.mark.parametrize(
  ("penalty", "stop"), [(0.0, "limit"), (1.0, "limit"), (1.0, "filled"), (2.0, "filled")]
)
def test_beam_search_agrees_with_a_plain_loop(penalty, stop):
  cache = table_cache(1)
  limit = 1 + np.arange(BATCH) % 9
  found = run(
    beam_search,
    table_step,
    cache,
    beams=3,
    n_best=3,
    max_length=9,
    limit=limit,
    length_penalty=penalty,
    stop=stop,
  )
  for b in range(BATCH):
    expected = plain_beam_search(cache["table"][b, 0], 3, limit[b], penalty, stop)
    assert sequences(found, b) == [tokens for tokens, _ in expected]
    np.testing.assert_allclose(found.scores[b, : len(expected)], [s for _, s in expected], 1e-5)


@pytest.mark.parametrize(("penalty", "n_best"), [(0.0, 1), (0.6, 1), (1.0, 2), (2.0, 1)])
def test_the_bound_changes_nothing_but_the_time(penalty, n_best):
  cache = table_cache(2, batch=200)
  options = {"beams": 4, "n_best": n_best, "max_length": 12, "length_penalty": penalty}
  limit = np.full(200, 12)
  early = run(beam_search, table_step, cache, limit=limit, stop="bound", **options)
  late = run(beam_search, table_step, cache, limit=limit, stop="limit", **options)
  jax.tree.map(np.testing.assert_array_equal, early, late)


@pytest.mark.parametrize(("stop", "most"), [("filled", 4), ("bound", 8), ("limit", 40)])
def test_search_stops_when_every_example_is_done(stop, most):
  table = np.zeros((2, 1, VOCAB, VOCAB), np.float32)
  table[..., EOS] = 4.0  # ends are likely everywhere
  steps = 0

  def count():
    nonlocal steps
    steps += 1

  def counted(cache, tokens):
    jax.debug.callback(count)
    return table_step(cache, tokens)

  options = {"max_length": 50, "limit": [40, 3], "forbidden": (), "stop": stop}
  run(beam_search, counted, {"table": table}, beams=2, **options)
  jax.effects_barrier()
  assert steps == most if stop == "limit" else 1 <= steps <= most


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_one_beam_is_greedy_search(penalty):
  cache = recurrent_cache(3, 1, longest=12)
  options = {"max_length": 12, "limit": np.full(BATCH, 12), "length_penalty": penalty}
  beam = run(beam_search, recurrent_step, cache, beams=1, record=notes, **options)
  walk = run(greedy, recurrent_step, cache, record=notes, **options)
  np.testing.assert_array_equal(beam.tokens, walk.tokens)
  np.testing.assert_array_equal(beam.lengths, walk.lengths)
  np.testing.assert_allclose(beam.scores, walk.scores, rtol=1e-5)
  np.testing.assert_allclose(beam.records["notes"], walk.records["notes"], rtol=1e-6)


@pytest.mark.parametrize("stop", ["filled", "bound"])
def test_a_hypothesis_has_its_own_score_and_records(stop):
  beams = 4
  cache = recurrent_cache(4, beams, longest=10)
  found = run(
    beam_search,
    recurrent_step,
    cache,
    beams=beams,
    n_best=beams,
    max_length=10,
    limit=np.full(BATCH, 10),
    stop=stop,
    record=notes,
  )
  lengths = set()
  for b in range(BATCH):
    hypotheses = sequences(found, b)
    assert len(hypotheses) == len(set(hypotheses)) == beams
    assert (np.diff(found.scores[b]) <= 0).all()
    for n, tokens in enumerate(hypotheses):
      total, states = recurrent_rescore(np.asarray(cache["input"][b, 0]), tokens)
      np.testing.assert_allclose(found.scores[b, n], total / len(tokens), rtol=1e-4)
      kept = found.records["notes"][b, n, : len(tokens)]
      np.testing.assert_allclose(kept, states, rtol=1e-4, atol=1e-5)
      lengths.add(len(tokens))
  assert len(lengths) > 3  # otherwise this test would prove little


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_no_hypothesis_is_longer_than_its_limit_or_holds_a_forbidden_token(method):
  limit = np.arange(BATCH) % 6
  config = DecodeConfig(method=method, beams=3, n_best=1 if method == "greedy" else 3)
  rng = {"rng": jax.random.key(0)} if method == "sample" else {}
  cache = table_cache(5, sharpness=0.3)
  cache["table"][..., NEVER] += 3.0
  cache["table"][..., EOS] -= 4.0

  def search(step, cache, **options):
    return decode(step, cache, config, **options)

  cache |= {"unused": np.zeros((BATCH, config.width, 2), np.float32)}
  found = run(search, table_step, cache, limit=limit, max_length=5, **rng)
  assert found.records is None
  assert not np.isin(found.tokens, [BOS]).any()
  for b in range(BATCH):
    assert (found.lengths[b] <= limit[b]).all()
    for tokens in sequences(found, b):
      assert len(tokens) == 0 or tokens[-1] == EOS
      assert EOS not in tokens[:-1]
      assert PAD not in tokens
    after = np.arange(5)[None] >= found.lengths[b][:, None]
    assert (found.tokens[b][after] == PAD).all()
  filler = limit == 0
  assert (found.scores[filler, 0] == 0).all()
  assert (found.lengths[filler] == 0).all()
  assert (found.scores[~filler, 0] < 0).all()


def test_places_without_a_hypothesis_are_empty():
  found = run(beam_search, table_step, table_cache(6, batch=1), beams=3, n_best=3, limit=[1])
  assert sequences(found, 0) == [(EOS,)]
  assert found.scores[0, 1:].tolist() == [-np.inf, -np.inf]
  assert found.lengths[0].tolist() == [1, 0, 0]
  assert (found.tokens[0, 1:] == PAD).all()


def test_ties_go_to_the_better_placed_beam_and_the_lower_token():
  cache = {"table": np.zeros((2, 1, VOCAB, VOCAB), np.float32)}
  found = run(beam_search, table_step, cache, beams=3, n_best=3, limit=[3, 3], length_penalty=0.0)
  assert sequences(found, 0) == [(2,), (3, 2), (3, 3, 2)]
  assert sequences(found, 1) == sequences(found, 0)


def test_results_do_not_depend_on_the_other_examples():
  cache = recurrent_cache(8, 3, longest=9)
  options = {"beams": 3, "n_best": 2, "max_length": 9}
  together = run(beam_search, recurrent_step, cache, limit=np.full(BATCH, 9), **options)
  part = {name: leaf[5:8] if leaf.ndim else leaf for name, leaf in cache.items()}
  apart = run(beam_search, recurrent_step, part, limit=np.full(3, 9), **options)
  np.testing.assert_array_equal(together.tokens[5:8], apart.tokens)
  np.testing.assert_allclose(together.scores[5:8], apart.scores, rtol=1e-5)


def test_a_sharded_batch_gives_the_same_hypotheses():
  devices = min(jax.device_count(), 4)
  mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
  cache = recurrent_cache(9, 3)
  split = {
    name: jax.device_put(
      leaf, NamedSharding(mesh, PartitionSpec("data") if leaf.ndim else PartitionSpec())
    )
    for name, leaf in cache.items()
  }
  here = run(beam_search, recurrent_step, cache, beams=3, record=notes)
  there = run(beam_search, recurrent_step, split, beams=3, record=notes)
  np.testing.assert_array_equal(here.tokens, there.tokens)
  np.testing.assert_allclose(here.records["notes"], there.records["notes"], rtol=1e-5, atol=1e-6)


# The choice of candidates


@pytest.mark.parametrize("vocab", [9, 1024, 1031, 3000])
@pytest.mark.parametrize("forbidden", [(), (0, 5, 8, 1030, 5000)])
def test_candidates_are_those_of_a_full_sort(vocab, forbidden):
  rng = np.random.default_rng(vocab)
  logits = rng.integers(-9, 9, size=(6, 3, vocab)).astype(np.float32)  # many ties
  offsets = rng.integers(-4, 1, size=(6, 3)).astype(np.float32)
  offsets[0, 1:] = -np.inf
  scores, beams, types = jax.jit(top_candidates, static_argnums=(2, 3))(
    logits, offsets, 6, forbidden
  )
  logits[..., [token for token in forbidden if token < vocab]] = -np.inf
  totals = (logits + offsets[..., None]).reshape(6, -1)
  order = np.argsort(-totals, axis=1, kind="stable")[:, :6]
  np.testing.assert_array_equal(scores, np.take_along_axis(totals, order, 1))
  np.testing.assert_array_equal(np.asarray(beams) * vocab + types, order)


def test_the_best_candidates_may_be_sliced_without_a_sort_of_all():
  def best(logits, offsets):
    scores, _, types = top_candidates(logits, offsets, 6, NEVER)
    return scores[:, :3], types[:, :3]

  logits = jax.ShapeDtypeStruct((4, 3, 2048), jnp.float32)
  program = jax.jit(best).lower(logits, jax.ShapeDtypeStruct((4, 3), jnp.float32)).compile()
  sorts = re.findall(r"\[4,(\d+)\]\S* sort\(|\[4,(\d+)\]\S*\) sort\(", program.as_text())
  assert all(int(size or pair) <= 6 for size, pair in sorts)  # a few candidates, never a block


def test_blocks_divide_the_vocabulary_where_they_can():
  assert block_size(8000) == 125
  assert block_size(1031) == 128  # a prime
  assert block_size(500) is None


# Sampling


def first_tokens(probabilities, draws=8192, **options):
  """Counts of the first sampled token when its distribution is `probabilities` over 2, 3, ..."""
  table = np.full((1, 1, VOCAB, VOCAB), -np.inf, np.float32)
  table[..., EOS] = 0.0
  table[0, 0, BOS, 2 : 2 + len(probabilities)] = np.log(probabilities)
  cache = {"table": np.repeat(table, 64, 0)}
  found = run(
    sample,
    table_step,
    cache,
    rng=jax.random.key(11),
    n_best=draws // 64,
    max_length=2,
    limit=np.full(64, 2),
    **options,
  )
  return np.bincount(found.tokens[..., 0].ravel(), minlength=VOCAB)[2 : 2 + len(probabilities)]


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"top_k": 100}, [0.1, 0.4, 0.3, 0.15, 0.05]),
    ({"temperature": 0.5}, [0.01, 0.16, 0.09, 0.0225, 0.0025]),
    ({"top_k": 2}, [0.0, 0.4, 0.3, 0.0, 0.0]),
    ({"top_p": 0.8}, [0.0, 0.4, 0.3, 0.15, 0.0]),
    ({"top_k": 3, "top_p": 0.5}, [0.0, 0.4, 0.3, 0.0, 0.0]),
  ],
)
def test_sampled_tokens_have_their_probabilities(options, expected):
  counts = first_tokens([0.1, 0.4, 0.3, 0.15, 0.05], **options)
  expected = np.array(expected) / np.sum(expected)
  inside = expected > 0
  assert (counts[~inside] == 0).all()
  if inside.sum() > 1:
    assert stats.chisquare(counts[inside], expected[inside] * counts.sum()).pvalue > 1e-3


def test_samples_come_best_first_with_the_models_own_score_and_their_records():
  cache = recurrent_cache(12, 5, batch=4, longest=8)
  found = run(
    sample,
    recurrent_step,
    cache,
    rng=jax.random.key(1),
    n_best=5,
    max_length=8,
    limit=np.full(4, 8),
    temperature=0.8,
    top_k=4,
    record=notes,
  )
  assert (np.diff(found.scores, axis=1) <= 0).all()
  for b, n in itertools.product(range(4), range(5)):
    tokens = sequences(found, b)[n]
    total, states = recurrent_rescore(np.asarray(cache["input"][b, 0]), tokens)
    np.testing.assert_allclose(found.scores[b, n], total / len(tokens), rtol=1e-4)
    kept = found.records["notes"][b, n, : len(tokens)]
    np.testing.assert_allclose(kept, states, rtol=1e-4, atol=1e-5)


def test_a_key_fixes_the_samples():
  settings = {"batch": BATCH, "n_best": 2, "max_length": LONGEST, "bos": BOS, "eos": EOS}
  limit = np.full(BATCH, LONGEST)
  draw = jax.jit(
    lambda cache, rng: sample(table_step, cache, rng=rng, limit=limit, **settings).tokens
  )
  first, again, other = (
    np.asarray(draw(table_cache(13), jax.random.key(seed))) for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


# Settings


@pytest.mark.parametrize(
  ("fields", "name"),
  [
    ({"method": "beams"}, "method"),
    ({"stop": "limits"}, "stop"),
    ({"beams": 0}, "beams"),
    ({"n_best": 0}, "n_best"),
    ({"n_best": 6}, "n_best"),
    ({"n_best": 2, "method": "greedy"}, "n_best"),
    ({"length_penalty": -0.5}, "length_penalty"),
    ({"max_ratio": 0.0, "max_extra": 0}, "max_ratio"),
    ({"max_ratio": float("inf")}, "max_ratio is inf; it must be finite"),
    ({"max_extra": -1}, "max_extra"),
    ({"temperature": 0.0}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
  ],
)
def test_a_bad_setting_is_named(fields, name):
  with pytest.raises(UserError, match=name):
    DecodeConfig(**fields)


@pytest.mark.parametrize(
  ("config", "fields", "message"),
  [
    (DecodeConfig(), {"temperature": 2.0}, r"temperature is given.*\(--method sample\)"),
    (DecodeConfig(), {"top_k": 3}, "top_k is given"),
    (DecodeConfig("greedy"), {"top_p": 0.5}, "top_p is given"),
    (DecodeConfig("greedy"), {"beams": 8}, r"the method is 'greedy'.*\(--method beam\)"),
    (DecodeConfig(), {"method": "sample", "beams": 8}, "beams is given"),
    (DecodeConfig(), {"recode_size": 0.5}, "recode_size is given, but no recode_layer"),
    (DecodeConfig(recode_layer=0), {"recode_layer": None, "recode_steps": 2}, "recode_steps"),
  ],
)
def test_a_setting_without_effect_is_named(config, fields, message):
  with pytest.raises(UserError, match=message):
    override(config, fields)


def test_settings_have_effect_where_the_method_is_theirs():
  sampled = override(DecodeConfig(), {"method": "sample", "temperature": 2.0, "top_k": 3})
  assert sampled == DecodeConfig("sample", temperature=2.0, top_k=3)
  assert override(DecodeConfig("greedy"), {"method": "beam", "beams": 8}).width == 8
  assert override(DecodeConfig(recode_layer=0), {"recode_size": 0.5}).recode_size == 0.5


@pytest.mark.parametrize(
  ("options", "name"),
  [
    ({"beams": 0}, "beams"),
    ({"n_best": 3}, "n_best"),
    ({"max_length": 0}, "max_length"),
    ({"eos": BOS}, "forbidden"),
    ({"length_penalty": -1.0}, "length_penalty"),
    ({"stop": "never"}, "stop"),
  ],
)
def test_a_bad_argument_of_beam_search_is_named(options, name):
  with pytest.raises(UserError, match=name):
    run(beam_search, table_step, table_cache(0, batch=2), **{"beams": 2} | options)


def test_a_cache_for_another_number_of_beams_is_refused():
  with pytest.raises(UserError, match=r"cache\['notes'\] has shape \(24, 3"):
    run(beam_search, recurrent_step, recurrent_cache(0, 3), beams=4)


def test_sampling_without_a_key_is_refused():
  config = DecodeConfig(method="sample")
  with pytest.raises(UserError, match="rng"):
    run(lambda *a, **o: decode(*a, config, **o), table_step, table_cache(0, batch=2))


def test_limits_follow_the_source_and_spare_filler_rows():
  config = DecodeConfig(max_ratio=1.5, max_extra=2)
  assert config.limits(np.array([0, 1, 3, 100]), 40).tolist() == [0, 3, 6, 40]
  assert DecodeConfig(max_ratio=0.1, max_extra=0).limits(np.array([1]), 40).tolist() == [1]
  assert DecodeConfig(max_ratio=1e9).limits(np.array([0, 1, 12]), 40).tolist() == [0, 40, 40]


def test_width_is_the_number_of_beams_of_the_cache():
  assert DecodeConfig(beams=4, n_best=2).width == 4
  assert DecodeConfig(method="greedy").width == 1
  assert DecodeConfig(method="sample", n_best=7).width == 7


def test_the_keywords_of_calls_are_the_fields_of_the_configuration():
  fields = typing.get_type_hints(DecodeConfig)
  assert typing.get_type_hints(DecodeOptions) == fields
  of_translations = {"max_ratio", "max_extra", "stop"}
  kept = {name: kind for name, kind in fields.items() if name not in of_translations}
  assert typing.get_type_hints(GenerationOptions) == kept
