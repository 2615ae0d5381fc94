"""Language modelling with recurrent state: streams of text in, loss per token out."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term
from compmod_jax.core.sharding import fetch
from compmod_jax.data.fingerprint import Fingerprints
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.mechanisms.recoding.anchors import anchor_loss
from compmod_jax.models.lstm_lm import LstmConfig, LstmLM
from compmod_jax.tasks.base import (
  Batch,
  Context,
  Evaluation,
  Metrics,
  OfSplits,
  Sharing,
  Status,
  silent,
)
from compmod_jax.tasks.generator import Generator, Prompts
from compmod_jax.tasks.language_model_config import CLASSIFIER_FILE, LanguageModelConfig
from compmod_jax.tasks.recoded_step import Searched
from compmod_jax.tasks.recurrent_reader import RecurrentReader
from compmod_jax.tasks.scorer import Scorer
from compmod_jax.tasks.text_streams import TextStreams
from compmod_jax.tasks.text_tokenizer import FILE, UNKNOWN, count_words

__all__ = ["LanguageModel", "LanguageModelConfig"]


class LanguageModel(OfSplits):
  """A language modelling task; see `LanguageModelConfig` and the contract in `tasks.base`.

  Batches are those of `data.streams`. The carry is the recurrent state of every row, which starts
  from zeros in every epoch.

  Attributes:
    config: the task's configuration.
    model: the LSTM.
    tokenizer: from text to tokens.
    streams: the data.
    classifier: of weak supervision, if that is the signal.
    edits: site -> change of that activation, wherever the model runs.
  """

  decode = None

  def __init__(
    self,
    config: LanguageModelConfig,
    model: LstmConfig,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    classifier: Mapping[str, Any] | None = None,
    edits: Mapping[str, Edit] | None = None,
  ):
    self.config, self.tokenizer, self.edits = config, tokenizer, dict(edits or {})
    self.model, self.classifier = LstmLM(model, tokenizer.vocab_size), classifier
    if classifier is not None:
      errors.check(
        len(classifier["weight"]) == model.dim,
        f"The classifier of weak supervision reads states of width {len(classifier['weight'])}, but"
        f" model.dim is {model.dim}; train one on a model of this width.",
      )
    labelled = model.recoding.signal == "weak_supervision"
    self.streams = TextStreams(config, tokenizer, cache, labelled=labelled)
    self._run = RecurrentReader(self.model, config.noise_seed, classifier, self.edits)
    self._scores = jax.jit(self._score)

  def edited(self, edits: Mapping[str, Edit]) -> "LanguageModel":
    """The same task with activations changed at these sites besides those of `self.edits`."""
    return self._with(self.model.config, {**self.edits, **edits})

  def decoding(self, decode: Any) -> "LanguageModel":
    """Raises a `UserError`: a language model is scored, not searched."""
    raise errors.UserError(
      "A recurrent language model does not search for its outputs; leave decoding options out."
    )

  # Words.

  @property
  def metric(self) -> str:
    """Perplexity per token."""
    return "perplexity"

  def describe(self) -> str:
    """One sentence on model and data."""
    return f"LSTM language model, {self.model.config.describe()}; {self.config.data.describe()}."

  def describe_batches(self) -> str:
    """What a training batch holds, in a few words."""
    return f"batches of {self.config.rows} streams, {self.config.length} tokens of each"

  def describe_scores(self) -> str:
    """What loss and perplexity are per."""
    return (
      "Loss: nats per token; perplexity per token and per word between blanks. The end of every"
      " sentence or document counts as a token and as a word." + UNKNOWN
    )

  def resolved_config(self) -> LanguageModelConfig:
    """The configuration; nothing in it is chosen from the training data."""
    return self.config

  def files(self) -> dict[str, bytes]:
    """The tokenizer, and the classifier of weak supervision."""
    found = {FILE: self.tokenizer.to_bytes()}
    if self.classifier is not None:
      found[CLASSIFIER_FILE] = json.dumps(dict(self.classifier)).encode()
    return found

  # Data.

  def check_data(self) -> None:
    """Loads every split that will be scored, and that of training.

    Raises:
      UserError: one is missing, damaged or empty.
    """
    for split in self.split_names():
      self.streams[split]

  def data_notes(self) -> list[str]:
    """How much training text there is, and how many tokens."""
    tokens = len(self.streams["train"])
    return [f"{tokens:,} training tokens, {self.tokenizer.vocab_size:,} types"]

  def fingerprints(self) -> Fingerprints:
    """Of the training text, and of its documents' labels where they are trained on."""
    return self.streams.fingerprints()

  def train_batches(
    self, *, part: str = "all", seed: int, multiple: int, process: int = 0, processes: int = 1
  ) -> tuple[Any, int]:
    """An endless iterator over stretches in order, and how many make an epoch; no seed matters."""
    return self.streams.train_batches(part, multiple, process, processes)

  def eval_batches(self, split: str, *, multiple: int = 1) -> Iterator[Batch]:
    """The stretches of a split in order, as they are scored."""
    return self.streams.eval_batches(split, multiple)

  def example(self) -> dict[str, jax.Array]:
    """The smallest batch that the model takes, to trace it with."""
    one = jnp.full((1, 2), self.tokenizer.eos, jnp.int32)
    return {"tokens": one, "targets": one, "index": jnp.arange(1), "label": jnp.zeros((1, 2))}

  # Model.

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    batch = self.example()
    states = self.model.initial_states(1)
    return self.model.init(rng, batch["tokens"], batch["targets"], states, recode=False)["params"]

  def init_carry(self) -> Any:
    """States of zeros for every stream."""
    return self.model.initial_states(self.config.rows)

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """Log-probabilities at every position, [batch, time, vocab], from states of zeros."""
    states = self.model.initial_states(len(batch["tokens"]))
    out = self._run(params, states, batch, rng, train=rng is not None, taps=taps, logits=True)
    assert out.logits is not None
    return out.logits

  def recoding(self, **changes: Any) -> "LanguageModel":
    """The same task, whose recoding differs in some fields."""
    recoding = dataclasses.replace(self.model.config.recoding, **changes)
    return self._with(dataclasses.replace(self.model.config, recoding=recoding), self.edits)

  def _with(self, model: LstmConfig, edits: Mapping[str, Edit]) -> "LanguageModel":
    cache = self.streams.cache
    return LanguageModel(self.config, model, self.tokenizer, cache, self.classifier, edits)

  @functools.cached_property
  def scorer(self) -> Scorer:
    """Scores texts one by one; see `Scorer`."""

    def run(params: Any, batch: Batch) -> dict[str, jax.Array]:
      states = self.model.initial_states(len(batch["tokens"]))
      out = self._run(params, states, batch, None, train=False, measure=True)
      some = {name: value for name, value in out.steps.items() if name != "sizes"}
      return {"nll": out.nll, **some}

    return Scorer(self.tokenizer, run)

  @functools.cached_property
  def generator(self) -> Generator:
    """Continues texts; see `Generator`."""
    return Generator(self.tokenizer, self._prepare)

  def _prepare(self, params: Any, prompts: Prompts, config: DecodeConfig, length: int) -> Searched:
    """What a search takes; states are recoded at every step, as in use."""
    errors.check(
      config.recode_layer is None,
      f"recode_layer is {config.recode_layer}, but it is of decoders with layers of attention; a"
      " recurrent model recodes as its own configuration says (--recoding). Leave it out.",
    )
    tokens, lengths, last = prompts
    cache = self._run.prefill(params, tokens, lengths, last, beams=config.width, length=length)
    longest = tokens.shape[1] + length

    def step(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
      return self._run.step(params, cache, tokens, longest=longest)

    return Searched(step, cache, ())

  def routing_sites(self) -> list[str]:
    """Nothing: no unit competes."""
    return []

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens."""
    return jnp.asarray(batch["counted"]) > 0

  def start_tokens(self, site: str) -> int:
    """None: a stretch may begin anywhere in a text."""
    return 0

  def objective(self) -> dict[str, float]:
    """Cross-entropy, and the anchors of an ensemble."""
    anchored = self.model.config.recoding.signal == "ensemble"
    return {"cross_entropy": 1.0, **({"anchor": 1.0} if anchored else {})}

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """Cross-entropy in nats per token, and the states to go on from."""
    fresh = batch["fresh"] > 0
    states = jax.tree.map(
      lambda leaf: jnp.where(fresh.reshape(-1, *(1,) * (leaf.ndim - 1)), 0, leaf), carry
    )
    out = self._run(params, states, batch, context.rng, train=context.train)
    counted = batch["counted"] > 0
    nll, count = jnp.sum(jnp.where(counted, out.nll, 0)), jnp.sum(counted).astype(jnp.float32)
    terms = {"cross_entropy": Term(nll, count)}
    found: Metrics = {"nll": (nll, count)}
    if self.model.config.recoding.signal == "ensemble":
      config = self.model.config.recoding.anchor
      value = anchor_loss(
        config, params["decoder"], params["anchor"], self.streams.documents("train")
      )
      terms["anchor"] = Term(value, jnp.float32(1))
    if "error" in out.steps:
      found["recoding/error"] = (jnp.sum(jnp.where(counted, out.steps["error"], 0)), count)
    if self.model.config.recoding.step != "constant":
      for number, sizes in enumerate(out.steps.get("sizes", ())):
        for kind, size in zip(("hidden", "cell"), sizes, strict=True):
          name = f"recoding/size/layer_{number}/{kind}"
          found[name] = (jnp.sum(size), jnp.float32(size.size))
    return terms, jax.lax.stop_gradient(out.states), found

  def evaluate(
    self,
    params: Any,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Loss and perplexity of a split, read in order with its states carried on.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: of no importance: nothing is put out.
      status: shows progress.
    """
    batches = list(self.eval_batches(split, multiple=sharing.multiple))
    states = self.model.initial_states(len(batches[0]["index"]))
    totals = np.zeros(3)
    for number, batch in enumerate(batches):
      key = jax.random.fold_in(jax.random.key(self.config.noise_seed), number)
      found, states = self._scores(params, states, sharing.place(batch), key)
      totals += np.asarray(fetch(found), np.float64)
      status(f"loss on {split}", number + 1, len(batches))
    nll, tokens, error = (float(x) for x in totals)
    words = count_words(self.config.data.load(split), self.tokenizer)
    values = {
      "tokens": int(tokens),
      "loss": nll / tokens,
      "perplexity": float(np.exp(nll / tokens)),
      "word_perplexity": float(np.exp(nll / words)),
      "unknown": self.streams.unknown(split),
    }
    if self.model.config.recoding.applies(train=False):
      values["error"] = error / tokens
    return Evaluation(values, [], [], [])

  def _score(self, params: Any, states: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
    """Sums of loss, tokens, error; and the states after."""
    out = self._run(params, states, batch, key, train=False)
    counted = batch["counted"] > 0
    values = out.nll, jnp.ones_like(out.nll), out.steps.get("error", jnp.zeros_like(out.nll))
    return jnp.stack([jnp.sum(jnp.where(counted, value, 0)) for value in values]), out.states
