"""Modulated models with other auxiliary tokens or other gates, all in one compiled program."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.analysis.gates.reading import GatedTask
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.losses import token_nll
from compmod_jax.core.types import Params
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.dataset import GENERAL, MULTIPLE_CHOICE
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tokenized import QuestionTokenizer
from compmod_jax.decoding import DecodeConfig, Decoded
from compmod_jax.models.nemot import GATE, NemotConfig
from compmod_jax.tasks.answerer import search_answers
from compmod_jax.tasks.base import Batch, Sharing, Task
from compmod_jax.tasks.causal_lm import CausalLM, CausalModel
from compmod_jax.tasks.question_answering import Answering, QuestionModel

M = TypeVar("M", bound=CausalModel | QuestionModel)

TOKEN, TOKEN_AND_SET = "task token swapped", "token and output set swapped"
FROZEN, REMOVED = "frozen at its mean", "removed"


class Change(NamedTuple):
  """What is done to a model while it runs; arrays alone, so that nothing is compiled again.

  Attributes:
    ids: the auxiliary token that takes the place of each, int32 [auxiliary tokens].
    keep: site -> whether its gate stays as it is, bit for bit.
    filling: site -> the gate that takes its place, one number a channel, above 0.
  """

  ids: jax.Array
  keep: dict[str, jax.Array]
  filling: dict[str, jax.Array]


class Variant(NamedTuple):
  """A model that is compared with the one that was trained.

  Attributes:
    name: a few words.
    change: of tokens and gates.
    run_as: task -> the task as which its questions run, output set and all.
  """

  name: str
  change: Change
  run_as: Mapping[str, str]


def gated_task(task: Task) -> tuple[GatedTask, NemotConfig]:
  """The task, and the configuration of its model.

  Raises:
    UserError: the model has no gate, or the task is neither question answering nor language
      modelling.
  """
  config = task.model.config
  if not isinstance(config, NemotConfig) or config.gate_site() is None:
    raise errors.UserError(
      "The model has no gate; this analysis needs a NemotConfig whose gate is on. Choose another"
      f" workdir. ({task.describe()})"
    )
  if not isinstance(task, Answering | CausalLM):
    raise errors.UserError(
      f"The task is a {type(task).__name__}; gates are read in question answering and in language"
      " modelling by decoders. Choose another workdir."
    )
  return task, config


def gate_sites(config: NemotConfig) -> tuple[str, ...]:
  """The sites of all gates of a model, that of the vanilla set's output first."""
  return (GATE, *(f"gates/{place}" for place in config.gate_places))


def swaps(given: Sequence[str], task: GatedTask, config: NemotConfig) -> dict[str, str]:
  """Task -> the task as which its texts are run.

  Args:
    given: as TASK=OTHER; nothing: mqa and gqa for each other, if the task answers questions and
      the model has both.
    task: the task.
    config: of its model.

  Raises:
    UserError: a task that the model does not have.
  """
  if not given:
    both = {MULTIPLE_CHOICE: GENERAL, GENERAL: MULTIPLE_CHOICE}
    return both if isinstance(task, Answering) and set(both) <= set(config.tasks) else {}
  found = {}
  for pair in given:
    name, equals, other = pair.partition("=")
    errors.check(bool(equals), f"--task has {pair!r}; give TASK=OTHER, for example mqa=gqa.")
    for one in (name, other):
      errors.check_choice("a task of --task", one, config.tasks)
    found[name] = other
  return found


def edits_of(change: Change) -> dict[str, Edit]:
  """The edits that put other gates in place."""
  found: dict[str, Edit] = {}
  for site, keep in change.keep.items():
    filling = jnp.log(change.filling[site]) if _logarithmic(site) else change.filling[site]
    found[site] = jax.tree_util.Partial(_replace, keep, filling)
  return found


def _replace(keep: jax.Array, filling: jax.Array, value: jax.Array) -> jax.Array:
  """`value` [..., width] or the filling [width] in its place."""
  filling = filling.reshape(*(1,) * (value.ndim - 1), -1).astype(value.dtype)
  return jnp.where(keep, value, jnp.broadcast_to(filling, value.shape))


def _logarithmic(site: str) -> bool:
  return site.endswith("/logits")


def changed(model: M, change: Change) -> M:
  """The model of a task behind other auxiliary tokens and with other gates."""
  return dataclasses.replace(model.edited(edits_of(change)), swapped=change.ids)


