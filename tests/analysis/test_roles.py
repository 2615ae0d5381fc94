"""What heads do is found where it was planted, and the four ways of importance keep their rules."""

import csv
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny_masked
import tiny_model

from compmod_jax.analysis import roles
from compmod_jax.analysis.ablation import Ablate
from compmod_jax.analysis.heads import Heads
from compmod_jax.analysis.reading import (
  NOTHING,
  CausalReader,
  QuestionReader,
  read_sentence,
  reader,
)
from compmod_jax.analysis.report import page
from compmod_jax.analysis.roles import measure
from compmod_jax.analysis.roles.importance import (
  WAYS,
  Ways,
  constant_deviations,
  constant_sites,
  correlations,
)
from compmod_jax.analysis.roles.measure import (
  FIRST,
  KINDS,
  PLACES,
  RAREST,
  SEPARATOR,
  Look,
  Looking,
  attention_modules,
  beside_tokens,
  both_ways,
  classical_scaling,
  halves_of,
  jensen_shannon,
  look_sums,
  role_of,
  shuffled,
  spectra,
  spectrum,
  stack_targets,
  token_counts,
  token_kinds,
)
from compmod_jax.analysis.scoring import sentence_losses
from compmod_jax.analysis.subject import Module, Subject
from compmod_jax.checkpoints.gpt2 import Gpt2, read_gpt2, write_gpt2
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.data.base import Splits
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.unified import LABELS, PASSAGE, QUESTION
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.layers.basic import layer_norm
from compmod_jax.layers.mechanisms import GroupNorm
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.question_answering import AnsweringConfig

BATCH, TIME = 16, 12
SELF = "encoder/layer_0/self"
SUBJECT, _ = both_ways("subject")
NAMES = [*PLACES, FIRST, SEPARATOR, RAREST, SUBJECT]


@pytest.fixture(scope="module")
def text():
  """What is known of random texts: kinds, counts, and for each query one key that it depends on."""
  random = np.random.default_rng(0)
  kind = np.zeros((BATCH, TIME), int)
  kind[:, -1], kind[:, 5] = KINDS.index("separator"), KINDS.index("punctuation")
  rank = np.stack([random.permutation(TIME) for _ in range(BATCH)]).astype(np.float32)
  rank[kind > 0] = np.inf
  related = np.eye(TIME, dtype=bool)[random.integers(0, TIME, (BATCH, TIME))]
  return {"kind": jnp.asarray(kind), "rank": jnp.asarray(rank), "related": jnp.asarray(related)}


def looking_at(text, keys, *, causal=False, slopes=None):
  """A module with one head for each [batch, time] of keys, which get 0.9 of the weight."""
  allowed = np.ones((BATCH, TIME, TIME), bool)
  allowed &= np.tri(TIME, dtype=bool)[None] | (not causal)
  attention = np.stack([np.eye(TIME)[key] for key in keys], axis=1) * allowed[:, None]
  attention = 0.9 * attention + 0.1 * allowed[:, None] / allowed.sum(-1)[:, None, :, None]
  attention /= attention.sum(-1, keepdims=True)
  return look(text, attention, allowed, slopes)


def look(text, attention, allowed, slopes=None):
  allowed, attention = jnp.asarray(allowed), jnp.asarray(attention, jnp.float32)
  targets = stack_targets(NAMES, allowed, text["kind"], text["rank"], {SUBJECT: text["related"]})
  asked = jnp.sum(allowed, axis=-1) >= 2
  sums = look_sums(attention, allowed, asked, targets, text["kind"], jax.random.key(0), slopes)
  sums = jax.tree.map(lambda value: np.asarray(value, np.float64), sums)
  heads = attention.shape[1]
  return Look(Module(SELF, "heads", heads, 4, False), NAMES, sums, slice(0, heads))


def at(offset):
  return np.broadcast_to(np.clip(np.arange(TIME) + offset, 0, TIME - 1), (BATCH, TIME))


