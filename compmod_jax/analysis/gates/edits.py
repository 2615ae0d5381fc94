"""Modulated models with other auxiliary tokens or other gates, all in one compiled program."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.gates.reading import GatedTask
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.intermediates import Edit, Taps
from compmod_jax.core.losses import token_nll
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.example import Question
from compmod_jax.models.nemot_config import NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks import modulated
from compmod_jax.tasks.answer_tokens import MULTIPLE_CHOICE
from compmod_jax.tasks.answerer import Answerer
from compmod_jax.tasks.base import Batch, Sharing
from compmod_jax.tasks.causal_lm import CausalLM
from compmod_jax.tasks.question_answering import Answering

TOKEN, TOKEN_AND_SET = "task token swapped", "token and output set swapped"
FROZEN, REMOVED = "frozen at its mean", "removed"
_GENERAL = "gqa"


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


def gated_task(task: Any) -> tuple[GatedTask, NemotConfig]:
  """The task, and the configuration of its model.

  Raises:
    UserError: the model has no gate, or the task is neither question answering nor language
      modelling.
  """
  config = task.model.config
  errors.check(
    modulated.gated(config),
    "The model has no gate; this analysis needs a NemotConfig whose gate is on. Choose another"
    f" workdir. ({task.describe()})",
  )
  if not isinstance(task, Answering | CausalLM):
    raise errors.UserError(
      f"The task is a {type(task).__name__}; gates are read in question answering and in language"
      " modelling by decoders. Choose another workdir."
    )
  return task, config


def gate_sites(config: NemotConfig) -> tuple[str, ...]:
  """The sites of all gates of a model, that of the vanilla set's output first."""
  return (modulated.GATE, *(f"gates/{place}" for place in config.gate_places))


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
    both = {MULTIPLE_CHOICE: _GENERAL, _GENERAL: MULTIPLE_CHOICE}
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


def _with_auxiliary(text: Text, ids: jax.Array) -> Text:
  """The text behind other auxiliary tokens."""
  return text._replace(auxiliary=jnp.take(ids, jnp.asarray(text.auxiliary)))


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

  def _run(self, params: PyTree, batch: Batch, change: Change) -> tuple[jax.Array, Any]:
    taps = Taps(capture=frozenset(self.widths), edits=edits_of(change))
    task: Any = copy.copy(self.task)
    task.text = lambda *given: _with_auxiliary(self.task.text(*given), change.ids)
    logits = task.forward(params, batch, taps=taps)
    gates = {s: jnp.exp(g) if _logarithmic(s) else g for s, g in taps.captured.items()}
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


class Search(Answerer):
  """Answers of changed models: parameters are a pair of the model's own and a `Change`."""

  def _search(self, params: PyTree, batch: Batch, rng: jax.Array, *, config: Any) -> Any:
    own, change = params
    one = copy.copy(self)
    one.text = lambda batch, tokens: _with_auxiliary(self.text(batch, tokens), change.ids)
    one.taps = Taps(edits={**self.taps.edits, **edits_of(change)})
    return Answerer._search(one, own, batch, rng, config=config)

  def answers(
    self, subject: Subject, questions: Sequence[Question], variant: Variant, name: str
  ) -> list[str]:
    """The answer of a changed model to every question."""
    sharing = subject.sharing
    if variant.run_as:
      sharing = Sharing(lambda b: subject.place(relabelled(b, variant.run_as)), sharing.multiple)
    given, decode = (subject.params, variant.change), subject.task.decode
    assert decode is not None
    found = self(given, questions, decode, sharing=sharing, status=subject.status, name=name)
    return [best[0].text for best in found]


def search(task: Answering) -> Search:
  """Searches as the task's own answerer does."""
  own = task.answerer
  return Search(
    own.model, own.coder, own.room, own.text, edges=own.edges, rows=own.rows, edits=task.edits
  )
