"""Language models generate: what the cache gives is what whole passes give, and what ends it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked
import tiny_recurrent

from compmod_jax.api import CausalModel, RecurrentModel
from compmod_jax.core.errors import UserError
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.data.tokenizers.gpt2 import Gpt2Tokenizer
from compmod_jax.decoding import (
  DecodeConfig,
  for_generation,
  loops,
  restricted,
  sample,
  stop_table,
)
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig

PROMPTS = ["bat 0 cow 1 dog 2 emu 3 fox 4 bat", "", "dog", "emu 3 fox"]
SHORT = PROMPTS[1:]  # of one padded length
LENGTH = 6
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 24, "max_length": 24, "dropout": 0.0}
MODELS = {
  "decoder": DecoderConfig(decoder_layers=1, compete=("decoder_self",), **SIZES),
  "nemot": NemotConfig(
    vanilla_layers=1, modulatory_layers=1, output_layers=1, convolution=3, **SIZES
  ),
  **{
    signal: tiny_recurrent.make_model(
      recoding=RecodingConfig(signal=signal, samples=2, size=2.0, share=share), dropout=0.0
    )
    for signal, share in (
      ("none", 1.0),
      ("surprisal", 0.5),
      ("argmax", 1.0),
      ("mc_dropout", 1.0),
      ("variational_rnn", 1.0),
    )
  },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  counts = {"train": 60, "valid": 9, "test": 12}
  return tiny_masked.write_text(tmp_path_factory.mktemp("generator") / "text", counts)


@pytest.fixture(scope="module")
def models(folder):
  """From the name of a model to the trained model, with random parameters."""

  @functools.cache
  def make(name):
    config = MODELS[name]
    data = tiny_masked.make_task(folder).data
    tokenizer = TokenizerConfig(kind="words", vocab_size=24)
    if isinstance(config, DecoderConfig | NemotConfig):
      task = CausalLMConfig(data=data, tokenizer=tokenizer, length=17, batch_tokens=68)
      kind = CausalModel
    else:
      task, kind = tiny_recurrent.make_task(folder), RecurrentModel
    built = task.build(config)
    shapes = jax.eval_shape(lambda: nn.unbox(built.model.init(jax.random.key(0))))
    random = np.random.default_rng(3)
    params = jax.tree.map(lambda s: np.asarray(random.normal(0, 0.6, s.shape), s.dtype), shapes)
    return kind(built, params, {}, folder)

  return make


def recurrent_pass(model, params, tokens):
  """Log-probabilities of what follows each token."""
  batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
  states = model.module.initial_states(1)
  return model.run(params, states, batch, None, train=False, logits=True).logits[0]


def parallel_pass(model, params, tokens):
  """The same of a model that reads a text at once."""
  return jax.nn.log_softmax(model.logits(params, tokens))[0]


def whole_pass(model):
  """From tokens behind a start token to the log-probabilities of what follows all of them."""
  one = recurrent_pass if isinstance(model, RecurrentModel) else parallel_pass
  run = model.task.model.jit(one)

  def next_tokens(past):
    padded = np.full((1, 24), model.tokenizer.pad, np.int32)
    padded[0, : len(past)] = past
    return np.array(run(model.params, padded), np.float64)[len(past) - 1]

  return next_tokens


def greedy_by_hand(model, prompt):
  """The most probable token again and again, each from a pass over the whole text."""
  next_tokens, tokenizer = whole_pass(model), model.tokenizer
  past, total, made = [tokenizer.eos, *tokenizer.encode(prompt)], 0.0, []
  while len(made) < LENGTH and (not made or made[-1] != tokenizer.eos):
    log_probs = next_tokens(past)
    allowed = log_probs.copy()
    allowed[list(tokenizer.never_produced)] = -np.inf
    made.append(int(allowed.argmax()))
    total += log_probs[made[-1]]
    past.append(made[-1])
  return made, total / len(made)


@pytest.mark.parametrize(
  "name",
  [
    "decoder",
    "nemot",
    "surprisal",
    pytest.param("mc_dropout", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "argmax", "variational_rnn")),
  ],
)
def test_greedy_generation_with_a_cache_is_the_argmax_of_whole_passes(models, name):
  model = models(name)
  for found, prompt in zip(model.generations(PROMPTS, length=LENGTH), PROMPTS, strict=True):
    tokens, score = greedy_by_hand(model, prompt)
    assert found[0].tokens.tolist() == tokens
    assert found[0].score == pytest.approx(score, abs=1e-4)
    assert not set(tokens) & set(model.tokenizer.never_produced)


@pytest.mark.parametrize("name", ["decoder", "nemot", "surprisal"])
def test_draws_are_the_same_where_the_cache_grows_with_them(models, name, monkeypatch):
  draw = functools.partial(models(name).generations, SHORT, length=LENGTH, temperature=3.0)
  # Scores of their own, so that neither search is that of another.
  expected = [one[0].tokens.tolist() for one in draw(length_penalty=0.25)]
  monkeypatch.setattr(loops, "_SHORT", 3)
  assert loops.lengths_of_growth(LENGTH) == (3, 6)
  assert [one[0].tokens.tolist() for one in draw(length_penalty=0.5)] == expected
  assert max(map(len, expected)) > 3


def test_decoders_with_growing_caches_write_what_whole_passes_give(models, monkeypatch):
  monkeypatch.setattr(loops, "_SHORT", 3)
  model = models("decoder")
  for options in ({"length_penalty": 0.5}, {"recode_layer": -1, "recode_size": 0.0}):
    found = model.generations(SHORT, length=LENGTH, **options)
    tokens = [one[0].tokens.tolist() for one in found]
    assert tokens == [greedy_by_hand(model, prompt)[0] for prompt in SHORT]
    assert max(map(len, tokens)) > 3


def test_a_prompt_goes_on_alone_as_it_does_among_others(models):
  model, options = models("nemot"), {"length": LENGTH, "beams": 3, "n_best": 2}
  among = model.generations(PROMPTS[::-1], **options)[-1]
  (alone,) = model.generations(PROMPTS[:1], **options)
  assert [one.text for one in alone] == [one.text for one in among]
  np.testing.assert_allclose([a.score for a in alone], [b.score for b in among], atol=1e-5)


def test_one_beam_and_one_candidate_are_greedy_search(models):
  model = models("decoder")
  greedy = model.generate(SHORT, length=LENGTH)
  assert model.generate(SHORT, length=LENGTH, beams=1) == greedy
  assert model.generate(SHORT, length=LENGTH, top_k=1, seed=3) == greedy
  assert all(text.startswith(prompt) for text, prompt in zip(greedy, SHORT, strict=True))


def test_beam_search_finds_the_best_of_all_short_continuations(models):
  model = models("surprisal")
  next_tokens, tokenizer = whole_pass(model), model.tokenizer
  allowed = [v for v in range(tokenizer.vocab_size) if v not in tokenizer.never_produced]
  past = [tokenizer.eos, *tokenizer.encode("dog")]
  first, scores = next_tokens(past), {}
  for one in allowed:
    if one == tokenizer.eos:
      scores[(one,)] = first[one]
      continue
    second = next_tokens([*past, one])
    scores |= {(one, two): (first[one] + second[two]) / 2 for two in allowed}
  best = sorted(scores, key=lambda tokens: -scores[tokens])[:3]
  (found,) = model.generations(["dog"], length=2, beams=len(allowed), n_best=3)
  assert [tuple(one.tokens.tolist()) for one in found] == best
  np.testing.assert_allclose([one.score for one in found], [scores[b] for b in best], atol=1e-4)


def test_draws_depend_on_the_seed_and_the_prompt_not_on_its_place(models):
  model = models("decoder")
  options = {"length": LENGTH, "temperature": 3.0}
  first = model.generate(SHORT, seed=1, **options)
  assert model.generate(SHORT, seed=1, **options) == first
  assert model.generate([SHORT[1], *SHORT], seed=1, **options) == [first[1], *first]
  assert model.generate(SHORT, seed=2, **options) != first


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1), (2, 4, 1), (1, 5, 0.6)])
def test_what_may_be_drawn_has_the_probabilities_of_the_definition(temperature, top_k, top_p):
  logits = np.random.default_rng(0).normal(size=(2, 1, 8)) * 2
  forbidden = (0, 5)
  expected = np.exp(logits / temperature)
  expected[..., list(forbidden)] = 0
  expected /= expected.sum(-1, keepdims=True)
  for row in expected.reshape(-1, 8):
    order = np.argsort(-row)
    if top_k:
      row[order[top_k:]] = 0
      row /= row.sum()
    kept = np.cumsum(row[order]) - row[order] < top_p
    row[order[~kept]] = 0
    row /= row.sum()
  options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "forbidden": forbidden}

  @jax.jit
  def run(logits):
    found, types = restricted(logits, **options)
    keys = jax.random.split(jax.random.key(4), 2)
    drawn = sample(
      lambda cache, tokens: (logits, cache),
      (),
      rng=keys,
      batch=2,
      max_length=1,
      limit=jnp.ones(2),
      bos=0,
      eos=1,
      cut=True,
      **options,
    ).tokens[:, 0, 0]
    place = jax.vmap(jax.random.categorical)(
      jax.vmap(jax.random.fold_in, (0, None))(keys, 0), found
    )
    return jax.nn.softmax(found), types, place, drawn

  probabilities, types, place, drawn = jax.device_get(run(np.float32(logits)))
  exact = place
  if types is not None:
    inner = np.zeros(logits.shape)
    np.put_along_axis(inner, types, probabilities, axis=-1)
    probabilities = inner
    exact = np.take_along_axis(types, place[..., None], -1)[..., 0]
  np.testing.assert_allclose(probabilities, expected, atol=1e-6)
  # And `sample` draws what a draw from these gives.
  np.testing.assert_array_equal(drawn, exact[:, 0])


def test_a_stop_string_ends_a_text_wherever_it_begins(models):
  model = models("decoder")
  options = {"length": 12, "temperature": 2.0}
  free = model.generations(SHORT, seed=1, **options)
  texts = [one[0].text for one in free]
  text = max(texts, key=len)
  # Of one length, so that one search serves both.
  word = next(word for word in text.split()[1:] if len(word) == 3)
  for stop in (text[3:6], word):
    for found, one in zip(
      model.generations(SHORT, stop=stop, seed=1, **options), free, strict=True
    ):
      before, stopped, _ = one[0].text.partition(stop)
      assert found[0].text == before
      assert (found[0].reason == "stop") == bool(stopped)
      # Nothing is generated after the token that completes the string.
      count = len(found[0].tokens)
      assert found[0].tokens.tolist() == one[0].tokens[:count].tolist()
      whole = "".join(map(model.tokenizer.added_text, found[0].tokens.tolist()))
      if stopped:
        last = model.tokenizer.added_text(int(found[0].tokens[-1]))
        assert stop in whole
        assert stop not in whole.removesuffix(last)


def test_a_stop_string_that_spans_tokens_stops_beams_too(models):
  model = models("decoder")
  model = model.edit({"logits": lambda x: x.at[..., model.tokenizer.eos].add(-9.0)})
  options = {"length": 6, "beams": 3, "n_best": 3}
  text = model.generations(["dog"], **options)[0][0].text
  stop = " ".join(text.split()[:2])
  found = model.generations(["dog"], stop=[stop], **options)[0]
  assert any(one.reason == "stop" for one in found)
  for one in found:
    assert stop not in one.text
    assert len(one.tokens) == 6 or one.reason != "length"
    whole = "".join(map(model.tokenizer.added_text, one.tokens.tolist()))
    last = model.tokenizer.added_text(int(one.tokens[-1]))
    assert (stop in whole) == (one.reason == "stop")
    assert stop not in whole.removesuffix(last)


def test_scores_do_not_count_the_end_that_follows_a_stop_string(models):
  model, penalty = models("decoder"), 3.0
  next_tokens, tokenizer = whole_pass(model), model.tokenizer
  options = {"length": LENGTH, "stop": [" emu"], "beams": 3, "length_penalty": penalty}
  found = model.generations(SHORT, n_best=3, **options)
  for some, prompt in zip(found, SHORT, strict=True):
    for one in some:
      past, total = [tokenizer.eos, *tokenizer.encode(prompt)], 0.0
      for token in one.tokens.tolist():
        total += next_tokens(past)[token]
        past.append(token)
      assert one.score == pytest.approx(total / len(one.tokens) ** penalty, abs=1e-4)
      assert one.reason == ("end" if past[-1] == tokenizer.eos else "stop")
    assert [one.score for one in some] == sorted((one.score for one in some), reverse=True)
  # With that end, the stopped text of the first prompt would have been the best.
  assert [one.reason for one in found[0]] == ["end", "stop", "end"]
  best = model.generations(SHORT, **options)
  assert [one.text for (one,) in best] == [some[0].text for some in found]


def test_the_automaton_of_a_stop_string_agrees_with_searching_the_text():
  pieces = ["a", "b", "ab", "aab", "ba", "", "c"]
  table, random = stop_table("aaba", pieces), np.random.default_rng(0)
  for _ in range(200):
    text, state = "", 0
    for token in random.integers(0, len(pieces), 8):
      text, state = text + pieces[token], table[state, token]
      assert (state == 4) == ("aaba" in text)
  with pytest.raises(UserError, match="stop string is empty"):
    stop_table("", pieces)


def test_the_end_token_or_the_length_ends_a_text(models, endless):
  model = models("decoder")
  eos = model.tokenizer.eos
  likely = model.edit({"logits": lambda x: x.at[..., eos].add(50.0)})
  (one,) = likely.generations(["dog"])[0]
  assert (one.text, one.reason, one.tokens.tolist()) == ("", "end", [eos])
  for one in endless:
    assert (len(one.tokens), one.reason) == (LENGTH, "length")
    assert eos not in one.tokens


@pytest.fixture(scope="module")
def endless(models):
  """What each way of search makes where an end is all but impossible, and controls most likely."""
  model = models("decoder")
  never = np.array(model.tokenizer.never_produced)
  edited = model.edit(
    {"logits": lambda x: x.at[..., never].add(99.0).at[..., model.tokenizer.eos].add(-50.0)}
  )
  return [
    one
    for options in ({}, {"beams": 3}, {"top_p": 0.9}, {"temperature": 5.0, "n_best": 3})
    for some in edited.generations(SHORT, length=LENGTH, **options)
    for one in some
  ]


def test_rows_that_pad_a_vocabulary_and_controls_are_never_generated(models, endless):
  never = models("decoder").tokenizer.never_produced
  assert len(endless) == 3 * (1 + 1 + 1 + 3)
  assert not {int(token) for one in endless for token in one.tokens} & set(never)


def test_of_a_long_prompt_the_newest_tokens_are_read(models):
  model = models("nemot")
  long = " ".join(["bat 0"] * 30)
  generator, its_model = model.task.generator, model.task.model
  assert generator.too_long(its_model, ["dog", long], 10) == [1]
  short = " ".join(long.split()[-14:])
  assert generator.too_long(its_model, [short], 10) == []
  (one,), (other,) = model.generations([long, short], length=10)
  assert one.text == other.text
  assert model.generate([long, short], length=10)[0].startswith(long)
  with pytest.raises(UserError, match="length is 24, but the model has positions for 24"):
    model.generate(["dog"], length=24)
  assert len(models("none").generations([long], length=30)[0][0].tokens) <= 30


def test_edits_and_recoding_of_decoders_are_part_of_generation(models):
  model = models("decoder")
  silenced = model.edit({"decoder/layer_0/self/heads": lambda x: 0 * x})
  assert silenced.generate(SHORT, length=LENGTH) != model.generate(SHORT, length=LENGTH)
  (one,) = model.generations(["dog"], length=LENGTH, recode_layer=-1, recode_size=0.01)[0]
  assert one.entropy[1] < one.entropy[0]
  recurrent = models("surprisal")
  with pytest.raises(UserError, match="recode_layer is 0, but it is of decoders"):
    recurrent.generate(["dog"], recode_layer=0)
  edited = recurrent.edit({"layer_0/hidden": lambda h: 0 * h})
  found = edited.generations(["dog bat 1"], length=LENGTH)[0][0]
  assert found.tokens.tolist() == greedy_by_hand(edited, "dog bat 1")[0]


def test_capture_gives_the_tokens_that_are_read_and_predicted(models):
  texts = ["dog bat 1", "cow"]
  nemot = models("nemot")
  found = nemot.capture(texts, ["gate", "modulatory/layer_0/self/attention"])
  assert found.words("gate") == [["</s>", "dog", "bat", "1"], ["</s>", "cow", "</s>", ""]]
  assert found.words("gate", predicted=True)[1] == ["cow", "</s>", "", ""]
  keys = found.words("modulatory/layer_0/self/attention", keys=True)[0]
  assert keys == ["<cls>", "<dec>", "<lm>", "</s>", "dog", "bat", "1"]
  for site in ("gate", "modulatory/layer_0/self/attention"):
    assert len(found.words(site)[0]) == found[site].shape[-2]
  recurrent = models("surprisal").capture(texts, ["layer_1/hidden"])
  assert recurrent.words("layer_1/hidden")[1] == ["</s>", "cow", "", ""]
  assert recurrent.words("layer_1/hidden", predicted=True)[1] == ["cow", "</s>", "", ""]
  assert recurrent.valid("layer_1/hidden").tolist() == [[True] * 4, [True, True, False, False]]


def test_edits_of_language_models_get_the_valid_mask_too(models):
  def last(value, valid):  # a step of a recurrent model, or a text
    return jnp.where(valid[..., None], value, 1e6)

  for name, site in (("surprisal", "layer_0/hidden"), ("nemot", "vanilla/layer_0/output")):
    model = models(name)
    edited = model.edit({site: last})
    for texts in (["dog bat 1", "cow"],):
      plain, found = model.score(texts), edited.score(texts)
      for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, atol=1e-4)
    captured = edited.capture(["dog bat 1 cow", "cow"], [site])
    assert (captured[site][~captured.valid(site)] == 1e6).all()
    assert (np.abs(captured[site][captured.valid(site)]) < 1e5).all()
  assert edited.generate(SHORT, length=LENGTH) == model.generate(SHORT, length=LENGTH)


def test_options_of_generation_say_their_method(models):
  assert for_generation({}).method == "greedy"
  assert for_generation({"beams": 3}).method == "beam"
  assert for_generation({"top_p": 0.5}).method == "sample"
  assert for_generation({"method": "sample", "n_best": 3}) == DecodeConfig("sample", n_best=3)
  with pytest.raises(UserError, match=r"top_p is given, .* method is 'beam' by beams"):
    for_generation({"beams": 3, "top_p": 0.5})
  with pytest.raises(UserError, match=r"temperature is given, .* the method is 'greedy'"):
    for_generation({"method": "greedy", "temperature": 0.5})
  with pytest.raises(UserError, match="bounded by length"):
    for_generation({"max_ratio": 2})
  model = models("decoder")
  with pytest.raises(UserError, match="length is 0"):
    model.generate(["dog"], length=0)
  with pytest.raises(UserError, match="is one string"):
    model.generate("dog")


def test_the_words_of_gpt_2_continue_bytes_of_a_character(models):
  package = pytest.importorskip("tokenizers")
  alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = Gpt2Tokenizer([*alphabet, "<|endoftext|>"], [])
  generator = models("decoder").task.generator
  other = type(generator)(tokenizer, generator.scorer)
  first, *rest = tokenizer.encode("é")
  found = type("Found", (), {})()
  found.records, found.lengths = None, np.array([[len(rest)]])
  found.tokens, found.scores = np.array([[rest]]), np.array([[-1.0]])
  # A prompt that ends within a character cannot be subtracted from the whole text.
  (one,) = other._continuations("?", [tokenizer.eos, first], found, 0, DecodeConfig(), ())
  assert one.text == tokenizer.decode(rest)