# Constructed attention.


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_that_looks_at_one_offset_is_wholly_positional_and_shuffled_it_is_not(text, causal):
  found = looking_at(text, [at(-1)], causal=causal)
  assert found.share("previous") == pytest.approx(1)
  assert found.share("previous", shuffled=True)[0] < 0.5
  role = role_of([found, found], 0)
  assert (role.kind, role.target, role.share) == ("positional", "previous", pytest.approx(1))
  assert role_of([found, found], 0, shuffled=True).kind != "positional"
  assert found.best_offset("previous") == (-1, pytest.approx(1))
  if not causal:
    assert found.chance("previous") == pytest.approx(1 / TIME, rel=1e-5)
    # 200 shuffles at once, each of a row of its own.
    many = jnp.broadcast_to(jnp.eye(TIME), (200, 1, TIME, TIME))
    dealt = np.asarray(shuffled(many, jnp.ones((200, TIME, TIME), bool), jax.random.key(1)))
    # Every key is as likely: 2,400 draws of a twelfth each, within five deviations.
    share = np.mean(dealt[:, 0].argmax(-1) == np.arange(TIME))
    assert abs(share - 1 / TIME) < 5 * np.sqrt(1 / TIME / 2400)


def test_shuffling_keeps_every_query_s_weights_among_the_keys_that_it_may_read():
  random = np.random.default_rng(1)
  allowed = np.tri(TIME, dtype=bool) & (random.random((3, TIME, TIME)) < 0.7)
  attention = random.random((3, 2, TIME, TIME)) * allowed[:, None]
  dealt = np.asarray(shuffled(jnp.asarray(attention), jnp.asarray(allowed), jax.random.key(0)))
  np.testing.assert_allclose(np.sort(dealt, axis=-1), np.sort(attention, axis=-1), rtol=1e-6)
  assert (dealt[~np.broadcast_to(allowed[:, None], dealt.shape)] == 0).all()
  assert not np.allclose(dealt, attention)


def test_syntax_rare_tokens_and_separators_are_found_where_heads_follow_them(text):
  related = np.asarray(text["related"]).argmax(-1)
  rarest = np.broadcast_to(np.asarray(text["rank"]).argmin(-1)[:, None], (BATCH, TIME))
  found = looking_at(text, [related, rarest, np.full((BATCH, TIME), TIME - 1), at(0)])
  kinds = [role_of([found, found], head) for head in range(4)]
  assert [(role.kind, role.target) for role in kinds] == [
    ("syntactic", SUBJECT), ("rare", RAREST), ("positional", SEPARATOR), ("positional", "itself"),
  ]  # fmt: skip
  assert found.share(SUBJECT)[0] == pytest.approx(1)
  assert found.best_offset(SUBJECT)[1] < 0.3
  assert found.share(RAREST)[1] == pytest.approx(1)
  assert found.chance(RAREST) == pytest.approx(1 / TIME, rel=1e-5)
  assert found.weight("separator")[2] == pytest.approx(0.9 + 0.1 / TIME)
  assert found.weight("punctuation")[2] == pytest.approx(0.1 / TIME)
  total = sum(found.weight(kind) for kind in KINDS)
  np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_a_relation_that_one_offset_explains_makes_no_head_syntactic(text):
  previous = jnp.broadcast_to(jnp.eye(TIME, k=-1, dtype=bool), (BATCH, TIME, TIME))
  # One head that follows the relation four times in five, as the offset would each time.
  keys = np.where(np.arange(BATCH * TIME).reshape(BATCH, TIME) % 5 == 0, at(3), at(-1))
  found = looking_at({**text, "related": previous}, [keys])
  assert found.best_offset(SUBJECT) == (-1, pytest.approx(1))
  assert 0.7 < found.share(SUBJECT)[0] < 0.9
  assert role_of([found, found], 0).kind == "other"


def test_uniform_attention_has_the_entropy_of_the_number_of_keys(text):
  allowed = np.broadcast_to(np.tri(TIME, dtype=bool), (BATCH, TIME, TIME))
  found = look(text, allowed[:, None] / allowed.sum(-1)[:, None, :, None], allowed)
  expected = np.log(np.arange(2, TIME + 1)).mean()  # the first query reads one key, and is left out
  assert found.entropy == pytest.approx(expected)
  assert found.most_entropy == pytest.approx(expected)
  sure = looking_at(text, [at(0)])
  assert sure.entropy[0] < 1 < sure.most_entropy


def test_gradients_are_means_over_the_weights_of_a_kind(text):
  slopes = np.zeros((BATCH, 1, TIME, TIME), np.float32)
  slopes[..., -1], slopes[..., 5] = -3.0, 2.0
  found = looking_at(text, [at(0)], slopes=jnp.asarray(slopes))
  gradients = [found.gradient(kind)[0] for kind in ("separator", "punctuation", "word")]
  assert gradients == pytest.approx([3, 2, 0])
  assert looking_at(text, [at(0)]).gradient("word") is None


