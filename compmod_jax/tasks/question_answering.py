"""Question answering: questions in one text format in, generated answers out."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.losses import Term, cross_entropy, token_nll
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.tokenized import Coder
from compmod_jax.data.qa.unified import QUESTION
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot_config import OUTPUT, NemotConfig
from compmod_jax.models.text import Text, TextOutput
from compmod_jax.tasks import answer_tokens, competing, modulated
from compmod_jax.tasks.answer_scores import scores, source_text
from compmod_jax.tasks.answerer import Answerer
from compmod_jax.tasks.base import (
  Batch,
  Context,
  Evaluation,
  Metrics,
  Sharing,
  Status,
  silent,
  total_losses,
)
from compmod_jax.tasks.of_questions import OfQuestions
from compmod_jax.tasks.question_answering_config import AnsweringConfig
from compmod_jax.tasks.question_batches import QuestionBatches
from compmod_jax.tasks.translator import mean_entropy

__all__ = ["Answering", "AnsweringConfig"]


class Answering(OfQuestions):
  """A question answering task; see `AnsweringConfig` and the contract in `tasks.base`.

  Batches are those of `data.qa.batches`: rows in blocks of one task each. Logits are those of every
  token after the first.

  Attributes:
    edits: site -> change of that activation, wherever the model runs.
  """

  def __init__(
    self,
    config: AnsweringConfig,
    model: NemotConfig | DecoderConfig,
    tokenizer: Tokenizer,
    edits: Mapping[str, Edit] | None = None,
  ):
    errors.check(
      config.length <= model.max_length,
      f"task.length is {config.length} but model.max_length is {model.max_length}; every token"
      " needs a position. Raise model.max_length.",
    )
    errors.check(
      config.turns == 1 or not getattr(model, "option_interaction", False),
      f"task.turns is {config.turns} but model.option_interaction is on, which is for one question"
      " a row. Set task.turns = 1.",
    )
    self.config, self.tokenizer, self.edits = config, tokenizer, dict(edits or {})
    self.tagged = isinstance(model, NemotConfig) and model.highlighting != "off"
    self.coder = Coder(tokenizer, config.length, config.truncate, tagged=self.tagged)
    self.model = modulated.build(model, tokenizer.vocab_size, tokenizer.pad)
    tasks = model.tasks if isinstance(model, NemotConfig) else None
    self.asked = QuestionBatches(config, self.coder, tasks)
    self._sums = jax.jit(self._answer_sums)

  def edited(self, edits: Mapping[str, Edit]) -> "Answering":
    """The same task with activations changed at these sites besides those of `self.edits`."""
    return self._with(self.config, {**self.edits, **edits})

  def decoding(self, decode: DecodeConfig) -> "Answering":
    """The same task, whose answers are searched for in another way."""
    return self._with(dataclasses.replace(self.config, decode=decode), self.edits)

  def _with(self, config: AnsweringConfig, edits: Mapping[str, Edit]) -> "Answering":
    new = Answering(config, self.model.config, self.tokenizer, edits)
    new.asked = self.asked  # what is edited or searched for changes no token
    return new

  def init(self, rng: jax.Array) -> Any:
    """Fresh parameters, boxed with the logical names of their dimensions."""
    batch = self.example()
    text = self.text(batch, batch["tokens"])
    return self.model.init(rng, text, blocks_of(batch), vanilla_logits=True)["params"]

  def init_carry(self) -> tuple[()]:
    """Nothing: the model has no recurrent state."""
    return ()

  def idle(self, batch: Batch) -> tuple[str, ...]:
    """Parameters of the output sets whose tasks a batch does not have."""
    config, there = self.model.config, {task for task, _ in blocks_of(batch)}
    tasks = config.tasks if isinstance(config, NemotConfig) else ()
    away = [task for task in tasks if task not in there]
    return tuple(name for t in away for name in (f"{OUTPUT}_{t}", f"{OUTPUT}_norm_{t}"))

  def text(self, batch: Batch, tokens: jax.Array) -> Text:
    """What the model is given."""
    config, segments = self.model.config, None
    if batch["answer"].shape[1] > 1 or config.convolution > 1:
      # The passage, and every question with its answer, into which no convolution carries it over.
      mark = self.coder.special_ids[QUESTION]
      segments = jnp.cumsum(tokens == mark, axis=1, dtype=jnp.int32)
    if not isinstance(config, NemotConfig):
      return Text(tokens, segments=segments)
    ids = [config.auxiliary_ids("dec", task) for task, n in blocks_of(batch) for _ in range(n)]
    options = None
    if config.option_interaction:
      options = answer_tokens.in_options(batch, tokens.shape[1])
    tags = jnp.asarray(batch["tags"])[:, : tokens.shape[1]] if self.tagged else None
    return Text(tokens, jnp.asarray(ids, jnp.int32), segments, options, tags)

  def _run(
    self,
    params: Any,
    batch: Batch,
    taps: Taps,
    rng: jax.Array | None,
    vanilla_positions: jax.Array | None = None,
  ) -> TextOutput:
    """What the model puts out; of the vanilla set's own head, at positions if there are any."""
    vanilla: dict[str, Any] = {}
    if vanilla_positions is not None:
      vanilla = {"vanilla_logits": True, "vanilla_positions": vanilla_positions}
    out: TextOutput = self.model.apply(  # pyright: ignore[reportAssignmentType]
      {"params": params},
      self.text(batch, jnp.asarray(batch["tokens"])[:, :-1]),
      blocks_of(batch),
      **vanilla,
      deterministic=rng is None,
      taps=taps.editing(self.edits).knowing(lambda site: self.rows(site, batch)),
      rngs=None if rng is None else {"dropout": rng},
    )
    return out

  def forward(
    self, params: Any, batch: Batch, *, taps: Taps = OFF, rng: jax.Array | None = None
  ) -> jax.Array:
    """Logits of every token after the first of a text; with dropout if a key is given."""
    return self._run(params, batch, taps, rng).logits

  def routing_sites(self) -> list[str]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    return list(self.model.routing_sites())

  def rows(self, site: str, batch: Batch) -> jax.Array:
    """Positions that hold real tokens, auxiliary ones where a site has them; a set's own rows."""
    real = (batch["tokens"][:, :-1] != self.tokenizer.pad) & (batch["index"] >= 0)[:, None]
    real, start = modulated.with_auxiliary(self.model.config, site, real), 0
    for task, count in blocks_of(batch):
      if site.startswith(f"{OUTPUT}_{task}/"):
        return real[start : start + count]
      start += count
    return real

  def start_tokens(self, site: str) -> int:
    """None: every text begins with a token of its own."""
    return 0

  def objective(self) -> dict[str, float]:
    """The three losses, and the routers' where their coefficients are not 0."""
    config = self.config
    found = {"answer": config.answer_weight, "sequence": config.sequence_weight}
    if isinstance(self.model.config, NemotConfig):
      found["vanilla"] = config.vanilla_weight
    found = {name: weight for name, weight in found.items() if weight}
    return found | competing.objective(self.model.config)

  def counted(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Which tokens after the first the losses are of; see `answer_tokens.counted`."""
    interacting = getattr(self.model.config, "option_interaction", False)
    return answer_tokens.counted(batch, self.tokenizer, interacting=interacting)

  def loss(
    self, params: Any, carry: Any, batch: Batch, context: Context
  ) -> tuple[dict[str, Term], Any, Metrics]:
    """The three losses in nats per token, and what competition adds.

    Source: Knowles 2022, equations 3.16 and 3.17.
    """
    wanted, rng = self.objective(), context.rng if context.train else None
    config = modulated.for_tasks(self.model.config, blocks_of(batch))
    taps = modulated.loss_taps(config, context)
    labels, (answer, whole) = jnp.asarray(batch["tokens"])[:, 1:], self.counted(batch)
    places = None
    if "vanilla" in wanted:
      places = answer_tokens.places_of(answer, self.asked.longest_answer)
    out = self._run(params, batch, taps, rng, places)
    rows = functools.partial(self.rows, batch=batch)
    terms, found = competing.read(config, taps, rows)
    nll = token_nll(out.logits, labels)
    share = answer_tokens.shares(answer, batch["answer"], self.config.answer_mean)
    losses = {"answer": (nll, share), "sequence": (nll, whole.astype(jnp.float32))}
    if places is not None and out.vanilla is not None:
      own, shares = (jnp.take_along_axis(values, places, axis=1) for values in (labels, share))
      losses["vanilla"] = token_nll(out.vanilla, own), shares
    for name, (values, shares) in losses.items():
      if name in wanted:
        terms[name] = Term(jnp.sum(values * shares), jnp.sum(shares), weight=wanted[name])
    one = cross_entropy(out.logits, labels, answer)
    found |= {"nll": (one.nll, one.count), "accuracy": (one.correct, one.count)}
    return terms, carry, found | modulated.gate_health(config, taps, rows)

  # Evaluation and use.

  def evaluate(
    self,
    params: Any,
    split: str,
    *,
    sharing: Sharing = Sharing(),
    decode: bool | int = True,
    status: Status = silent,
  ) -> Evaluation:
    """Loss of a split's answers, and scores of generated ones; see `describe_scores`.

    Args:
      params: the model's parameters.
      split: name of the split.
      sharing: how batches are laid over devices.
      decode: answer all questions, n of them drawn once and for all, or none.
      status: shows progress.
    """
    batches = self.eval_batches(split, multiple=sharing.multiple)
    nll, correct, tokens = total_losses(self._sums, params, batches, split, sharing, status)
    coded = self.asked[split]
    values: dict[str, Any] = {
      "sentences": len(coded) + len(coded.too_long),
      "truncated": coded.truncated,
      "loss": nll / tokens,
      "accuracy": correct / tokens,
      "unknown": self.asked.unknown(split),
    }
    questions, sets = self.asked.chosen(split, decode)
    if not questions:
      return Evaluation(values, [], [], [])
    answers = self.answerer(
      params, questions, self.decode, sharing=sharing, status=status, name=split
    )
    outputs = [best[0].text for best in answers]
    values |= {"decoded": len(outputs), "search": self.decode.describe()}
    values |= scores(questions, sets, outputs) | mean_entropy(answers)
    sources = [source_text(question) for question in questions]
    return Evaluation(values, outputs, [question.answer for question in questions], sources)

  @functools.cached_property
  def answerer(self) -> Answerer:
    """Answers questions; see `Answerer`."""
    room = self.config.answer_length
    longest = self.config.length - room  # of a prompt
    return Answerer(
      self.model,
      self.coder,
      room,
      self.text,
      edges=tuple(sorted({min(edge, longest) for edge in self.asked.lengths})),
      rows=self.config.batch_questions,
      edits=self.edits,
    )

  def _answer_sums(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    labels, (answer, _) = jnp.asarray(batch["tokens"])[:, 1:], self.counted(batch)
    losses = cross_entropy(self.forward(params, batch), labels, answer)
    return losses.nll, losses.correct, losses.count