def relabelled(batch: Batch, run_as: Mapping[str, str]) -> dict[str, Any]:
  """A batch of one task as one of another, so that it runs through that one's output set."""
  ((name, _),) = blocks_of(batch)
  renamed = {f"rows/{name}": f"rows/{run_as.get(name, name)}"}
  return {renamed.get(key, key): value for key, value in batch.items()}


class Runner:
  """Runs changed models on texts; one program for every shape of a batch.

  Attributes:
    task: the task.
    config: of its model.
    widths: site of a gate -> its channels.
    trained: the variant without any change.
  """

  def __init__(self, subject: Subject):
    self.subject = subject
    self.task, self.config = gated_task(subject.task)
    self.widths = {
      site: self.config.heads if _logarithmic(site) else self.config.dim
      for site in gate_sites(self.config)
    }
    nothing = Change(
      jnp.arange(len(self.config.auxiliary), dtype=jnp.int32),
      {site: jnp.array(True) for site in self.widths},
      {site: jnp.ones(width) for site, width in self.widths.items()},
    )
    self.trained = Variant("as trained", nothing, {})
    self._forward = jax.jit(self._run)

  def __call__(self, batch: Batch, variant: Variant) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses in nats of every token after the first [batch, time], and gates as they were used."""
    if variant.run_as:
      batch = relabelled(batch, variant.run_as)
    return self._forward(self.subject.params, self.subject.place(batch), variant.change)

  def _run(
    self, params: Params, batch: Batch, change: Change
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    intermediates = Intermediates(capture=frozenset(self.widths))
    logits = changed(self.task.model, change).forward(params, batch, intermediates=intermediates)
    gates = {s: jnp.exp(g) if _logarithmic(s) else g for s, g in intermediates.captured.items()}
    return token_nll(logits, jnp.asarray(batch["tokens"])[:, 1:]), gates


def variants(
  runner: Runner, means: Mapping[str, np.ndarray], run_as: Mapping[str, str]
) -> list[Variant]:
  """The model as trained, and all that is compared with it.

  Args:
    runner: knows the model.
    means: site -> mean of every channel of its gate.
    run_as: of `swaps`.
  """
  trained, config = runner.trained.change, runner.config
  found = [runner.trained]
  if run_as:
    ids = [config.auxiliary.index(run_as.get(name, name)) for name in config.auxiliary]
    swapped = trained._replace(ids=jnp.asarray(ids, jnp.int32))
    found.append(Variant(TOKEN, swapped, {}))
    if isinstance(runner.task, Answering):  # running text has one output set alone
      found.append(Variant(TOKEN_AND_SET, trained, run_as))
  gone = {site: jnp.array(False) for site in means}
  frozen = {site: jnp.asarray(mean, jnp.float32) for site, mean in means.items()}
  found.append(Variant(FROZEN, trained._replace(keep=gone, filling=frozen), {}))
  found.append(Variant(REMOVED, trained._replace(keep=gone), {}))
  for site in means if len(means) > 1 else ():
    alone = trained._replace(keep={**trained.keep, site: gone[site]})
    found.append(Variant(f"{site} alone {REMOVED}", alone, {}))
  return found


def _search_changed(
  model: QuestionModel,
  params: tuple[Params, Change],
  batch: Batch,
  rng: jax.Array,
  *,
  question_tokenizer: QuestionTokenizer,
  room: int,
  config: DecodeConfig,
) -> Decoded:
  """As `search_answers`; `params` are a pair of the model's own and a `Change`."""
  own, change = params
  return search_answers(
    changed(model, change),
    own,
    batch,
    rng,
    question_tokenizer=question_tokenizer,
    room=room,
    config=config,
  )


def answers(
  subject: Subject, questions: Sequence[Question], variant: Variant, name: str
) -> list[str]:
  """The answer of a changed model to every question, searched for as the task does.

  Args:
    subject: a model whose task is question answering.
    questions: of the tasks that the model has.
    variant: the change.
    name: what the progress display calls the questions.
  """
  task: Answering = subject.task  # pyright: ignore[reportAssignmentType]
  sharing = subject.sharing
  if variant.run_as:
    sharing = Sharing(lambda b: subject.place(relabelled(b, variant.run_as)), sharing.multiple)
  found = task.generator(
    task.model,
    (subject.params, variant.change),
    questions,
    sharing=sharing,
    status=subject.status,
    name=name,
    search=_search_changed,
  )
  return [best[0].text for best in found]