def test_the_divergence_is_zero_for_equal_heads_log_two_for_disjoint_ones_and_scipy_s_between():
  random = np.random.default_rng(2)
  one, other = random.dirichlet(np.ones(5), size=(2, 30))
  found = np.asarray(jensen_shannon(jnp.asarray(one), jnp.asarray(other)))
  expected = [
    scipy.spatial.distance.jensenshannon(p, q) ** 2 for p, q in zip(one, other, strict=True)
  ]
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert float(jensen_shannon(jnp.asarray(one[0]), jnp.asarray(one[0]))) == 0
  ends = jnp.eye(5)
  assert float(jensen_shannon(ends[0], ends[3])) == pytest.approx(np.log(2))


def test_scaling_restores_distances_of_points_in_a_plane():
  random = np.random.default_rng(3)
  points = random.normal(size=(9, 2))
  distances = scipy.spatial.distance_matrix(points, points)
  found = classical_scaling(distances)
  np.testing.assert_allclose(scipy.spatial.distance_matrix(found, found), distances, atol=1e-9)
  np.testing.assert_allclose(found.mean(0), 0, atol=1e-9)
  assert classical_scaling(np.zeros((1, 1))).shape == (1, 2)


def test_the_spectrum_of_a_rank_one_product_is_one_and_that_of_all_heads_is_of_their_sum():
  random = np.random.default_rng(4)
  query, key = random.normal(size=(2, 8, 3, 2))
  query[:, 0] = np.outer(random.normal(size=8), [1.0, 2.0])
  found = spectrum(query, key)
  np.testing.assert_allclose(found.heads[0], [1, 1])
  squares = np.square(np.linalg.svd(query[:, 1] @ key[:, 1].T, compute_uv=False))
  np.testing.assert_allclose(found.heads[1], (np.cumsum(squares) / squares.sum())[:2])
  whole = sum(query[:, head] @ key[:, head].T for head in range(3))
  squares = np.square(np.linalg.svd(whole, compute_uv=False))
  np.testing.assert_allclose(found.together, (np.cumsum(squares) / squares.sum())[:6])
  assert found.together.shape == (6,)
  wide = spectrum(*random.normal(size=(2, 4, 3, 2)))  # more head dimensions than the model is wide
  assert wide.together.shape == (4,)


def test_the_spectrum_of_independent_mechanisms_is_of_blocks_for_their_slices():
  random = np.random.default_rng(5)
  query, key = random.normal(size=(2, 4, 6, 3))  # two mechanisms of width 4, with three heads each
  whole = np.zeros((8, 8))
  for head in range(6):
    part = slice(0, 4) if head < 3 else slice(4, 8)
    whole[part, part] += query[:, head] @ key[:, head].T
  squares = np.square(np.linalg.svd(whole, compute_uv=False))
  found = spectrum(query, key, mechanisms=2)
  np.testing.assert_allclose(found.together, np.cumsum(squares) / squares.sum())
  np.testing.assert_array_equal(found.heads, spectrum(query, key).heads)


def asked_of(looking, monkeypatch):
  """A function from arguments of a step to which keys may be read, and which queries count."""
  monkeypatch.setattr(measure, "look_sums", lambda _, *given: {"of": given[:2]})
  monkeypatch.setattr(measure, "_compare", lambda *_: {})
  monkeypatch.setattr(measure, "_targets", lambda *_: (None, None))
  monkeypatch.setattr(looking, "_gradients", lambda *_: {})
  return looking._sums


def test_queries_and_keys_of_a_layer_are_the_tokens_that_go_through_it(subject, monkeypatch):
  data = subject.task.dataset
  model = dataclasses.replace(subject.task.model.config, compete=(), depth_layers=("encoder_0",))
  sides = data.source_tokenizer, data.target_tokenizer
  few = random_subject(data.config.build_with(model, Splits(data.config.data), *sides))
  looking = Looking(few, reader(few.task), attention_modules(few))
  (name,) = [name for name in looking.groups if name.startswith("source, through")]
  monkeypatch.setattr(looking, "groups", {name: looking.groups[name]})
  batch = jax.device_put(few.batches[0])
  nothing = jax.tree.map(np.zeros_like, few.params)
  sums = jax.jit(asked_of(looking, monkeypatch))(few.params, nothing, batch, jax.random.key(0))
  allowed, asked = (np.asarray(value) for value in sums[name]["of"])
  valid = np.asarray(batch["source"] != 0)
  assert not (asked & ~valid).any()
  assert 0 < asked.sum() < valid.sum()
  for row, through in enumerate(asked):
    assert (allowed[row][through] == through).all()


