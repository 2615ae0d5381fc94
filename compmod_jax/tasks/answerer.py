"""From questions to answers: batching, jitted search after a prompt, text."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.sharding import fetch
from compmod_jax.data.qa.batches import blocks_of, eval_batches
from compmod_jax.data.qa.example import Question
from compmod_jax.data.qa.tokenized import Coder, code
from compmod_jax.data.qa.unified import SEPARATOR, segments, task_token
from compmod_jax.decoding import DecodeConfig, decode
from compmod_jax.layers.reading_strategies import PARTS
from compmod_jax.models.decoder_lm import DecoderLM
from compmod_jax.models.nemot import Nemot
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks import recoded_step
from compmod_jax.tasks.base import Batch, Sharing, Status, silent
from compmod_jax.tasks.modulated import with_auxiliary


class Answer(NamedTuple):
  """One answer of a model.

  Attributes:
    text: as it was written: `(2)` for the second option; empty for no answer.
    score: log-probability in nats over length ** length_penalty.
    tokens: token numbers, the end token included.
    entropy: of the distributions of all its steps together in nats, before and after recoding, if
      steps are recoded.
  """

  text: str
  score: float
  tokens: np.ndarray
  entropy: np.ndarray | None = None


NONE = Answer("", float("-inf"), np.zeros(0, np.int32))
"""The answer to a question that does not fit the model without its passage."""


class Answerer:
  """Answers questions with a model; keeps one compiled search for each shape of a batch.

  Attributes:
    model: the module.
    coder: from questions to tokens.
    room: most tokens of an answer.
    text: from a batch to the model's input.
    edges: padded lengths of prompts.
    rows: prompts of a batch.
    taps: the edits under which the model runs.
  """

  def __init__(
    self,
    model: Nemot | DecoderLM,
    coder: Coder,
    room: int,
    text: Callable[[Batch, jax.Array], Text],
    *,
    edges: tuple[int, ...],
    rows: int,
    edits: Mapping[str, Edit] | None = None,
  ):
    self.model, self.coder, self.room, self.text = model, coder, room, text
    self.edges, self.rows = edges, rows
    self.taps = OFF.editing(edits or {})
    self._search_for = jax.jit(self._search, static_argnames="config")

  def __call__(
    self,
    params: Any,
    questions: Sequence[Question],
    config: DecodeConfig,
    *,
    sharing: Sharing = Sharing(),
    rng: jax.Array | None = None,
    status: Status = silent,
    name: str = "questions",
  ) -> list[list[Answer]]:
    """The n best answers to every question, in the questions' order.

    Args:
      params: the model's parameters.
      questions: their gold answers are not looked at.
      config: how to search.
      sharing: how batches are laid over devices.
      rng: key for sampling.
      status: shows progress.
      name: what the progress display calls the questions.

    Raises:
      UserError: as `check`.
    """
    for question in questions:
      self.check(question)
    rng = jax.random.key(0) if rng is None else rng
    coded = code([questions], self.coder, self.room)
    found: list[list[Answer]] = [[NONE] for _ in questions]
    batches = eval_batches(
      coded,
      rows=self.rows,
      edges=self.edges,
      pad=self.coder.tokenizer.pad,
      multiple=sharing.multiple,
    )
    done = 0
    for number, batch in enumerate(batches):
      key = jax.random.fold_in(rng, number)
      out = fetch(self._search_for(params, sharing.place(batch), key, config=config))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        found[batch["index"][row]] = self._answers(out, row)
        done += 1
      status(f"answering {name}", done, len(coded))
    return found

  def check(self, question: Question) -> None:
    """Looks whether the model has labels and an output for what is asked.

    A question that does not fit the model is no mistake: its answer is `NONE`.

    Raises:
      UserError: it has more options than there are labels, or none of the model's outputs is for
        questions like it.
    """
    segments(question)
    config, task = self.model.config, task_token(question).strip("<>")
    if isinstance(config, NemotConfig):
      check(
        task in config.tasks,
        f"the question {question.question[:40]!r} is of the task {task!r}, but the model has"
        f" outputs for {', '.join(config.tasks)} alone; leave it out, or ask a model that was"
        " trained on such questions.",
      )

  def _search(self, params: Any, batch: Batch, rng: jax.Array, *, config: DecodeConfig) -> Any:
    ((task, rows),) = blocks_of(batch)
    apply = functools.partial(self.model.apply, {"params": params})
    text, taps = self.text(batch, batch["tokens"]), self.taps
    first: dict[str, Any] = (
      {} if text.tags is None else {"first_tag": jnp.full(rows, PARTS.index("special"))}
    )
    tokens, pad, model = batch["tokens"], self.coder.tokenizer.pad, self.model.config
    before = taps.knowing(lambda site: with_auxiliary(model, site, tokens != pad)).apart()
    cache = apply(
      text, task, beams=config.width, length=self.room, taps=before, method="prefill", **first
    )
    taps = recoded_step.knowing_rows(taps, batch["index"] >= 0, config)

    def step(cache: Any, tokens: jax.Array, taps: Taps) -> Any:
      return apply(cache, tokens, task, taps=taps, method="step")

    tokenizer = self.coder.tokenizer
    side = self.model.config.last_side(task)
    layers = self.model.config.layers(side)
    one = recoded_step.prepared(step, cache, taps, config, batch=rows, side=side, layers=layers)
    return decode(
      one.step,
      one.cache,
      config,
      batch=rows,
      max_length=self.room,
      limit=jnp.where(batch["index"] >= 0, self.room, 0),
      bos=self.coder.special_ids[SEPARATOR],
      eos=tokenizer.eos,
      pad=tokenizer.pad,
      forbidden=tokenizer.never_produced,
      rng=rng,
      record=(lambda cache: {name: cache[name] for name in one.kept}) if one.kept else None,
    )

  def _answers(self, found: Any, row: int) -> list[Answer]:
    """The answers of one row of a decoded batch."""
    entropy, answers = (found.records or {}).get(recoded_step.ENTROPY), []
    for n, length in enumerate(found.lengths[row]):
      tokens = found.tokens[row, n, :length]
      text = self.coder.tokenizer.decode(tokens.tolist()).strip()
      own = None if entropy is None else entropy[row, n]
      answers.append(Answer(text, float(found.scores[row, n]), tokens, own))
    return answers
