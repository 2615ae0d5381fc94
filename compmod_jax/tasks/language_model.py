"""Language modelling with recurrent state: streams of text in, loss per token out."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import fetch
from compmod_jax.core.untrusted import MIB, parse_json, read_bounded
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.streams import TextStreams
from compmod_jax.data.text_tokenizer import UNKNOWN, DocumentData, count_words, text_tokenizer
from compmod_jax.data.tokenizers import Tokenizer, TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.decoding.recoding import Searched
from compmod_jax.decoding.types import Cache
from compmod_jax.mechanisms.recoding.anchors import anchor_loss
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.lstm_lm import Given, LstmConfig, LstmLM, Output
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Params,
  Scoring,
  StepContext,
  Task,
  TaskModel,
  Terms,
)
from compmod_jax.tasks.objectives import standard
from compmod_jax.tasks.scorer import Scorer
from compmod_jax.tasks.text_generator import Prompts, TextGenerator

CLASSIFIER_FILE = "classifier.json"
_MOST = 64 * MIB  # most bytes of a classifier's file, which holds one number a unit
# Keep what recoding draws apart from dropout, which is drawn from the same key.
_NOISE, _SHARE = 0x4EC0, 0x5A2E


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
  """A language modelling task: text, tokenizer, and streams read side by side."""

  data: DocumentData = GrammarDocuments()
  """Where documents come from; each ends with an end token."""
  tokenizer: TokenizerConfig = TokenizerConfig(kind="words", vocab_size=50_000)
  """The tokenizer."""
  tokenizer_documents: int = 1_000_000
  """The tokenizer is trained on the first N training documents, at most."""
  rows: int = 64
  """Streams that training reads side by side."""
  length: int = 35
  """Tokens after which gradients are cut (truncated backpropagation through time)."""
  eval_rows: int = 0
  """Streams that evaluation reads side by side, each from states of zeros; 0 for as many as are
  fast and cost a perplexity little, see `streams.rows_of_evaluation`."""
  noise_seed: int = 0
  """Of what is drawn in evaluation: dropout masks of recoding. Texts that are scored one by one, as
  minimal pairs are, all have the same masks at a step, wherever they stand."""

  def __post_init__(self):
    check_least(self, "task.", rows=1, length=1, eval_rows=0, tokenizer_documents=1)

  def build(
    self,
    model: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    cache: Path | None = None,
  ) -> "LanguageModel":
    """The task with its tokenizer: the one in `files`, else trained on the training split.

    Args:
      model: the configuration of a recurrent language model.
      files: what `TextStreams.files` returned.
      cache: folder in which the tokenizer and tokenised text are kept.

    Raises:
      UserError: the model is of another kind, data are missing, or `files` lacks the tokenizer.
    """
    model.recurrent(1)  # a model of another kind is refused before the tokenizer is trained
    tokenizer = self.make_tokenizer(files, cache)
    module: LstmLM = model.recurrent(tokenizer.vocab_size)
    config = module.config
    classifier = read_classifier(config.recoding, files)
    if classifier is not None:
      errors.check(
        len(classifier["weight"]) == config.dim,
        f"The classifier of weak supervision reads states of width {len(classifier['weight'])}, but"
        f" model.dim is {config.dim}; train one on a model of this width.",
      )
    kept = {} if classifier is None else {CLASSIFIER_FILE: json.dumps(classifier).encode()}
    labelled = config.recoding.signal == "weak_supervision"
    dataset = TextStreams(self, tokenizer, cache, labelled=labelled, more_files=kept)
    return LanguageModel(
      dataset=dataset,
      model=StreamModel(module, self.rows, self.noise_seed, classifier),
      objective=standard(StreamLoss(dataset), model),
      evaluators=(StreamPerplexity(),),
      generator=TextGenerator(tokenizer, Scorer(tokenizer, _token_scores)),
    )

  def make_tokenizer(
    self, files: Mapping[str, bytes] | None = None, cache: Path | None = None
  ) -> Tokenizer:
    """The tokenizer in `files`, else one that is trained on the training split."""
    documents = self.tokenizer_documents
    return text_tokenizer(self.data, self.tokenizer, documents, files, cache)

  def describe(self, model: ModelConfig) -> str:
    """One sentence on model and data."""
    return f"{model.family} language model, {model.describe()}; {self.data.describe()}."


def read_classifier(
  recoding: RecodingConfig, files: Mapping[str, bytes] | None
) -> dict[str, Any] | None:
  """The classifier of weak supervision: that of `files`, else of the file that is named.

  Returns:
    `weight` and `bias`, lists and numbers; None for other signals.

  Raises:
    UserError: there is none, or the file holds none.
  """
  if recoding.signal != "weak_supervision":
    return None
  if files is not None and CLASSIFIER_FILE in files:
    return _parsed(files[CLASSIFIER_FILE], CLASSIFIER_FILE, "restore the folder.")
  errors.check(
    bool(recoding.classifier),
    "model.recoding.signal is weak_supervision, which needs model.recoding.classifier: train one by"
    " `python -m train.analyse probe` on a model of the same size, and name its result.json.",
  )
  remedy = "name the result.json of `python -m train.analyse probe`."
  where = f"model.recoding.classifier is {recoding.classifier!r}, which"
  try:
    data = read_bounded(Path(recoding.classifier), _MOST)
  except (OSError, ValueError) as error:
    raise errors.UserError(f"{where} cannot be read ({error}); {remedy}") from error
  return _parsed(data, where, remedy, inside="classifier")


def _parsed(data: bytes, where: str, remedy: str, inside: str = "") -> dict[str, Any]:
  """Weight and bias of a classifier in JSON, or in one of its fields."""
  try:
    found = parse_json(data)
    found = found[inside] if inside else found
    return {"weight": [float(x) for x in found["weight"]], "bias": float(found["bias"])}
  except (ValueError, KeyError, TypeError, OverflowError) as error:
    raise errors.UserError(f"{where} holds no classifier ({error}); {remedy}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class StreamModel(TaskModel[LstmLM]):
  """A recurrent language model on stretches of text, with all that its recoding needs.

  Attributes:
    rows: streams that training reads side by side.
    noise_seed: of what recoding draws where no key is given; its masks are then the same for every
      row, so that what a text is given does not depend on its place among others.
    classifier: of weak supervision, if that is the signal.
  """

  rows: int
  noise_seed: int
  classifier: Mapping[str, Any] | None

  @property
  def config(self) -> LstmConfig:
    """The configuration of the module."""
    return self.module.config

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    states = self.module.initial_states(1)
    return self.module.init(rng, tokens, tokens, states, recode=False)["params"]

  def init_carry(self) -> Carry:
    """States of zeros for every stream."""
    return self.module.initial_states(self.rows)

  def forward(
    self,
    params: Params,
    batch: Batch,
    *,
    intermediates: Intermediates = OFF,
    rng: jax.Array | None = None,
  ) -> jax.Array:
    """Log-probabilities at every position, [batch, time, vocab], from states of zeros."""
    states = self.module.initial_states(len(batch["tokens"]))
    out = self.run(
      params, states, batch, rng, train=rng is not None, intermediates=intermediates, logits=True
    )
    assert out.logits is not None
    return out.logits

  def valid_mask(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens."""
    return jnp.asarray(batch["counted"]) > 0

  def run(
    self,
    params: Params,
    states: Carry,
    batch: Batch,
    rng: jax.Array | None,
    *,
    train: bool,
    stretch: tuple[jax.Array, int] | None = None,
    measure: bool = False,
    logits: bool = False,
    intermediates: Intermediates = OFF,
  ) -> Output:
    """What the model makes of a batch.

    Args:
      params: the model's parameters.
      states: from before the first token, of every row.
      batch: `tokens` and `targets` [batch, time], and `label` for weak supervision.
      rng: what is drawn from; without it nothing but what `noise_seed` says.
      train: as in training: with dropout, and recoding as it is set for training.
      stretch: the place of the first token in a longer text, and how long that is: what is drawn
        at every position is what would be drawn there if the text were read at once.
      measure: also measure the error and the losses after recoding.
      logits: also return log-probabilities.
      intermediates: sites to read or change.

    Raises:
      UserError: the signal is weak supervision, and the batch has no labels.
    """
    recoding = self.config.recoding
    key = jax.random.key(self.noise_seed) if rng is None else rng
    shape = batch["tokens"].shape
    start, longest = (0, shape[1]) if stretch is None else stretch
    noise, active, keys = jax.random.fold_in(key, _NOISE), None, None
    if recoding.only or recoding.share < 1:
      chosen = _active(recoding, jax.random.fold_in(key, _SHARE), longest)
      chosen = jax.lax.dynamic_slice_in_dim(chosen, start, shape[1])
      active = jnp.broadcast_to(chosen[None], shape)
    if recoding.signal == "mc_dropout" and stretch is not None:
      keys = jax.random.key_data(jax.random.split(noise, longest))
      keys = jax.lax.dynamic_slice_in_dim(keys, start, shape[1])
    out: Any = self.module.apply(
      {"params": params},
      jnp.asarray(batch["tokens"]),
      jnp.asarray(batch["targets"]),
      states,
      rng=rng if train else None,
      recode=recoding.applies(train=train),
      given=Given(
        active,
        self._labels(batch),
        self._weights(),
        noise,
        keys,
        jnp.asarray(batch["counted"]) > 0 if "counted" in batch else None,
        alike=rng is None,
      ),
      measure=measure,
      logits=logits,
      intermediates=intermediates.editing(self.edits),
    )
    return out

  def prepare(
    self, params: Params, prompts: Prompts, config: DecodeConfig, length: int
  ) -> Searched:
    """What a search takes; states are recoded at every step, as in use."""
    errors.check(
      config.recode_layer is None,
      f"recode_layer is {config.recode_layer}, but it is of decoders with layers of attention; a"
      " recurrent model recodes as its own configuration says (--recoding). Leave it out.",
    )
    tokens, lengths, last = prompts
    cache = self.prefill(params, tokens, lengths, last, beams=config.width, length=length)
    longest = tokens.shape[1] + length

    def step(cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
      return self.step(params, cache, tokens, longest=longest)

    return Searched(step, cache, ())

  def prefill(
    self,
    params: Params,
    tokens: Int[Array, "batch time"],
    lengths: Int[Array, " batch"],
    last: Int[Array, " batch"],
    *,
    beams: int,
    length: int,
    intermediates: Intermediates = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts: leaves [batch, beams, ...].

    A signal that looks at the target recodes a state once the token after it is known, so that the
    token read last waits for the next one.

    Args:
      params: the model's parameters.
      tokens: prompts without their last tokens, padded at the end.
      lengths: how many tokens of each.
      last: last tokens of the prompts, the first of `step`.
      beams: hypotheses an example.
      length: most steps.
      intermediates: sites to change.
    """
    longest = tokens.shape[1] + length

    def read(tokens: jax.Array, count: jax.Array, last: jax.Array) -> Carry:
      targets = jnp.where(jnp.arange(len(tokens)) + 1 < count, jnp.roll(tokens, -1), last)

      def advance(states: Carry, given: tuple[jax.Array, ...]) -> tuple[Carry, None]:
        place, token, target = given
        after = self._one(params, states, token, target, place, longest, intermediates).states
        return jax.tree.map(lambda a, b: jnp.where(place < count, a, b), after, states), None

      xs = (jnp.arange(len(tokens)), tokens, targets)
      return jax.lax.scan(advance, self.module.initial_states(1), xs)[0]

    def beam_by_beam(leaf: jax.Array) -> jax.Array:
      return jnp.broadcast_to(leaf[:, None], (len(leaf), beams, *leaf.shape[1:]))

    return {
      "states": jax.tree.map(beam_by_beam, jax.vmap(read)(tokens, lengths, last)),
      "place": beam_by_beam(lengths),
      "waiting": jnp.full((len(tokens), beams), -1, jnp.int32),
    }

  def step(
    self,
    params: Params,
    cache: Mapping[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    longest: int,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Log-probabilities after one more token of every beam, and the cache that includes it.

    Args:
      params: the model's parameters.
      cache: of `prefill`, or of the step before.
      tokens: what every beam reads.
      longest: positions of prompts and steps together.
      intermediates: sites to change.
    """
    recoding = self.config.recoding
    # The most probable token, which `argmax` looks at, is known at once.
    waits = recoding.supervised and recoding.signal != "argmax" and recoding.applies(train=False)

    def one(own: Mapping[str, Any], token: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
      states, place, waiting = own["states"], own["place"], own["waiting"]
      if waits:
        some = jnp.maximum(waiting, 0)
        after = self._one(params, states, some, token, place, longest, intermediates).states
        states = jax.tree.map(lambda a, b: jnp.where(waiting >= 0, a, b), after, states)
        place, waiting = place + (waiting >= 0), token
      out = self._one(params, states, token, token, place, longest, intermediates, logits=True)
      assert out.logits is not None
      if not waits:
        states, place = out.states, place + 1
      return out.logits[0, 0], {"states": states, "place": place, "waiting": waiting}

    own = {name: cache[name] for name in ("states", "place", "waiting")}
    return jax.vmap(jax.vmap(one))(own, tokens)

  def _one(
    self,
    params: Params,
    states: Carry,
    token: jax.Array,
    target: jax.Array,
    place: jax.Array,
    longest: int,
    intermediates: Intermediates,
    *,
    logits: bool = False,
  ) -> Output:
    """One token of one text."""
    batch = {"tokens": token.reshape(1, 1), "targets": target.reshape(1, 1)}
    return self.run(
      params,
      states,
      batch,
      None,
      train=False,
      stretch=(place, longest),
      logits=logits,
      intermediates=intermediates,
    )

  def _labels(self, batch: Batch) -> jax.Array | None:
    errors.check(
      self.classifier is None or "label" in batch,
      "The model recodes by weak supervision, which needs a label for every text; none is known"
      " here. Switch recoding off (--recoding signal=none).",
    )
    return jnp.asarray(batch["label"], jnp.float32) if "label" in batch else None

  def _weights(self) -> dict[str, jax.Array] | None:
    if self.classifier is None:
      return None
    return {name: jnp.asarray(value, jnp.float32) for name, value in self.classifier.items()}


def _active(recoding: RecodingConfig, key: jax.Array, time: int) -> jax.Array:
  """Which of the time steps of a stretch are recoded, 0 or 1."""
  drawn = jax.random.uniform(key, (time,) if recoding.limit == "steps" else ())
  active = jnp.broadcast_to(drawn < recoding.share, (time,))
  if recoding.only:
    active = active & jnp.isin(jnp.arange(time), jnp.asarray(recoding.only))
  return active.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class StreamLoss:
  """Cross-entropy in nats per token, with states carried on from batch to batch.

  Where the error signal is an ensemble's, its anchors are another term.

  Attributes:
    dataset: whose training documents the anchors' term is divided by.
  """

  dataset: TextStreams[LanguageModelConfig]

  def weights(self, config: LstmConfig) -> dict[str, float]:
    """Cross-entropy, and the anchors of an ensemble."""
    anchored = config.recoding.signal == "ensemble"
    return {"cross_entropy": 1.0, **({"anchor": 1.0} if anchored else {})}

  def __call__(
    self, model: StreamModel, params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    recoding, fresh = model.config.recoding, batch["fresh"] > 0
    states = jax.tree.map(
      lambda leaf: jnp.where(fresh.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf), carry
    )
    out = model.run(
      params, states, batch, context.rng, train=context.train, intermediates=context.intermediates
    )
    counted = batch["counted"] > 0
    nll, count = jnp.sum(jnp.where(counted, out.nll, 0)), jnp.sum(counted).astype(jnp.float32)
    terms = {"cross_entropy": Term(nll, count)}
    metrics: Metrics = {"nll": (nll, count)}
    if recoding.signal == "ensemble":
      tables, documents = (params["decoder"], params["anchor"]), self.dataset.documents("train")
      value = anchor_loss(recoding.anchor, *tables, documents)
      terms["anchor"] = Term(value, jnp.float32(1))
    if "error" in out.steps:
      metrics["recoding/error"] = (jnp.sum(jnp.where(counted, out.steps["error"], 0)), count)
    if recoding.step != "constant":
      for number, sizes in enumerate(out.steps.get("sizes", ())):
        for kind, size in zip(("hidden", "cell"), sizes, strict=True):
          name = f"recoding/size/layer_{number}/{kind}"
          metrics[name] = (jnp.sum(size), jnp.float32(size.size))
    return terms, jax.lax.stop_gradient(out.states), metrics


def _token_scores(model: StreamModel, params: Params, batch: Batch) -> dict[str, jax.Array]:
  """What `Scored` holds of every token of texts, each read from states of zeros."""
  states = model.module.initial_states(len(batch["tokens"]))
  out = model.run(params, states, batch, None, train=False, measure=True)
  some = {name: value for name, value in out.steps.items() if name != "sizes"}
  return {"nll": out.nll, **some}


def _sums(
  model: StreamModel, params: Params, states: Carry, batch: Batch, key: jax.Array
) -> tuple[jax.Array, Carry]:
  """Sums of loss, tokens, error; and the states after."""
  out = model.run(params, states, batch, key, train=False)
  counted = batch["counted"] > 0
  values = out.nll, jnp.ones_like(out.nll), out.steps.get("error", jnp.zeros_like(out.nll))
  return jnp.stack([jnp.sum(jnp.where(counted, value, 0)) for value in values]), out.states


@dataclasses.dataclass(frozen=True)
class StreamPerplexity:
  """Loss and perplexity of a split, read in order with its states carried on."""

  metric: str = "perplexity"
  units: str = (
    "Loss: nats per token; perplexity per token and per word between blanks. The end of every"
    " sentence or document counts as a token and as a word." + UNKNOWN
  )

  def __call__(self, scoring: Scoring["LanguageModel"]) -> Iterator[tuple[str, Any]]:
    """See `Evaluator`."""
    task = scoring.task
    run, model, dataset = task.model.jit(_sums), task.model, task.dataset
    states, totals = None, np.zeros(3)
    for number, batch in enumerate(scoring.batches()):
      states = model.module.initial_states(len(batch["index"])) if states is None else states
      key = jax.random.fold_in(jax.random.key(model.noise_seed), number)
      found, states = run(scoring.params, states, scoring.sharing.place(batch), key)
      totals += np.asarray(fetch(found), np.float64)
    nll, tokens, error = (float(x) for x in totals)
    words = count_words(dataset.config.data.load(scoring.split), dataset.tokenizer)
    yield "tokens", int(tokens)
    yield "loss", nll / tokens
    yield "perplexity", float(np.exp(nll / tokens))
    yield "word_perplexity", float(np.exp(nll / words))
    yield "unknown", dataset.unknown(scoring.split)
    if model.config.recoding.applies(train=False):
      yield "error", error / tokens


class LanguageModel(Task[TextStreams[LanguageModelConfig], StreamModel, TextGenerator]):
  """A language modelling task; made by `LanguageModelConfig.build`."""

  def recoding(self, **changes: object) -> "LanguageModel":
    """The same task, whose recoding differs in some fields."""
    config = self.model.config
    config = dataclasses.replace(config, recoding=dataclasses.replace(config.recoding, **changes))
    module = config.recurrent(self.model.module.vocab)
    return dataclasses.replace(self, model=dataclasses.replace(self.model, module=module))