def test_keys_are_read_where_one_head_has_weight_left(subject, monkeypatch):
  looking = Looking(subject, reader(subject.task), attention_modules(subject))
  monkeypatch.setattr(looking, "groups", {"source": looking.groups["source"]})
  weights = np.zeros((1, 2, 3, 3), np.float32)
  weights[0, 1] = np.tri(3)
  weights[0, 0] = np.eye(3)  # the penalty leaves nothing of other keys

  def forward(params, batch, *, intermediates):
    intermediates(f"{SELF}/attention", jnp.asarray(weights))

  model = SimpleNamespace(forward=forward, valid_mask=lambda *_: jnp.ones((1, 3), bool))
  known = SimpleNamespace(task=SimpleNamespace(model=model), shapes={})
  monkeypatch.setattr(looking, "subject", known)
  found = asked_of(looking, monkeypatch)({}, {}, {}, jax.random.key(0))["source"]
  allowed, asked = found["of"]
  np.testing.assert_array_equal(allowed[0], np.tri(3, dtype=bool))
  assert asked[0].tolist() == [False, True, True]
  assert found["distributions"] == 2  # the other head's weights sum to 2 and 3


def test_weights_that_are_no_distribution_have_neither_entropy_nor_divergence(subject):
  few = dataclasses.replace(subject, sentences=2)
  looking = Looking(few, reader(few.task), attention_modules(few))
  looking._gradients = lambda *_: {}

  def step(*given):
    """One query in each group, of which all heads of a group have distributions, or none."""
    sums = jax.tree.map(lambda leaf: np.ones(leaf.shape), jax.eval_shape(looking._sums, *given))
    for name, those in sums.items():
      those["distributions"] = 4.0 if name == "source" else 0.0
    return sums

  looking._step = step
  found = looking(few, few.params)
  for name, look in found.looks.items():
    assert np.isfinite(look.entropy).all() == (name == SELF)
    assert np.isfinite(look.share("previous")).all()
  known = [name for name, one in found.groups.items() if np.isfinite(one.divergence).all()]
  assert known == ["source"]


# Importance.


@pytest.fixture(scope="module")
def ways(subject):
  few = dataclasses.replace(subject, sentences=6)
  modules = [module for module in attention_modules(few) if module.dim]
  parts = [few.numbers[:3], few.numbers[3:]]
  return Ways(few, reader(few.task), modules, parts, steps=4)


@pytest.fixture(scope="module")
def importance(ways, subject):
  return ways(subject.params)


def rises(ways, params, factor):
  """Losses of all sentences where the outputs of a module are multiplied with a number."""
  losses = sentence_losses(ways.subject, ways.read)
  return {
    module.name: losses(
      params, {module.scaled: jax.tree_util.Partial(jnp.multiply, jnp.float32(factor))}
    )[0]
    for module in ways.modules
  }


def test_gradient_times_activation_is_the_slope_of_the_loss_in_a_factor(ways, subject):
  found, step = ways.loss_gradients(subject.params), 2e-2
  up, down = (rises(ways, subject.params, 1 + sign * step) for sign in (1, -1))
  for module in ways.modules:
    slopes = (up[module.name] - down[module.name]) / (2 * step)
    assert np.abs(slopes).max() > 0.1
    np.testing.assert_allclose(found[module.name].sum(1), slopes, atol=0.02 * np.abs(slopes).max())


def test_attributions_add_up_to_the_loss_without_the_heads_the_better_the_more_steps(
  ways, importance, subject
):
  finer = Ways(ways.subject, ways.read, ways.modules, [ways.subject.numbers], steps=16)
  counts = sentence_losses(ways.subject, ways.read)(subject.params, {})[1]
  for module in ways.modules:
    few = ways.integrated_gradients(subject.params, module)
    more = finer.integrated_gradients(subject.params, module)
    none = rises(ways, subject.params, 0)[module.name] - rises(ways, subject.params, 1)[module.name]
    coarse, fine = (np.abs(-each.sum(1) - none).sum() for each in (few, more))
    assert fine < coarse
    assert fine < 0.03 * np.abs(more).sum()
    # What the report has is this, by half and by token.
    half = importance[0].values["attribution"][module.name]
    np.testing.assert_allclose(half, -few[:3].sum(0) / counts[:3].sum(), rtol=1e-4, atol=1e-6)
    rise = none[:3].sum() / counts[:3].sum()
    assert importance[0].attributed[module.name] == pytest.approx(rise, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
  "norm",
  [layer_norm(jnp.float32), layer_norm(jnp.float32, kind="rms"), GroupNorm(2)],
  ids=["layer", "rms", "group"],
)
def test_a_norm_with_a_constant_deviation_passes_all_relevance_and_a_plain_one_none(norm):
  x = jax.random.normal(jax.random.key(0), (1, 3, 8)) + 1
  params = nn.unbox(norm.init(jax.random.key(1), x))
  params["params"]["scale"] = jnp.arange(1.0, 9.0)
  wanted = jax.random.normal(jax.random.key(2), (1, 3, 8))

  def total(x):
    return jnp.sum(norm.apply(params, x) * wanted)

  plain, slopes = jax.value_and_grad(total)(x)
  assert float(jnp.sum(slopes * x)) == pytest.approx(0, abs=1e-3)  # it ignores the length
  with constant_deviations():
    value, slopes = jax.value_and_grad(total)(x)
  assert float(value) == float(plain)
  assert float(jnp.sum(slopes * x)) == pytest.approx(float(value), rel=1e-5)


def test_relevance_is_kept_from_the_logits_to_the_last_layer(subject):
  """The sum of relevance is the logits', where nothing adds a constant on the way."""
  params = jax.device_put(subject.params)
  params["decoder_norm"] = {**params["decoder_norm"], "bias": jnp.zeros(16)}
  batch, site = jax.device_put(subject.batches[0]), "decoder/layer_0/output"

  def largest(factor):
    edits = {site: lambda value: value * factor}
    with constant_deviations():
      logits = subject.task.model.forward(params, batch, intermediates=Intermediates(edits=edits))
    return jnp.sum(jnp.max(logits, axis=-1))

  value, slope = jax.jit(jax.value_and_grad(largest))(1.0)
  assert float(slope) == pytest.approx(float(value), rel=1e-4)


def test_no_relevance_goes_through_attention_weights_and_routers(subject):
  sites = constant_sites(subject)
  assert {f"{SELF}/attention", f"{SELF}/router/weights"} <= set(sites)
  assert "decoder/layer_0/cross/attention" in sites
  assert not [site for site in sites if "heads" in site.split("/")[-1]]


def test_no_relevance_goes_through_gates_and_routers_of_any_kind(subject):
  data = subject.task.dataset
  model = TransformerConfig(
    encoder_layers=1, decoder_layers=1, dim=16, heads=4, ffn_dim=16, norm="post", max_length=128,
    copy_gate=True, switch_heads=("encoder_self",), depth_layers=("decoder_0",),
  )  # fmt: skip
  sides = data.source_tokenizer, data.target_tokenizer
  task = data.config.build_with(model, Splits(data.config.data), *sides)
  sites = constant_sites(Subject(task, task.shapes, "test"))
  places = "self/value_experts", "self/output_experts", "copy_gate"
  assert {f"encoder/layer_0/{place}" for place in places} <= set(sites)
  assert "decoder/layer_0/depth/weights" in sites
  shapes = {"gate": (), "gates/output_0/ffn": (), "gated": (), "logits": ()}
  config = SimpleNamespace(gate_site=lambda: "gate")
  modulated: Any = SimpleNamespace(
    shapes=shapes, task=SimpleNamespace(model=SimpleNamespace(config=config))
  )
  assert constant_sites(modulated) == ["gate", "gates/output_0/ffn"]


def test_each_half_has_its_own_importance_and_correlations_are_scipy_s(importance):
  one, other = importance
  assert one.loss != other.loss
  table = np.stack([one.over_heads(way) for way in WAYS], axis=1)
  expected = scipy.stats.spearmanr(table).statistic
  np.testing.assert_allclose(correlations(one), expected, atol=1e-12)


# What is known of texts.


def test_tokens_are_told_their_kind_their_count_and_their_relations(subject):
  read, split = reader(subject.task), subject.task.dataset.pairs["test"]
  counts = token_counts(subject, read, "target")
  tokenizer = read.tokenizer("target")
  texts = subject.task.dataset.pairs["train"].target
  assert counts.sum() == sum(len(tokenizer.encode(text)) for text in texts)
  up, down = both_ways("subject")
  (known, *_) = beside_tokens(subject, read, "target", counts, _relations(subject, read))
  batch = subject.batches[0]
  row = int(np.flatnonzero(batch["index"] >= 0)[0])
  tokens, number = read.tokens("target", batch)[row], int(batch["index"][row])
  assert known["kind"][row, 0] == KINDS.index("separator"), "the start token"
  dot = [place for place, token in enumerate(tokens) if token == tokenizer.encode(".")[-1]]
  assert (known["kind"][row][dot] == KINDS.index("punctuation")).all()
  shown = np.isfinite(known["rank"][row])
  np.testing.assert_array_equal(known["rank"][row][shown], counts[tokens[shown]])
  assert (tokens[shown] != NOTHING).all()
  words = split.target[number].split()
  pairs: dict[tuple, list] = {}  # the tokens of a head -> those of what depends on it
  for query, keys in enumerate(known[f"relations/{up}"][row]):
    if keys.any():
      pairs.setdefault(tuple(tokens[keys].tolist()), []).append(int(tokens[query]))
  spelt = {(tokenizer.decode(d).strip(), tokenizer.decode(h).strip()) for h, d in pairs.items()}
  gold = [(d, h) for name, d, h in split.relations(number)["target"] if name == "subject"]
  assert spelt == {(words[d], words[h]) for d, h in gold}
  np.testing.assert_array_equal(
    known[f"relations/{down}"][row], known[f"relations/{up}"][row].swapaxes(-1, -2)
  )


def _relations(subject, read):
  return Looking(subject, read, attention_modules(subject)).relations


def test_the_halves_share_no_sentence_and_are_all_of_them(subject):
  first, second = halves_of(subject)
  assert not set(first.numbers) & set(second.numbers)
  assert sorted([*first.numbers, *second.numbers]) == subject.numbers.tolist()
  assert len(halves_of(dataclasses.replace(subject, sentences=1))) == 1


# Reports of models of all kinds.


def settings_of(**settings):
  return roles.Roles(**{"importance": 2, "steps": 1, "untrained": False, **settings})


def reported(subject, **settings):
  settings = settings_of(**settings)
  found = settings.measure(subject)
  return found, roles.make_page(settings, subject, found)


def random_subject(task, sentences=4, seed=0):
  params = jax.device_put(tiny_model.random_parameters(task, seed), jax.devices()[0])
  return Subject(task, params, "test", sentences=sentences)


def test_the_report_on_a_translation_model_has_controls_syntax_and_four_ways(subject, tmp_path):
  few = dataclasses.replace(subject, sentences=6)
  found, made = reported(few, untrained=True)
  written = page.write(made, tmp_path, command="python -m train.analyse")
  data = json.loads(written.json.read_text(), parse_constant=pytest.fail)
  assert {path.stem for path in written.pictures} == {
    "at_previous", "at_itself", "at_next", "at_first", "at_separator", "syntax", "rarest",
    "entropy", "weight_on_separator", "weight_on_punctuation", "gradient_at_separator",
    "map_1", "map_2", "map_3", "importance_ablation",
    "importance_gradient", "importance_attribution", "importance_relevance",
    "importance_correlations", "spectrum_heads", "spectrum_together",
  }  # fmt: skip
  assert len(data["roles"]) == 12
  assert data["examples"] == [3, 3]
  assert len(data["importance"]["untrained"]["values"]["ablation"][SELF]) == 4
  halves = data["modules"][SELF]["halves"]
  np.testing.assert_allclose(halves[0]["entropy"], found.halves[0].looks[SELF].entropy)
  assert np.shape(data["groups"]["source"]["divergence"]) == (2, 4, 4)
  assert any("subject" in relation for relation in data["relations"])
  with (tmp_path / "measures.csv").open() as file:
    rows = list(csv.DictReader(file))
  for row in rows:
    assert 0 <= float(row["first half"] or 0) <= 1
    assert row["untrained"] != ""
  # Cross attention has no relations, decoders do not see ahead.
  assert not [row for row in rows if "cross" in row["module"] and "→" in row["target"]]
  assert "next" not in data["modules"]["decoder/layer_0/self"]["halves"][0]["shares"]
  kernel = few.params["encoder_0"]["self_attention"]["query_key_value"]["kernel"]
  mine = np.asarray(kernel[:, 1, 0]) @ np.asarray(kernel[:, 1, 1]).T
  squares = np.square(np.linalg.svd(mine, compute_uv=False))[:4]
  np.testing.assert_allclose(
    found.spectra[SELF].heads[1], np.cumsum(squares) / squares.sum(), rtol=1e-4
  )
  assert any("rank correlations" in line for line in made.summary)
  assert "Roles" in written.html.read_text()


def test_the_report_on_a_masked_language_model_says_that_it_knows_no_syntax(tmp_path):
  counts = {"train": 20, "valid": 4, "test": 12}
  folder = tiny_masked.write_text(tmp_path / "data", counts)
  task = tiny_masked.make_task(folder).build(tiny_masked.make_model())
  _, made = reported(random_subject(task))
  assert made.data["relations"] == []
  assert any("no relations" in line for line in made.summary)
  assert any("no gold" in line for section in made.sections for line in section.text)
  assert list(made.data["groups"]) == ["text"]


GRAMMAR = GrammarDocuments(GrammarData(train=60, valid=10, test=20, shifted=10))
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 32}


def causal_task(model):
  tokenizer = TokenizerConfig(vocab_size=120)
  return CausalLMConfig(data=GRAMMAR, tokenizer=tokenizer, length=33, batch_tokens=132).build(model)


def test_the_report_on_gpt2_from_a_folder_of_its_own(tmp_path):
  made = DecoderConfig(decoder_layers=2, **SIZES)
  task = causal_task(made)
  vocab = task.dataset.tokenizer.vocab_size
  params = jax.tree.map(np.asarray, tiny_model.random_parameters(task, 0))
  write_gpt2(tmp_path / "gpt2", Gpt2(made, params, vocab))
  given = read_gpt2(tmp_path / "gpt2")
  task = causal_task(given.config)
  subject = Subject(task, jax.device_put(given.params), "test", sentences=4)
  data = reported(subject)[1].data
  assert list(data["modules"]) == ["decoder/layer_0/self", "decoder/layer_1/self"]
  for module in data["modules"].values():
    assert "next" not in module["halves"][0]["shares"]
    assert np.isclose(module["halves"][0]["chance"]["itself"], module["halves"][0]["chance"][FIRST])
  losses, counts = sentence_losses(subject, reader(task))(subject.params, {})
  assert isinstance(reader(task), CausalReader)
  whole = dataclasses.replace(subject, sentences=0)
  losses, counts = sentence_losses(whole, reader(task))(subject.params, {})
  values = task.evaluate(subject.params, "test", decode=False).values
  assert counts.sum() == values["tokens"]
  assert losses.sum() / counts.sum() == pytest.approx(values["loss"], rel=1e-5)


def test_the_other_analyses_read_causal_models_too_but_not_auxiliary_tokens():
  task = causal_task(DecoderConfig(decoder_layers=1, compete=("decoder_self",), **SIZES))
  subject = random_subject(task)
  read, batch = reader(task), subject.batches[0]
  tokens = read.tokens("text", batch)
  row = int(np.flatnonzero(batch["index"] >= 0)[0])
  assert tokens[row, 0] == NOTHING, "the start token"
  np.testing.assert_array_equal(tokens[row, 1:], batch["tokens"][row, 1:-1])
  ablated = Ablate(units=("decoder/layer_0/self:1",), samples=100).measure(subject)
  assert ablated.effects[0].loss.difference.value != 0
  (finding,) = Heads(shuffles=1, untrained=False).measure(subject).findings
  weights = finding.totals.mean("weight")
  assert weights.sum() == pytest.approx(1, abs=1e-5)
  nemot = NemotConfig(vanilla_layers=1, modulatory_layers=1, output_layers=1, **SIZES)
  with pytest.raises(UserError, match="auxiliary tokens, which are no words"):
    Heads().measure(random_subject(causal_task(nemot)))


def test_auxiliary_tokens_are_separators_in_front_of_the_text():
  model = NemotConfig(
    vanilla_layers=1, modulatory_layers=1, output_layers=1, tasks=("lm",), **SIZES
  )
  subject = random_subject(causal_task(model), sentences=2)
  found, made = reported(subject, importance=0)
  data = made.data
  assert data["importance"] == {"halves": [], "untrained": None}
  assert set(data["groups"]) == {"text", "text behind auxiliary tokens"}
  plain, behind = (
    found.halves[0].looks[f"{name}/layer_0/self"] for name in ("vanilla", "modulatory")
  )
  before = model.before
  assert before > 0
  # Each row has that many queries more, of which all but the first may read two keys.
  assert behind.sums["queries"] > plain.sums["queries"]
  assert behind.chance(SEPARATOR) > plain.chance(SEPARATOR)
  assert set(spectra(subject, subject.params)) == set(data["modules"])


LENGTH = 576  # a quarter of it holds every question: batches are of one length


def question_task(model):
  given = AnsweringConfig(
    data=Mixed((WorldsData(train=24, valid=12, test=16, shifted=12),)),
    batch_questions=4,
    length=LENGTH,
    answer_length=4,
    buckets=1,
  )
  tokenizer = dataclasses.replace(given.tokenizer, vocab_size=160)
  return dataclasses.replace(given, tokenizer=tokenizer).build(model)


@pytest.fixture(scope="module")
def questions():
  sizes = {"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "dropout": 0.0}
  return random_subject(
    question_task(NemotConfig(**{**SIZES, **sizes, "max_length": LENGTH}, tasks=("mqa", "gqa"))), 0
  )


def test_the_answers_are_what_the_losses_of_questions_are_of(questions):
  read = reader(questions.task)
  assert isinstance(read, QuestionReader)
  losses, counts = sentence_losses(questions, read)(questions.params, {})
  values = questions.task.evaluate(questions.params, "test", decode=False).values
  assert losses.sum() / counts.sum() == pytest.approx(values["loss"], rel=1e-5)
  assert len(read.texts("text", "test")) == 16
  _relations_of_passages(questions, read)
  tokens = np.concatenate([read.tokens("text", batch).ravel() for batch in questions.batches])
  assert (tokens == NOTHING).any()
  kinds = token_kinds(read.tokenizer("text"))
  numbers = questions.task.dataset.question_tokenizer.special_ids
  for name in (PASSAGE, QUESTION, *LABELS):
    assert kinds[numbers[name]] == KINDS.index("separator")


def _relations_of_passages(questions, read):
  """Each is between the words that gold has, as the positions of the batches read them."""
  (data,), seen = questions.task.dataset.config.data.seeds, 0
  gold = data.load("test")
  for batch in questions.batches:
    tokens = read.tokens("text", batch)
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      number = int(batch["index"][row])
      words = read_sentence(read.tokenizer("text"), tokens[row].tolist()).words
      known = read.relations("text", "test", number)
      found = [(name, words[dependent], words[head]) for name, dependent, head in known]
      story = gold.items[number].passage.split()
      assert found == [(name, story[d], story[h]) for name, d, h in gold.relations(number)]
      seen += len(found)
  assert seen > 50


def test_outputs_of_two_tasks_are_compared_with_themselves_alone(questions):
  found, made = reported(questions, untrained=True)
  data = made.data
  behind = "text behind auxiliary tokens"
  assert set(data["groups"]) == {
    "text",
    behind,
    "text, output_mqa alone",
    "text, output_gqa alone",
  }
  looks = found.halves[0].looks
  both, choice, other = (
    looks[f"{name}/layer_0/self"].sums["queries"]
    for name in ("vanilla", "output_mqa", "output_gqa")
  )
  assert both == choice + other
  assert min(choice, other) > 0
  assert all(module in data["importance"]["untrained"]["values"]["ablation"] for module in looks)
  # An output has no effect on the questions of the other task, as it does not run there.
  numbers = [n for b in questions.batches if "rows/gqa" in b for n in b["index"] if n >= 0]
  gqa = settings_of(importance=4).measure(dataclasses.replace(questions, chosen=sorted(numbers)))
  names = [module.name for module in gqa.modules]
  assert "output_mqa/layer_0/self" not in names
  assert "output_gqa/layer_0/self" in names


def test_units_of_a_model_that_answers_are_ablated_by_their_loss_alone(questions):
  settings = Ablate(units=("output_gqa/layer_0/self:1",), samples=100, replace="mean")
  found = settings.measure(questions)
  assert found.score is None
  assert found.effects[0].loss.difference.value != 0


def test_a_decoder_that_answers_has_roles_too():
  model = DecoderConfig(decoder_layers=1, **{**SIZES, "max_length": LENGTH})
  data = reported(random_subject(question_task(model), 6))[1].data
  assert list(data["groups"]) == ["text"]
  assert data["examples"] == [3, 3]


def test_a_model_without_attention_is_named():
  task = LanguageModelConfig(data=GRAMMAR, rows=2, eval_rows=2).build(LstmConfig(dim=8, layers=1))
  with pytest.raises(UserError, match="The model has no attention"):
    reported(random_subject(task))
  with pytest.raises(UserError, match="--steps is 0"):
    roles.Roles(steps=0)
